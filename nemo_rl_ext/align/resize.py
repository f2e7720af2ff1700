# SPDX-License-Identifier: Apache-2.0
"""The engine's resize: torch's antialiased bicubic in float32, or the same bits in a fraction of its time.

Resizing is most of a repair, and torch does it one value at a time. `kernels.resize` does it for many values at a
time, with torch's own weights and in torch's own order of operations. That order is the compiler's who built torch, so
nothing is taken for granted: a length is resized by the kernel only after it gave torch's values for that length on
this machine. Where one bit differs, or the kernels are not loaded (`compiled`), torch itself resizes.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl_ext.align import compiled
from nemo_rl_ext.align.grids import Size

logger = logging.getLogger(__name__)

MAX_TAPS = 64
"""Widest window that is worth a proof: a reduction to a sixteenth. Beyond, torch resizes."""
PROOF_ROWS = 16
"""Rows of noise that prove a length: 48 values for each pixel of the resized line."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Axis:
    """Which pixels of a line, with which weights, make each pixel of the resized line.

    `first`, `size` and `num_rounded` int64 [pixels]: the first tap, the number of taps, and how many of them (from
    the first on) are added with a rounding of their own; `weights` float32 [pixels, taps].
    """

    first: np.ndarray
    size: np.ndarray
    num_rounded: np.ndarray
    weights: np.ndarray

    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.first, self.size, self.num_rounded, self.weights


def bicubic(frames: np.ndarray, size: Size) -> torch.Tensor:
    """Resize uint8 RGB frames [frames, height, width, 3] to (height, width): float32 [frames, 3, height, width].

    Not clamped: the values overshoot 0 and 255 at sharp edges, as the engine's do.
    """
    if compiled.loaded() is not None and frames.shape[1:3] != size:
        vertical, horizontal = proven_axis(frames.shape[1], size[0]), proven_axis(frames.shape[2], size[1])
        if vertical is not None and horizontal is not None:
            return resized_along(frames, horizontal, vertical)
    return torch_bicubic(frames, size)


def torch_bicubic(frames: np.ndarray, size: Size) -> torch.Tensor:
    """What `bicubic` is measured by: torch's own resize."""
    return _interpolate(planes(frames), size)


def planes(frames: np.ndarray) -> torch.Tensor:
    """uint8 frames [frames, height, width, 3] as float32 [frames, 3, height, width], contiguous.

    The engine keeps the channels last in memory; planes give the same bits in two thirds of the time.
    """
    pixels = torch.from_numpy(np.require(frames, requirements=("C", "W"))).permute(0, 3, 1, 2)
    return pixels.to(torch.float32, memory_format=torch.contiguous_format)


def _interpolate(pixels: torch.Tensor, size: Size) -> torch.Tensor:
    return torch.nn.functional.interpolate(
        pixels, size=size, mode="bicubic", align_corners=False, antialias=True
    )


def resized_along(frames: np.ndarray, horizontal: Axis, vertical: Axis) -> torch.Tensor:
    out = torch.empty(len(frames), 3, len(vertical.first), len(horizontal.first))
    kernels = compiled.loaded()
    assert kernels is not None, "only proven axes get here, and the kernels prove them"
    kernels.resize(np.ascontiguousarray(frames), *horizontal.arguments(), *vertical.arguments(), out.numpy())
    return out


@functools.lru_cache(maxsize=512)
def proven_axis(length: int, target: int) -> Axis | None:
    """The axis from `length` to `target` pixels, proven; None where the kernel does not give torch's values."""
    if length == target:
        return identity_axis(length)
    first, size = _windows(length, target)
    if size.max() > MAX_TAPS:
        return None
    weights = axis_weights(length, first, size)
    frames = np.random.default_rng(0).integers(0, 256, (1, PROOF_ROWS, length, 3), dtype=np.uint8)
    expected = torch_bicubic(frames, (PROOF_ROWS, target))
    for num_rounded in (_rounded_in_fours(size), size):
        axis = Axis(first=first, size=size, num_rounded=num_rounded, weights=weights)
        if torch.equal(resized_along(frames, axis, identity_axis(PROOF_ROWS)), expected):
            return axis
    logger.debug("%d to %d pixels: the compiled kernel gives other values than torch", length, target)
    return None


def identity_axis(length: int) -> Axis:
    ones = np.ones(length, dtype=np.int64)
    return Axis(
        first=np.arange(length), size=ones, num_rounded=ones, weights=np.ones((length, 1), dtype=np.float32)
    )


def _windows(length: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """First tap and number of taps per pixel: `compute_indices_min_size_weights_aa` of torch's UpSampleKernel.cpp."""
    scale = np.float32(length) / np.float32(target)
    support = np.float32(2) * max(scale, np.float32(1))
    center = scale * (np.arange(target, dtype=np.float32) + np.float32(0.5))
    first = np.maximum((center - support + np.float32(0.5)).astype(np.int64), 0)
    return first, np.minimum((center + support + np.float32(0.5)).astype(np.int64), length) - first


def axis_weights(length: int, first: np.ndarray, size: np.ndarray) -> np.ndarray:
    """torch's own weights, float32 [pixels, taps]: its answer to lines in which one pixel per window is lit."""
    taps = int(size.max())
    lit = torch.zeros(1, 1, taps, length)
    pixels = torch.arange(length)
    lit[0, 0, pixels % taps, pixels] = 1
    answers = _interpolate(lit, (taps, len(first)))[0, 0].numpy()
    index = first[:, None] + np.arange(taps)
    found = answers[index % taps, np.arange(len(first))[:, None]]
    return np.where(np.arange(taps) < size[:, None], found, np.float32(0))


def _rounded_in_fours(size: np.ndarray) -> np.ndarray:
    """After the first tap whole groups of four are rounded, and what is left of them is fused (AVX2 and AVX-512)."""
    return 1 + 4 * ((size - 1) // 4)
