# SPDX-License-Identifier: Apache-2.0
"""Patch grids of video frames: one target for every frame, no budget shared with anything.

The arithmetic is vLLM's `_compute_aspect_preserving_size` and `get_video_target_size_and_feature_size`
(vllm/transformers_utils/processors/nano_nemotron_vl.py), which transformers repeats in
`NemotronH_Omni_Reasoning_V3VideoProcessor._compute_target_patches`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_ext.align.grids import Grid, Size


@dataclass(frozen=True)
class VideoTiler:
    """How one processor sizes video frames. `target_num_patches` is per frame; `temporal_patch_size` counts the
    frames of one tubelet."""

    patch_size: int
    merge_size: int
    target_num_patches: int
    maintain_aspect_ratio: bool = True
    temporal_patch_size: int = 1

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "target_num_patches", "temporal_patch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"video {name} must be at least 1, got {getattr(self, name)}")

    def num_tubelets(self, num_frames: int) -> int:
        """Runs that a clip of `num_frames` sampled frames becomes."""
        return -(-num_frames // self.temporal_patch_size)

    def grid(self, size: Size, target: int | None = None) -> Grid:
        """The grid of frames of (height, width) pixels under a target of patches (default: the configured one)."""
        target = self.target_num_patches if target is None else target
        if not self.maintain_aspect_ratio:
            side = max(self.merge_size, math.isqrt(target) // self.merge_size * self.merge_size)
            return Grid(side, side)
        aspect = size[1] / max(size[0], 1)
        height = max(round(math.sqrt(target / aspect)), 1)
        width = max(round(math.sqrt(target * aspect)), 1)
        rest_height, rest_width = height % self.merge_size, width % self.merge_size
        up_height = height + (self.merge_size - rest_height if rest_height else 0)
        up_width = width + (self.merge_size - rest_width if rest_width else 0)
        if up_height * up_width <= target:
            return Grid(up_height, up_width)
        return Grid(max(self.merge_size, height - rest_height), max(self.merge_size, width - rest_width))

    def static_grid(self, size: Size) -> Grid:
        """The grid under the configured target."""
        return self.grid(size)

    def feasible_grids(self, size: Size, num_tokens: int) -> tuple[Grid, ...]:
        """Every grid with `num_tokens` tokens per tubelet that some target leads to, sorted.

        A tubelet has the tokens of one frame. Targets up to twice the configured one are considered, or up to
        twice the patches that the tokens stand for, whichever is more.
        """
        if num_tokens < 1:
            return ()
        limit = 2 * max(self.target_num_patches, num_tokens * self.merge_size**2)
        # Powers of two, so that different lengths share one table per size.
        return _reachable(self, (int(size[0]), int(size[1])), 1 << (limit - 1).bit_length()).get(
            int(num_tokens), ()
        )


@functools.lru_cache(maxsize=1024)
def _reachable(tiler: VideoTiler, size: Size, limit: int) -> Mapping[int, tuple[Grid, ...]]:
    table: dict[int, tuple[Grid, ...]] = {}
    for grid in sorted({tiler.grid(size, target) for target in range(1, limit + 1)}):
        tokens = grid.num_tokens(tiler.merge_size)
        table[tokens] = (*table.get(tokens, ()), grid)
    return table
