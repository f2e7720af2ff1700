# SPDX-License-Identifier: Apache-2.0
"""Fixed tiles: an image becomes rows x columns square tiles of one size, plus a thumbnail when there are several.

The arithmetic is vLLM's `get_internvl_target_ratios`, `find_closest_aspect_ratio` and `calculate_internvl_targets`
(vllm/transformers_utils/processors/internvl.py), which InternVL and the Nemotron VL checkpoints without dynamic
resolution share.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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

    limit_name: ClassVar[str] = "max_tiles"
    shares_context: ClassVar[bool] = False
    reserved_tokens: ClassVar[int] = 0

    tile_size: int
    patch_size: int
    merge_size: int
    max_num_tiles: int
    use_thumbnail: bool
    argument: str = "max_num_tiles"
    """What a checkpoint, and a request to its engine, call the most tiles."""

    def __post_init__(self) -> None:
        if self.tile_size % (self.patch_size * self.merge_size):
            raise ValueError(
                f"tile_size {self.tile_size} must be a multiple of patch_size x merge_size "
                f"({self.patch_size} x {self.merge_size})"
            )

    @property
    def limit(self) -> int:
        return self.max_num_tiles

    @property
    def least_limit(self) -> int:
        return 1

    def with_limit(self, limit: int) -> FixedTiler:
        return replace(self, max_num_tiles=limit)

    def of_row(self, max_num_tiles: int | None) -> FixedTiler:
        return self.with_limit(max_num_tiles or self.limit)

    def meet(self, other: FixedTiler) -> FixedTiler:
        return self.with_limit(min(self.limit, other.limit))

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

    def static_grid(self, size: Size) -> Grid:
        """The grid under the configured number of tiles."""
        return self.grid(size)

    def joint_grids(self, sizes: Sequence[Size], num_tokens: int) -> tuple[Grid, ...] | None:
        """Each image's own grid: they share nothing."""
        return tuple(self.grid(size) for size in sizes)

    def fixed_grid(self, size: Size, num_patches: int) -> Grid | None:
        """The largest canvas that an image of this size can have and that is its own: 3x3 tiles may become 4x4."""
        side = self.patch_size
        canvases = {self.grid(size, number) for number in range(1, self.max_num_tiles + 1)}
        usable = [
            grid
            for grid in canvases
            if self.num_tokens(grid) * self.merge_size**2 <= num_patches
            and self.grid((grid.height * side, grid.width * side)) == grid
        ]
        return max(usable, key=lambda grid: (grid.num_patches, grid), default=None)

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
