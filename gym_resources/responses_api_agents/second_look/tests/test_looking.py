# SPDX-License-Identifier: Apache-2.0
import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image
from responses_api_agents.second_look.looking import enlarged, first_image, score

ROWS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/example.jsonl").read_text().splitlines()
]


def test_a_look_is_the_same_picture_with_longer_sides():
    url = first_image(ROWS[0]["responses_create_params"]["input"])
    again = Image.open(io.BytesIO(base64.b64decode(enlarged(url, 1.5).partition(",")[2])))
    assert again.size == (192, 144) and again.mode == "RGB"
    with pytest.raises(ValueError, match="input_image"):
        first_image([{"role": "user", "content": "l or r?"}])


def test_the_score_is_the_share_of_right_letters():
    assert [score(text, "l") for text in ("l", "llrx", "r", "", "xyz")] == [1.0, 2 / 3, 0.0, 0.0, 0.0]


def test_the_rows_ask_for_both_sides_alike():
    assert [row["verifier_metadata"]["answer"] for row in ROWS].count("l") == len(ROWS) / 2
