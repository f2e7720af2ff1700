# SPDX-License-Identifier: Apache-2.0
"""The page on guards: its Python runs, top to bottom, as printed."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guards.md"


def test_every_python_block_of_the_page_runs(nemotron_tokenizer):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    names = {"tokenizer": nemotron_tokenizer}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
