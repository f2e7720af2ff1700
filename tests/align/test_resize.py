# SPDX-License-Identifier: Apache-2.0
"""The compiled resize gives torch's bits, proves it for every length, and gives way where it cannot."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from nemo_rl_ext.align import compiled, resize
from nemo_rl_ext.align.resize import MAX_TAPS, bicubic, torch_bicubic

pytest.importorskip("numba")


@pytest.fixture(autouse=True, scope="module")
def kernels():
    """As in an aligner."""
    assert compiled.load() is not None


@pytest.fixture
def fresh():
    """No axis remembered from before, nor left behind."""
    resize.proven_axis.cache_clear()
    yield
    resize.proven_axis.cache_clear()


def random_frames(rng, height, width, frames=1):
    return rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def is_compiled(frames, size) -> bool:
    return (
        resize.proven_axis(frames.shape[1], size[0]) is not None
        and resize.proven_axis(frames.shape[2], size[1]) is not None
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_bit_is_torchs(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        height, width = (int(side) for side in rng.integers(1, 500, 2))
        size = tuple(int(side) * 16 for side in rng.integers(1, 40, 2))
        frames = random_frames(rng, height, width, int(rng.integers(1, 4)))
        ours = bicubic(frames, size)
        assert ours.dtype == torch.float32 and ours.shape == (len(frames), 3, *size) and ours.is_contiguous()
        assert torch.equal(ours, torch_bicubic(frames, size)), (frames.shape, size)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        pytest.param((480, 640), (448, 576), id="whole blocks"),
        pytest.param((481, 643), (450, 577), id="a rest in every direction"),
        pytest.param((31, 33), (64, 129), id="less than a block of rows, one column over a strip"),
        pytest.param((64, 48), (64, 96), id="only wider"),
        pytest.param((64, 48), (32, 48), id="only lower"),
        pytest.param((1, 1), (32, 32), id="one pixel"),
        pytest.param((2400, 1080), (160, 80), id="a fifteenth"),
        pytest.param((16, 4000), (32, 3200), id="a band"),
    ],
)
@pytest.mark.parametrize("content", ["noise", "black and white", "white"])
def test_it_is_the_kernel_that_gives_them(shape, size, content):
    frames = random_frames(np.random.default_rng(0), *shape, 2)
    if content == "black and white":
        frames = (frames > 127).astype(np.uint8) * 255
    elif content == "white":
        frames[:] = 255
    assert is_compiled(frames, size)
    assert torch.equal(bicubic(frames, size), torch_bicubic(frames, size))


def test_frames_of_any_memory_are_read_and_none_is_written():
    frames = random_frames(np.random.default_rng(0), 96, 128, 4)
    expected = torch_bicubic(frames, (80, 112))
    kept = frames.copy()
    frames.flags.writeable = False
    assert torch.equal(bicubic(frames, (80, 112)), expected)
    assert torch.equal(bicubic(np.asfortranarray(frames), (80, 112)), expected)
    doubled = np.repeat(frames, 2, axis=0)
    assert torch.equal(bicubic(doubled[::2], (80, 112)), expected)
    assert np.array_equal(frames, kept)


def test_a_length_whose_values_differ_is_left_to_torch(fresh, monkeypatch):
    right = resize.axis_weights

    # One weight of one pixel, a ten-thousandth too large.
    def wrong(length, first, size):
        weights = right(length, first, size)
        if length == 100:
            weights[40, 1] *= np.float32(1.0001)
        return weights

    monkeypatch.setattr(resize, "axis_weights", wrong)
    frames = random_frames(np.random.default_rng(0), 100, 120)
    assert resize.proven_axis(100, 80) is None
    assert resize.proven_axis(120, 96) is not None
    assert torch.equal(bicubic(frames, (80, 96)), torch_bicubic(frames, (80, 96)))


def test_an_order_of_roundings_that_is_not_torchs_is_found_out(fresh, monkeypatch):
    """Twelve lengths and no wrong order got through: fused where torch rounds, and the other way round."""
    lengths = [(length, length * 5 // 6) for length in range(60, 300, 20)]
    right = {pair: resize.proven_axis(*pair).num_rounded for pair in lengths}
    for swap in (np.ones_like, lambda size: np.maximum(size - 1, 1)):
        for pair in lengths:
            axis = resize.proven_axis(*pair)
            wrong = resize.Axis(
                first=axis.first, size=axis.size, num_rounded=swap(axis.size), weights=axis.weights
            )
            if np.array_equal(wrong.num_rounded, right[pair]):
                continue
            frames = random_frames(np.random.default_rng(1), resize.PROOF_ROWS, pair[0])
            made = resize.resized_along(frames, wrong, resize.identity_axis(resize.PROOF_ROWS))
            assert not torch.equal(made, torch_bicubic(frames, (resize.PROOF_ROWS, pair[1]))), pair


def test_windows_too_wide_for_a_proof_are_left_to_torch():
    frames = random_frames(np.random.default_rng(0), 40, 16 * MAX_TAPS)
    assert resize.proven_axis(frames.shape[2], 16) is None
    assert torch.equal(bicubic(frames, (32, 16)), torch_bicubic(frames, (32, 16)))


CHECK = """
import numpy as np, torch
from nemo_rl_ext.align import compiled, resize
kernels = compiled.load()
frames = np.random.default_rng(0).integers(0, 256, (2, 150, 210, 3), dtype=np.uint8)
assert torch.equal(resize.bicubic(frames, (128, 176)), resize.torch_bicubic(frames, (128, 176)))
"""


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", CHECK + code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_torch_that_rounds_in_another_order_is_followed():
    """torch without vector instructions fuses nothing; the proof finds that order by itself."""
    run(
        "axis = resize.proven_axis(150, 128); assert axis is not None and (axis.num_rounded == axis.size).all()",
        ATEN_CPU_CAPABILITY="default",
    )


@pytest.mark.slow
def test_torch_resizes_where_numba_is_missing_or_switched_off(tmp_path):
    run("assert kernels is None", NUMBA_DISABLE_JIT="1")
    (tmp_path / "numba.py").write_text("raise ImportError('no numba here')")
    run("assert kernels is None", PYTHONPATH=str(tmp_path))


def test_what_is_loaded_can_be_looked_into():
    """As an engine does that starts in this process: see `compiled`."""
    for module in list(sys.modules.values()):
        if module.__name__.partition(".")[0] in ("llvmlite", "numba"):
            for value in list(vars(module).values()):
                assert not hasattr(value, "__dict__") or hasattr(vars(value), "get"), (module, value)


def test_an_import_alone_loads_no_compiler():
    code = (
        "import sys, nemo_rl_ext.align.turn, nemo_rl_ext.rollout.aligner; assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_are_kept_elsewhere_where_home_and_package_cannot_be_written(tmp_path):
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": "/proc",
        "XDG_CACHE_HOME": "/proc/none",
        "TMPDIR": str(tmp_path),
        # Not the package's own directory, which a test can write to.
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator,UserWideCacheLocator",
    }
    script = "from nemo_rl_ext.align import compiled; assert compiled.load() is not None"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    (folder,) = tmp_path.glob("nemo-rl-ext-kernels-*")
    assert folder.stat().st_mode & 0o777 == 0o700 and any(folder.rglob("*.nbi"))
    folder.chmod(0o777)
    script = "from nemo_rl_ext.align import compiled; assert compiled.load() is None"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "not this user's own" in done.stderr
