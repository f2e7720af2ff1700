# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-ext check` as a user calls it."""

import gzip
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
    assert code == 0 and "usable: 0 faults, 0 warnings" in output and "rows with re-sized images" in output
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


def test_warnings_are_grouped_and_rows_that_do_not_fit_come_first(run, write_manifest, make_row):
    marked = [make_row("a.png", "an <image>", id=f"m{i}") for i in range(9)]
    path = write_manifest([*marked, make_row("x" * 4000, id="long")])
    code, output = run(path, "--max-model-len", 512, "--show", 3)
    lines = [line for line in output.splitlines() if line.strip()]
    assert code == 0 and lines[0].startswith("1 warning: rows that do not fit the context")
    assert "rows.jsonl:10: needs" in lines[1]
    assert lines[2].startswith("9 warnings: rows whose text holds a literal media marker")
    assert "... 6 more of this kind; --output FILE keeps them" in lines[6]
    assert lines[-1].endswith("usable: 0 faults, 10 warnings")


def test_json_on_stdout_is_all_there_is(run, write_manifest, make_row, tmp_path):
    path = write_manifest([make_row("a.png", "an <image>"), b"{"])
    code, output = run(path, "--json")
    found = json.loads(output)
    assert code == 1 and not found["usable"] and found["warning_kinds"] == {"media marker in text": 1}
    assert found["faults"][0]["line"] == 2
    for option in ("--output", "-o", "--report"):
        run(path, option, tmp_path / "report.json")
        assert json.loads((tmp_path / "report.json").read_text()) == found
        (tmp_path / "report.json").unlink()


def test_a_manifest_on_standard_input(write_manifest, make_row, tmp_path):
    data = gzip.compress(write_manifest([make_row("a.png", "?")]).read_bytes())
    command = [sys.executable, "-m", "nemo_rl_ext", "check", "-"]
    done = subprocess.run(command, input=data, capture_output=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0 and b"-: usable: 0 faults, 0 warnings" in done.stdout, done.stderr


def test_limits_of_a_request_are_options(run, write_manifest, make_row):
    path = write_manifest([make_row("a.png", "b.png")])
    code, output = run(path, "--limit-images", 1, "--strict")
    assert code == 1 and "2 images in one request, of which the engine takes 1" in output
