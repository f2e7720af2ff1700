# SPDX-License-Identifier: Apache-2.0
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_ext.disk import explained_disk_faults


def writing():
    return explained_disk_faults(Path("runs/a"), "at step 3", lambda: "make room")


def test_a_full_disk_is_named_with_its_path():
    with pytest.raises(
        ValueError, match=r"^runs/a: cannot be written at step 3: the disk is full; make room$"
    ):
        with writing(), open("/dev/full", "w") as file:
            file.write("x")
    with pytest.raises(ValueError, match=r"^/x/y: .*the disk is full"), writing():
        raise OSError(errno.EDQUOT, "quota", "/x/y")


def test_safetensors_own_error_is_one_of_the_disk(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    import numpy as np

    with pytest.raises(ValueError, match=r"runs/a: cannot be written at step 3: .*; make room"), writing():
        safetensors.save_file({"a": np.zeros(2)}, tmp_path / "none" / "file")


def test_the_path_that_is_missing_or_forbidden_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none/file: cannot be written at step 3: No such file"), writing():
        (tmp_path / "none" / "file").write_text("")


def test_other_errors_pass():
    with pytest.raises(KeyError), writing():
        raise KeyError("x")


HOMELESS = """
import logging, os, sys
from pathlib import Path
logging.basicConfig(format="%(message)s")
from nemo_rl_ext.disk import require_home
require_home(); require_home()
import numba, vllm.envs, huggingface_hub.constants as hub
homes = [Path.home(), Path(vllm.envs.VLLM_CACHE_ROOT), Path(hub.HF_HOME)]
assert all(str(path).startswith(sys.argv[1]) for path in homes), homes
subprocess = __import__("subprocess").run(["sh", "-c", "touch ~/kept"], check=True)
assert (Path.home() / "kept").is_file() and Path.home().stat().st_mode & 0o777 == 0o700
"""


def homeless(tmp_path, **environment):
    return subprocess.run(
        [sys.executable, "-c", HOMELESS, str(tmp_path)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
        | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.engine
def test_a_home_that_cannot_be_written_to_is_replaced_and_said_once(tmp_path):
    done = homeless(tmp_path, HOME="/proc", XDG_CACHE_HOME="/proc/none")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the home directory /proc cannot be written to") == 1
    (folder,) = tmp_path.glob("nemo-rl-ext-home-*")
    folder.chmod(0o777)
    done = homeless(tmp_path, HOME="/proc")
    assert done.returncode != 0 and "is not this user's own" in done.stderr


def test_a_home_that_can_be_written_to_is_left_alone(tmp_path, monkeypatch, caplog):
    from nemo_rl_ext.disk import require_home

    monkeypatch.setenv("HOME", str(tmp_path))
    require_home()
    assert os.environ["HOME"] == str(tmp_path) and not caplog.text and not list(tmp_path.iterdir())
