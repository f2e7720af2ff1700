# SPDX-License-Identifier: Apache-2.0
"""The page on manifests: its rows load, its Python and its commands run as printed, its lists are the code's."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_rl_ext.cli import CommonOptions, build_app
from nemo_rl_ext.manifest.check import check_manifest
from nemo_rl_ext.manifest.check_rules import WARNING_KINDS
from nemo_rl_ext.manifest.keys import known_keys
from nemo_rl_ext.manifest.row_media import media_items
from nemo_rl_ext.manifest.rows import ManifestRow

PAGE = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory in which a reader has followed the page up to its first commands."""
    monkeypatch.chdir(tmp_path)
    (rows,) = blocks("jsonl")
    Path("rows.jsonl").write_text(rows, encoding="utf-8")
    exec(compile(blocks("python")[0], "manifest.md", "exec"), {})
    return tmp_path


def test_its_commands_and_python_run(folder):
    pytest.importorskip("cv2")
    commands = [line for block in blocks("sh") for line in block.splitlines() if line]
    assert len(commands) >= 2
    for command in commands:
        program, *arguments = shlex.split(command)
        done = CliRunner().invoke(build_app(), arguments, obj=CommonOptions())
        assert program == "nemo-rl-ext" and done.exit_code == 0, (command, done.output, done.exception)
    for block in blocks("python")[1:]:
        exec(compile(block, "manifest.md", "exec"), {})


def test_its_other_rows_are_usable(folder):
    rows = [json.loads(block) for block in blocks("json")]
    Path("others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    report = check_manifest("others.jsonl")
    assert not report.faults and report.num_rows == len(rows) == 2
    frames, turns = (media_items(ManifestRow.from_json(row)) for row in rows)
    assert [item.kind for item in frames] == ["video"] and [item.turn for item in turns] == [0, 1]


def test_its_tables_are_complete():
    assert re.findall(r"^\| `([\w -]+)` \| ", PAGE.partition("## What `check` says")[2], re.M) == list(
        WARNING_KINDS
    )
    named = set(re.findall(r"`([\w.]+)`", PAGE))
    missing = {key for key in known_keys(ManifestRow) if key not in named and key != "metadata"}
    assert not missing - {"responses_create_params"}, "keys of a row that the page does not name"


def test_the_page_on_prevention_names_commands_and_options_that_exist():
    page = (Path(__file__).parents[2] / "docs" / "prevention.md").read_text(encoding="utf-8")
    commands = re.findall(r"^nemo-rl-ext (.*)$", page, re.M)
    assert {command.split()[0] for command in commands} == {"check", "pin", "fit"}
    for command in commands:
        name, *arguments = shlex.split(command)
        help_text = CliRunner().invoke(
            build_app(), [name, "--help"], obj=CommonOptions(), env={"COLUMNS": "200"}
        )
        assert help_text.exit_code == 0
        options = {argument for argument in arguments if argument.startswith("--")}
        assert options <= set(re.findall(r"--[\w-]+", help_text.output))
