# SPDX-License-Identifier: Apache-2.0
"""The package's face, and the code blocks of the pages about it."""

import re
from pathlib import Path

import pytest

import nemo_rl_ext

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)


def test_every_export_exists_and_nothing_else_does():
    assert sorted(nemo_rl_ext.__all__) == sorted(set(nemo_rl_ext.__all__))
    for name in nemo_rl_ext.__all__:
        value = getattr(nemo_rl_ext, name)
        assert isinstance(value, str) or (value.__doc__ or "").strip(), name
        assert name in dir(nemo_rl_ext)
    with pytest.raises(AttributeError, match="no attribute 'align_turns'"):
        _ = nemo_rl_ext.align_turns


def test_the_blocks_of_the_python_page_run(tiny_checkpoint):
    names = {"checkpoint": tiny_checkpoint}
    found = blocks("python.md")
    assert len(found) == 5
    for block in found:
        exec(compile(block, "docs/python.md", "exec"), names)


def test_the_reward_of_the_page_scores():
    names = {}
    (block,) = blocks("rewards.md")
    exec(compile(block, "docs/rewards.md", "exec"), names)
    assert names["overlap"]("a red spoon", {"answer": "A spoon"}) == 1.0
    assert names["overlap"]("a fork", {"answer": "A spoon"}) == 0.5
