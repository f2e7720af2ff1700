# SPDX-License-Identifier: Apache-2.0
"""What `scripts/setup.sh` refuses, and when it has work, tried without building an environment."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SCRIPT = REPOSITORY / "scripts" / "setup.sh"
TOOLS = ("bash", "cat", "cut", "dirname", "flock", "grep", "mkdir", "sha256sum")

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TOOLS), reason="needs the usual command-line tools"
)


def setup(venv: Path, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, **environment}
    return subprocess.run(["bash", str(SCRIPT), str(venv)], capture_output=True, text=True, env=environment)


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def finished_environment(path: Path) -> Path:
    """What a finished build leaves for the script to see: this interpreter, and the stamps."""
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(sys.executable)
    lock = (REPOSITORY / "requirements" / "engine-cpu-py311.txt").read_bytes()
    version = subprocess.run([sys.executable, "-VV"], capture_output=True, check=True).stdout
    packages = digest(lock, SCRIPT.read_bytes(), version)
    (path / ".packages-key").write_text(packages + "\n")
    project = digest((REPOSITORY / "pyproject.toml").read_bytes(), f"{REPOSITORY}\n".encode())
    (path / ".project-key").write_text(project + "\n")
    return path


def test_a_finished_environment_is_left_alone(tmp_path):
    done = setup(finished_environment(tmp_path / "venv"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def put_stand_in_for_pip(venv: Path) -> Path:
    """An interpreter at the network edge: it notes what pip was asked and does nothing."""
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").write_text(
        "#!/bin/sh\n"
        f'case "$*" in *"-m pip"*) echo "$*" >>"{venv}/asked" ;; -VV) "{sys.executable}" -VV ;; esac\n'
    )
    (venv / "bin" / "python").chmod(0o755)
    return venv / "asked"


@pytest.mark.parametrize(("stale", "asks_for_packages"), [(".packages-key", True), (".project-key", False)])
def test_a_changed_lock_updates_all_and_a_changed_project_only_itself(tmp_path, stale, asks_for_packages):
    venv = finished_environment(tmp_path / "venv")
    fresh = (venv / stale).read_text()
    (venv / stale).write_text("of another time\n")
    asked = put_stand_in_for_pip(venv)
    done = setup(venv)
    assert done.returncode == 0, done.stderr
    requests = asked.read_text().splitlines()
    assert any("engine-cpu-py311.txt" in request for request in requests) == asks_for_packages
    assert requests[-1].endswith(f"-e {REPOSITORY}")
    assert (venv / stale).read_text() == fresh
    assert not (venv / ".building").exists()


def test_an_interrupted_build_is_not_taken_for_a_finished_one(tmp_path):
    venv = finished_environment(tmp_path / "venv")
    (venv / ".building").touch()
    done = setup(venv, PYTHON="/nonexistent/python3.11")
    assert done.returncode == 1
    assert "did not finish; starting over" in done.stdout


def test_without_a_python_it_says_what_to_install(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))
    nowhere = str(tmp_path / "home")
    done = setup(tmp_path / "venv", PATH=str(tools), HOME=nowhere, PYENV_ROOT=nowhere, PYTHON="")
    assert done.returncode == 1
    assert done.stderr.startswith("setup: error: no CPython 3.11 found. Install one")
    assert "make setup PYTHON=path" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_python_of_another_kind_is_refused(tmp_path):
    done = setup(tmp_path / "venv", PYTHON=shutil.which("cat"))
    assert done.returncode == 1
    assert "is not a CPython 3.11 with the venv module" in done.stderr


def test_a_directory_that_is_not_an_environment_is_not_touched(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_bytes(b"kept")
    done = setup(tmp_path / "photos")
    assert done.returncode == 1
    assert "is not an environment of CPython 3.11; remove it, or name another" in done.stderr
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["one.png"]
