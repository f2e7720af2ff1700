# SPDX-License-Identifier: Apache-2.0
import errno
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
