# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-ext check` as a user calls it."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from nemo_rl_ext.manifest.command import check


@pytest.fixture
def run():
    """`run(arguments)`: exit code and output."""
    app = typer.Typer()
    app.command()(check)

    def invoke(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        return result.exit_code, result.output

    return invoke


def test_a_usable_manifest(run, write_manifest, make_row, tmp_path):
    path = write_manifest([make_row("a.png", "?")])
    code, output = run(path, "--max-model-len", 512, "--report", tmp_path / "report.json")
    assert (
        code == 0 and "usable: 0 fault(s), 0 warning(s)" in output and "rows with re-sized images" in output
    )
    assert json.loads((tmp_path / "report.json").read_text())["summary"]["rows"] == 1


def test_faults_and_strictness(run, write_manifest, make_row):
    code, output = run(write_manifest([make_row("missing.png")]))
    assert code == 1 and "rows.jsonl:1: " in output and "no such file" in output and "unusable" in output
    path = write_manifest([make_row("x" * 4000)])
    assert run(path, "--max-model-len", 512)[0] == 0
    code, output = run(path, "--max-model-len", 512, "--strict")
    assert code == 1 and "raise max_model_len" in output


def test_what_is_shown_is_limited(run, write_manifest):
    _, output = run(write_manifest([b"{"] * 30), "--show", 3)
    assert output.count("not JSON") == 3 and "27 more faults" in output


def test_limits_are_options(run, write_manifest, make_row, tmp_path):
    path = write_manifest([make_row("b.png")])
    assert run(path, "--max-pixels", 100)[0] == 1
    (tmp_path / "elsewhere").mkdir()
    assert run(path, "--media-root", tmp_path / "elsewhere")[0] == 1
    assert run(path, "--media-root", tmp_path)[0] == 0


def test_loading_the_command_is_light():
    """Help must not wait for torch, Ray, vLLM, transformers, Pillow or pydantic."""
    code = (
        "import sys, nemo_rl_ext.manifest.command\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'PIL', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
