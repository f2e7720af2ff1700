# SPDX-License-Identifier: Apache-2.0
"""Nemotron VL checkpoints without dynamic resolution: square tiles of one size, still images only.

The pixels are those of vLLM's `dynamic_preprocess` (vllm/transformers_utils/processors/nano_nemotron_vl.py), which
resizes in float. InternVL's tiles have the same grids and are resized as bytes: see `internvl`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_rl_ext.align.families.family import (
    Geometry,
    MediaTensors,
    PackedItem,
    Seen,
    Written,
    join_rows,
    refuse_arguments,
)
from nemo_rl_ext.align.fixed_tiles import FixedTiler
from nemo_rl_ext.align.grids import Array, Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.limits import ANY, Limits
from nemo_rl_ext.align.pixels import resize_and_normalize
from nemo_rl_ext.align.runs import Grammar, PlaceholderRuns
from nemo_rl_ext.align.verdict import Fault, MediaAlignmentError, MediaKind, Reason
from nemo_rl_ext.align.wording import counted


@dataclass(frozen=True, kw_only=True)
class FixedTileFamily:
    """One run per image of a whole number of tiles; tensors are `pixel_values` [tiles, 3, tile, tile] and
    `num_patches` int64 [images], the tiles of each image with its thumbnail."""

    grammar: Grammar
    tiler: FixedTiler
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    dtype: torch.dtype = torch.float32
    decoder: Callable[[Sequence[int]], str] | None = field(default=None, compare=False, repr=False)

    @property
    def grammars(self) -> tuple[Grammar, ...]:
        return (self.grammar,)

    @property
    def sizer(self) -> FixedTiler:
        return self.tiler

    def served_with(self, arguments: Mapping[str, Any]) -> FixedTileFamily:
        refuse_arguments(arguments, known=(self.tiler.argument,))
        limit = arguments.get(self.tiler.argument) or self.tiler.limit
        return dataclasses.replace(self, tiler=self.tiler.with_limit(int(limit)))

    def placeholders(self) -> tuple[str, ...]:
        return ("<image>",)

    def marker(self, kind: MediaKind) -> str:
        return f"<{kind}>"

    def written(self, item: MediaItem) -> Written:
        return Written((), 2)

    @property
    def merge_size(self) -> int:
        return self.tiler.merge_size

    def decode(self, token_ids: Sequence[int]) -> str | None:
        return self.decoder(token_ids) if self.decoder is not None else None

    def frames_per_tubelet(self) -> int:
        return 1

    def num_tubelets(self, item: MediaItem) -> int:
        if item.kind == "video":
            raise ValueError(f"{item.source}: families with fixed tiles take still images, got a video")
        return 1

    def split(
        self, runs: PlaceholderRuns, texts: Sequence[str] | None, items: Sequence[MediaItem]
    ) -> list[Seen] | Fault:
        if len(runs) != len(items):
            return Fault(Reason.RUN_COUNT, f"{counted(len(items), 'run')} expected, {len(runs)} found")
        return [Seen(lengths=(length,)) for length in runs.lengths.tolist()]

    def static(self, items: Sequence[MediaItem]) -> tuple[Geometry, ...]:
        return tuple(
            Geometry(grid, self.num_tubelets(item))
            for grid, item in zip(self.static_grids(items), items, strict=True)
        )

    def static_grids(self, items: Sequence[MediaItem]) -> tuple[Grid, ...]:
        return tuple(self.tiler.grid(item.size, item.max_num_tiles) for item in items)

    def run_lengths(self, geometry: Geometry, kind: MediaKind) -> tuple[int, ...]:
        return (self.tiler.num_tokens(geometry.grid),)

    def frames(self, item: MediaItem, seen: Seen, hint: Sequence[int]) -> tuple[int, ...] | Fault | None:
        return None

    def candidates(self, item: MediaItem, seen: Seen) -> tuple[Geometry, ...] | Fault:
        (length,) = seen.lengths
        grids = self.tiler.feasible_grids(item.size, length, item.max_num_tiles)
        return tuple(Geometry(grid) for grid in grids)

    def limits(self, item: MediaItem, seen: Seen) -> tuple[Limits, ...]:
        return (ANY,)

    def most_tokens(self, item: MediaItem) -> int | None:
        return None

    def captured(self, item: MediaItem, values: Mapping[str, Any]) -> Geometry | None:
        """`image_num_patches` counts tiles, which the run does, too; the one canvas that has them is the geometry."""
        tiles = values.get("image_num_patches")
        if tiles is None:
            return None
        tokens = int(torch.as_tensor(tiles).sum()) * self.tiler.tokens_per_tile
        grids = self.tiler.feasible_grids(item.size, tokens, item.max_num_tiles)
        return Geometry(grids[0]) if len(grids) == 1 else None

    def shared_outcomes(self, sizes: Sequence[Size], max_tokens: int) -> Array | None:
        """Fixed tiles share no budget: nothing to replay."""
        return None

    def render(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        """One image as tiles [tiles, 3, tile, tile], row by row, the thumbnail last."""
        pixels = item.pixels()[:1]
        side, tile = self.tiler.patches_per_side, self.tiler.tile_size
        whole = self._resize(pixels, grid)
        rows, columns = grid.height // side, grid.width // side
        tiles = (
            whole.reshape(1, 3, rows, tile, columns, tile)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(-1, 3, tile, tile)
        )
        if self.tiler.use_thumbnail and rows * columns > 1:
            tiles = torch.cat([tiles, self._resize(pixels, Grid(side, side))])
        return tiles

    def _resize(self, pixels: Array, grid: Grid) -> torch.Tensor:
        return resize_and_normalize(
            pixels, grid, patch_size=self.tiler.patch_size, mean=self.mean, std=self.std, dtype=self.dtype
        )

    def pack(
        self, items: Sequence[MediaItem], grids: Sequence[Grid], rendered: Sequence[torch.Tensor]
    ) -> MediaTensors:
        return self._pack(tuple(grids), rendered)

    def _pack(self, grids: tuple[Grid, ...], tiles: Sequence[torch.Tensor]) -> MediaTensors:
        counts = torch.tensor([len(image) for image in tiles], dtype=torch.int64)
        return MediaTensors(
            grids=grids, values={"pixel_values": torch.cat(list(tiles)), "num_patches": counts}
        )

    def items_in(self, values: Mapping[str, torch.Tensor]) -> tuple[PackedItem, ...]:
        """Nothing: a number of tiles leaves rows and columns open."""
        return ()

    def keys(self) -> Mapping[str, bool]:
        return {"pixel_values": False, "num_patches": False}

    def join(self, rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return join_rows(rows, self.keys())

    def num_features(self, tensors: MediaTensors) -> int:
        return len(tensors.values["pixel_values"]) * self.tiler.tokens_per_tile

    def neutral(self, run_lengths: Sequence[int], grammars: Sequence[int] = ()) -> MediaTensors:
        """Blank tiles, one feature per context token.

        Raises:
            MediaAlignmentError: when the tokens are no whole number of tiles: a fixed-tile tower can project to
                no other count, so such a turn cannot enter the forward at all.
        """
        tokens, per_tile = sum(run_lengths), self.tiler.tokens_per_tile
        if tokens % per_tile:
            raise MediaAlignmentError(
                f"{tokens} context tokens are no whole number of tiles of {per_tile} tokens: a model with fixed "
                "tiles has no count-correct media for this turn; ban media tokens from sampling and raise the "
                "context length so that no run is cut"
            )
        side, tile = self.tiler.patches_per_side, self.tiler.tile_size
        blank = torch.zeros(1, 3, tile, tile, dtype=self.dtype)
        count = tokens // per_tile
        return self._pack((Grid(side, side),) * count, [blank] * count)

    def sequence(
        self, token_ids: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {}
