# SPDX-License-Identifier: Apache-2.0
"""Pixels on an exact patch grid, in the engine's numeric order, and count-correct media without content."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.resize import bicubic, planes


def resize_and_normalize(
    frames: np.ndarray,
    grid: Grid,
    *,
    patch_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
    skip_equal_size: bool = False,
) -> torch.Tensor:
    """Resize uint8 RGB frames [frames, height, width, 3] onto a patch grid: [frames, 3, height, width] in `dtype`.

    Antialiased bicubic in float32 without clamping the overshoot, then `(x / 255 - mean) / std`, then the cast:
    the order of `_bicubic_resize_and_normalize` in vLLM's nano_nemotron_vl processor. The engine resizes images
    even when the size already fits and skips the resize for video frames that fit (`skip_equal_size`).
    """
    size = (grid.height * patch_size, grid.width * patch_size)
    if skip_equal_size and frames.shape[1:3] == size:
        pixels = planes(frames)
    else:
        pixels = bicubic(frames, size)
    mean_tensor = torch.tensor(mean, dtype=torch.float32).reshape(1, 3, 1, 1)
    std_tensor = torch.tensor(std, dtype=torch.float32).reshape(1, 3, 1, 1)
    return pixels.div_(255.0).sub_(mean_tensor).div_(std_tensor).to(dtype).contiguous()


def patchify(pixels: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Cut [frames, 3, height, width] into row-major patches [frames * patches, 3 * patch_size**2], channel first."""
    frames, channels, height, width = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    patches = pixels.reshape(frames, channels, rows, patch_size, columns, patch_size)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(frames * rows * columns, channels * patch_size**2)


def neutral_grids(num_tokens: int, *, merge_size: int, max_num_patches: int) -> tuple[Grid, ...]:
    """Near-square grids that together project to exactly `num_tokens` features.

    No grid has more than `max_num_patches` patches (0: no limit), so neutral media never cost the vision tower
    more than real ones. A run of n tokens becomes one rectangle and, where n has no fitting factors, a rest.
    """
    most = max(1, max_num_patches // merge_size**2) if max_num_patches else num_tokens
    grids: list[Grid] = []
    left = num_tokens
    while left > 0:
        rows = math.isqrt(min(left, most))
        columns = min(left, most) // rows
        grids.append(Grid(rows * merge_size, columns * merge_size))
        left -= rows * columns
    return tuple(grids)
