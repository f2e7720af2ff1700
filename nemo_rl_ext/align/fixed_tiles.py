# SPDX-License-Identifier: Apache-2.0
"""Fixed tiles: an image becomes rows x columns square tiles of one size, plus a thumbnail when there are several.

The arithmetic is vLLM's `get_internvl_target_ratios`, `find_closest_aspect_ratio` and `calculate_internvl_targets`
(vllm/transformers_utils/processors/internvl.py), which InternVL and the Nemotron VL checkpoints without dynamic
resolution share.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_ext.align.grids import Grid, Size

LARGEST_MAX_TILES = 40
"""The most tiles per image that an engine is taken to be configured with, when a run is inverted."""


def uses_fixed_tiles(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config.json describes fixed tiles: no patch limits for dynamic resolution.

    The predicate is vLLM's (`BaseNanoNemotronVLProcessor.use_dynamic_resolution`).
    """
    vision = config.get("vision_config") or {}
    return "force_image_size" in config and "min_num_patches" not in (vision.get("args") or {})


@dataclass(frozen=True)
class FixedTiler:
    """`tile_size` and `patch_size` in pixels, `merge_size` in patches, `max_num_tiles` without the thumbnail."""

    tile_size: int
    patch_size: int
    merge_size: int
    max_num_tiles: int
    use_thumbnail: bool

    def __post_init__(self) -> None:
        if self.tile_size % (self.patch_size * self.merge_size):
            raise ValueError(
                f"tile_size {self.tile_size} must be a multiple of patch_size x merge_size "
                f"({self.patch_size} x {self.merge_size})"
            )

    @property
    def patches_per_side(self) -> int:
        return self.tile_size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        return self.patches_per_side**2 // self.merge_size**2

    def num_tiles(self, grid: Grid) -> int:
        """Tiles of a grid, the thumbnail included."""
        tiles = grid.num_patches // self.patches_per_side**2
        return tiles + 1 if self.use_thumbnail and tiles > 1 else tiles

    def num_tokens(self, grid: Grid) -> int:
        return self.num_tiles(grid) * self.tokens_per_tile

    def grid(self, size: Size, max_num_tiles: int | None = None) -> Grid:
        """The patch grid of an image of (height, width) pixels, the thumbnail not counted in it."""
        columns, rows = _ratio(size, max_num_tiles or self.max_num_tiles, self.tile_size)
        return Grid(rows * self.patches_per_side, columns * self.patches_per_side)

    def feasible_grids(
        self, size: Size, num_tokens: int, max_num_tiles: int | None = None
    ) -> tuple[Grid, ...]:
        """Every grid with `num_tokens` tokens that some limit of tiles leads to, sorted: the inverted tile count."""
        if num_tokens < 1 or num_tokens % self.tokens_per_tile:
            return ()
        limit = max(LARGEST_MAX_TILES, self.max_num_tiles, max_num_tiles or 0)
        grids = {self.grid(size, number) for number in range(1, limit + 1)}
        return tuple(sorted(grid for grid in grids if self.num_tokens(grid) == num_tokens))

    def limits(self, size: Size, num_tokens: int) -> tuple[int, ...]:
        """Every limit of tiles under which an image of this size has `num_tokens` tokens."""
        most = max(LARGEST_MAX_TILES, self.max_num_tiles)
        return tuple(
            number for number in range(1, most + 1) if self.num_tokens(self.grid(size, number)) == num_tokens
        )


@functools.cache
def _ratios(max_num: int) -> tuple[tuple[int, int], ...]:
    """(columns, rows) in the engine's order: its ties fall to the iteration order of a set built in this order."""
    ratios = {
        (columns, rows)
        for number in range(1, max_num + 1)
        for columns in range(1, number + 1)
        for rows in range(1, number + 1)
        if 1 <= columns * rows <= max_num
    }
    return tuple(sorted(ratios, key=lambda ratio: ratio[0] * ratio[1]))


@functools.lru_cache(maxsize=4096)
def _ratio(size: Size, max_num: int, tile_size: int) -> tuple[int, int]:
    height, width = size
    aspect, area = width / height, width * height
    best, best_difference = (1, 1), float("inf")
    for ratio in _ratios(max_num):
        difference = abs(aspect - ratio[0] / ratio[1])
        larger_fits = difference == best_difference and area > 0.5 * tile_size**2 * ratio[0] * ratio[1]
        if difference < best_difference or larger_fits:
            best, best_difference = ratio, difference
    return best
