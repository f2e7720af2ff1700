# SPDX-License-Identifier: Apache-2.0
"""Makes `resources_servers.caption_qa` importable however pytest is started, and builds rows for the tests."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))


@pytest.fixture
def make_row():
    """`make_row(n)`: metadata with n questions whose right choice is always "blue"."""

    def make(num_questions=3, **fields):
        questions = [
            {
                "id": f"q{i}",
                "question": f"Colour number {i}?",
                "choices": ["red", "blue", "green"],
                "answer": 1,
            }
            for i in range(num_questions)
        ]
        return {"row_id": "row-1", "questions": questions, **fields}

    return make
