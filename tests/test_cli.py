# SPDX-License-Identifier: Apache-2.0
"""The command line: what is registered, how errors look, and with which code it exits."""

import errno
import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
import typer

from nemo_rl_ext import cli


def fail(kind: str, ctx: typer.Context) -> None:
    """Fail in a chosen way."""
    if kind == "value":
        raise ValueError("rows.jsonl:3: expected text, found 4")
    if kind == "os":
        open("/nonexistent/rows.jsonl")
    if kind == "bug":
        {}["absent"]
    if kind == "engine":
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "code":
        raise typer.Exit(3)
    if kind == "remote":
        error = RuntimeError("a long remote traceback")
        error.cause = ValueError("rows.jsonl:4: no image")
        raise error
    print(ctx.obj)


@pytest.fixture
def run(command, monkeypatch):
    """A command line whose only command is `fail`."""
    monkeypatch.setattr(
        cli,
        "COMMANDS",
        (
            cli.Command(
                name="fail", summary="Fail.", function="broken:fail", example="nemo-rl-ext fail value"
            ),
        ),
    )
    monkeypatch.setattr(cli, "load_command", lambda function: fail)
    return command


PIPED = """
import sys
from nemo_rl_ext import cli

def fail():
    for _ in range(100_000):
        print("line")

cli.COMMANDS = (cli.Command(name="fail", summary="Fail.", function="broken:fail", example="nemo-rl-ext fail"),)
cli.load_command = lambda function: fail
sys.argv = ["nemo-rl-ext", "fail"]
cli.main()
"""


def test_every_name_of_the_design_has_a_place():
    names = [
        "census",
        "check",
        "demo",
        "distill",
        "fit",
        "grpo",
        "inspect",
        "launch",
        "pin",
        "report",
        "size",
    ]
    assert sorted(command.name for command in cli.COMMANDS) == names
    assert all(f"{command.example} ".startswith(f"nemo-rl-ext {command.name} ") for command in cli.COMMANDS)


def test_a_module_that_does_not_exist_is_not_registered():
    assert cli.load_command("nemo_rl_ext.grpo.no_such_module:run") is None
    assert cli.load_command("nemo_rl_ext.no_such_area.command:run") is None


def test_a_module_that_cannot_import_what_it_needs_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import a_module_that_is_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_absent"):
        cli.load_command("half_installed:run")


def test_a_function_is_found_by_module_and_name():
    assert cli.load_command("nemo_rl_ext.cli:versions") is cli.versions


@pytest.mark.parametrize("kind", ["value", "remote"])
def test_a_users_fault_is_one_line_and_code_2(kind, run):
    done = run("fail", kind)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: rows.jsonl:")


def test_a_missing_file_is_a_users_fault(run):
    done = run("fail", "os")
    assert done.returncode == 2
    assert done.stderr == (
        "error: /nonexistent/rows.jsonl: no such file or directory; look for a typing error; relative paths start in "
        "the current directory\n"
    )


def test_an_unexpected_error_is_short_and_points_to_debug(run):
    done = run("fail", "bug")
    assert done.returncode == 1
    assert done.stderr == "error: KeyError: 'absent'\nrun `nemo-rl-ext --debug ...` for the traceback\n"


def test_debug_shows_the_traceback(run):
    done = run("--debug", "fail", "value")
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.endswith("error: rows.jsonl:3: expected text, found 4\n")


def test_a_missing_engine_names_the_extra(run):
    done = run("fail", "engine")
    assert done.returncode == 1
    assert "pip install 'nemo-rl-ext[engine]'" in done.stderr


def test_interrupt_exits_130_without_a_traceback(run):
    done = run("fail", "interrupt")
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_a_command_may_choose_its_exit_code(run):
    assert run("fail", "code").returncode == 3


def test_a_closed_pipe_is_not_an_error():
    process = subprocess.Popen(
        [sys.executable, "-c", PIPED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    stderr = process.stderr.read()
    process.wait()
    assert "error" not in stderr and "Traceback" not in stderr


def test_json_errors_are_one_object(run):
    done = run("--log-format", "json", "fail", "value")
    entry = json.loads(done.stderr)
    assert (entry["level"], entry["message"]) == ("error", "rows.jsonl:3: expected text, found 4")
    assert done.returncode == 2


def test_options_before_the_command_reach_it(run):
    done = run("--quiet", "--log-format", "json", "fail", "nothing")
    assert done.stdout.strip() == "CommonOptions(debug=False, quiet=True, log_format='json')"


@pytest.mark.parametrize(
    "arguments",
    [
        ("-q", "fail", "nothing", "--log-format", "json"),
        ("fail", "--quiet", "--log-format=json", "nothing"),
        ("--log-format", "json", "fail", "nothing", "-q"),
    ],
)
def test_common_options_may_follow_the_command(run, arguments):
    assert run(*arguments).stdout.strip() == "CommonOptions(debug=False, quiet=True, log_format='json')"


def test_what_follows_two_dashes_or_belongs_to_another_program_stays():
    assert cli.hoisted(["check", "--", "-q"]) == ["check", "--", "-q"]
    assert cli.hoisted(["launch", "x.py", "--debug"]) == ["launch", "x.py", "--debug"]
    assert cli.hoisted(["-q", "launch", "x.py", "-q"]) == ["-q", "launch", "x.py", "-q"]
    assert cli.hoisted(["check", "--log-format"]) == ["--log-format", "check"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EISDIR, errno.ENOENT, errno.EROFS, errno.EIO])
def test_an_error_of_the_system_is_a_sentence(code):
    error = OSError(code, os.strerror(code), "some/where")
    message = cli.of_the_system(error)
    assert message.startswith(f"some/where: {os.strerror(code)[0].lower()}{os.strerror(code)[1:]}")
    assert "Errno" not in message and (code == errno.EIO or ";" in message)
    assert "Errno" not in cli.of_the_system(OSError(code, os.strerror(code)))


def test_help_fits_eighty_columns_uncut(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("", *typer.main.get_command(cli.build_app()).commands):
        lines = command(*filter(None, (name, "--help"))).stdout.splitlines()
        assert max(map(len, lines)) <= 80
        assert not [line for line in lines if "\u2026" in line]
    assert not [
        line
        for line in command("--help").stdout.splitlines()
        if line.startswith("  ") and line.endswith("...")
    ]


def test_the_module_of_the_command_runs_as_well():
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl_ext.cli", "nonsense"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_help_shows_the_example(run):
    assert "nemo-rl-ext fail value" in run("fail", "--help").stdout
    assert "nemo-rl-ext fail value" in run("--help").stdout


def test_an_unknown_command_is_a_usage_error(run):
    done = run("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr


def test_version_names_what_is_installed(command):
    lines = dict(line.split(" ", 1) for line in command("--version").stdout.splitlines())
    assert list(lines) == ["nemo-rl-ext", "Python", "torch", "ray", "vllm", "transformers", "NeMo-RL"]
    assert lines["ray"] == metadata.version("ray")


def test_commands_of_this_installation_show_their_help(command):
    for name in typer.main.get_command(cli.build_app()).commands:
        done = command(name, "--help")
        assert done.returncode == 0, done.stderr
        assert f"nemo-rl-ext {name}" in done.stdout


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "nemo_rl_ext", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "nemo-rl-ext census" in done.stdout
