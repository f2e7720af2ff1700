# SPDX-License-Identifier: Apache-2.0
"""What the README shows is true: its Python runs, its links lead somewhere, its commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.S))
def test_its_python_runs(code):
    exec(compile(code, "README.md", "exec"), {})


def test_its_links_lead_to_files():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_its_commands_exist():
    from nemo_rl_ext.cli import COMMANDS

    shown = set(re.findall(r"nemo-rl-ext (\w+)", README))
    assert shown <= {command.name for command in COMMANDS}
    targets = re.findall(r"^make ([\w-]+)", README, re.M)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_its_catalogue_quotes_the_messages_of_real_reasons():
    from nemo_rl_ext.align.verdict import Reason

    catalogue = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    messages = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", catalogue, re.M))
    rows = re.findall(r"^\| `(\w+)` \| (trained|masked) \| (.*?) \|", README, re.M)
    assert len(rows) == 10
    assert {reason for reason, _, _ in rows} <= {reason.value for reason in Reason}
    trained = {"resized", "earlier_turn_resized", "frames_resampled"}
    assert {reason for reason, row, _ in rows if row == "trained"} == trained
    quotes = {reason: seen for reason, _, seen in rows if reason != "frames_resampled"}
    assert [reason for reason, seen in quotes.items() if seen not in messages[reason]] == []
