# SPDX-License-Identifier: Apache-2.0
"""The wheel holds what a run needs outside of a checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the tracked files, without a network: with the setuptools that is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    source = folder / "source"
    for name in filter(None, listed.stdout.split("\0")):
        path = REPOSITORY / name
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target.symlink_to(path.readlink())
        elif path.is_file():
            target.write_bytes(path.read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        folder,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_an_installed_wheel_finds_its_configurations_from_any_directory(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    for name in (
        "nemo_rl_ext/configs/embedded_async.yaml",
        "nemo_rl_ext/configs/nemo_rl/async_gym_image.yaml",
        "nemo_rl_ext/integration/autostart/sitecustomize.py",
        "nemo_rl_ext/report/page.css",
        "nemo_rl_ext/py.typed",
    ):
        assert name in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "gym_resources/"))]
    code = (
        "import nemo_rl_ext, sys; from nemo_rl_ext.cli import main\n"
        f"assert nemo_rl_ext.__file__.startswith({str(tmp_path)!r})\n"
        "sys.argv = ['nemo-rl-ext', 'grpo', '--print-config']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "num_prompts_per_step: 16" in done.stdout
