# SPDX-License-Identifier: Apache-2.0
"""Patch grids: which ones the engine can choose for an image, and which of them fit a run.

The arithmetic is vLLM's `DynamicResolutionImageTiler.process_media` and `compute_params`
(vllm/transformers_utils/processors/nano_nemotron_vl.py), which transformers repeats as `get_patch_grid_size`
(models/nemotron_h_omni/image_processing_nemotron_h_omni.py). It is repeated here to the last bit, banker's
rounding included, because a run length is only evidence when the arithmetic that produced it is known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from nemo_rl_ext.align.even_grids import nearest_even

Size = tuple[int, int]
"""(height, width) in pixels."""
Array = np.ndarray[Any, np.dtype[Any]]

RESERVED_TOKENS = 4
"""Context tokens that the engine's processor sets aside before it shares the rest among a request's images."""


class Grid(NamedTuple):
    """A patch grid: how many patches an image is cut into, (height, width)."""

    height: int
    width: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width

    def num_tokens(self, merge_size: int = 2) -> int:
        """Context tokens of this grid: every `merge_size` x `merge_size` patches become one."""
        return self.height * self.width // merge_size**2

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


class BudgetCurve(NamedTuple):
    """Per budget from `min_num_patches` on, int64 [budgets]: the grid's patches, and the least budget from which on the
    grid is this one."""

    num_patches: Array
    settled: Array


@dataclass(frozen=True)
class DynamicTiler:
    """The dynamic-resolution arithmetic of one processor; all budgets count patches.

    `patch_size` is in pixels, `merge_size` in patches, and a `max_num_patches` of 0 means no limit.
    """

    limit_name: ClassVar[str] = "max_num_patches"
    shares_context: ClassVar[bool] = True
    reserved_tokens: ClassVar[int] = RESERVED_TOKENS

    patch_size: int
    merge_size: int
    min_num_patches: int
    max_num_patches: int

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "min_num_patches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_patches < 0:
            raise ValueError(f"max_num_patches must be 0 (no limit) or positive, got {self.max_num_patches}")

    @property
    def limit(self) -> int:
        return self.max_num_patches

    @property
    def least_limit(self) -> int:
        return self.min_num_patches

    def with_limit(self, limit: int) -> DynamicTiler:
        return replace(self, max_num_patches=limit)

    def of_row(self, max_num_tiles: int | None) -> DynamicTiler:
        return self

    def meet(self, other: DynamicTiler) -> DynamicTiler:
        least = max(self.min_num_patches, other.min_num_patches)
        limits = [limit for limit in (self.limit, other.limit) if limit]
        return replace(self, min_num_patches=least, max_num_patches=max(least, min(limits)) if limits else 0)

    def num_tokens(self, grid: Grid) -> int:
        return grid.num_tokens(self.merge_size)

    def fixed_grid(self, size: Size, num_patches: int) -> Grid | None:
        """An odd side is rounded up on both sides, and a grid below the minimum is raised: even ones between stay."""
        most = min(num_patches, self.max_num_patches) if self.max_num_patches else num_patches
        sides = nearest_even(
            size,
            self.static_grid(size),
            step=math.lcm(2, self.merge_size),
            least=self.min_num_patches,
            most=most,
        )
        return sides and Grid(*sides)

    def grid(self, size: Size, budget: int) -> Grid:
        """The grid that the engine chooses for one image under a budget of patches.

        Where the engine's own arithmetic divides by zero (a side that floors to no patch at all, on aspect
        ratios of about a thousand), that side counts as one patch. Under the smallest budget it comes to no patch
        across for such a sliver, and fails on it: only here is that grid given, and no other method gives it.
        """
        height, width = _own_grid(size, self.patch_size)
        factor = min(math.sqrt(budget / (height * width)), 1.0)
        height, width = math.floor(factor * height), math.floor(factor * width)
        if budget > self.min_num_patches and height * width < self.min_num_patches:
            height, width = max(height, 1), max(width, 1)
            factor = math.sqrt(self.min_num_patches / (height * width))
            height, width = math.ceil(factor * height), math.ceil(factor * width)
        height = self._snap(height, width, budget)
        width = self._snap(width, height, budget)
        return Grid(height, width)

    def _snap(self, side: int, other: int, budget: int) -> int:
        """Round one side to the merge size: up where the budget allows it, down otherwise."""
        rest = side % self.merge_size
        if not rest:
            return side
        up = side + self.merge_size - rest
        return up if up * other <= budget else max(self.merge_size, side - rest)

    def snap(self, side: Array, other: Array, budget: Array | int) -> Array:
        """Sides rounded to the merge size beside the `other` ones: up where the budget allows it, down otherwise."""
        rest = side % self.merge_size
        up = side + self.merge_size - rest
        down = np.maximum(self.merge_size, side - rest)
        return np.where(rest == 0, side, np.where(up * other <= budget, up, down))

    def static_grid(self, size: Size, budget: int | None = None) -> Grid:
        """The grid of an image that has a budget to itself: by default the whole configured one."""
        height, width = self.grid(size, self.own_budget(size) if budget is None else budget)
        return Grid(max(height, self.merge_size), max(width, self.merge_size))

    def max_budget(self, size: Size) -> int:
        """The largest budget that the engine can come to and that still makes a difference for this size.

        It shrinks the images of a crowded request in proportion to their grids, and a sliver's grid can be larger
        than its budget: its next budget may then lie above `max_num_patches`.
        """
        return _max_budget(self, (int(size[0]), int(size[1])))

    def own_budget(self, size: Size) -> int:
        """The budget of an image that has the whole configured one to itself, as far as it makes a difference."""
        height, width = _own_grid(size, self.patch_size)
        factor = max(1.0, math.sqrt(self.min_num_patches / (height * width)))
        rounded_up = (math.ceil(factor * height) + self.merge_size) * (
            math.ceil(factor * width) + self.merge_size
        )
        ceiling = max(rounded_up, self.min_num_patches + 1)
        if not self.max_num_patches:
            return ceiling
        return max(self.min_num_patches, min(self.max_num_patches, ceiling))

    def budget_curve(self, size: Size) -> BudgetCurve:
        """What each budget up to `own_budget(size)` makes of an image: the static grids of all lower limits."""
        budgets = np.arange(self.min_num_patches, self.own_budget(size) + 1, dtype=np.int64)
        height, width = (np.maximum(side, self.merge_size) for side in _grids(self, size, budgets))
        begins = np.r_[True, (np.diff(height) != 0) | (np.diff(width) != 0)]
        return BudgetCurve(
            num_patches=height * width, settled=np.maximum.accumulate(np.where(begins, budgets, 0))
        )

    def feasible_grids(self, size: Size, num_tokens: int) -> tuple[Grid, ...]:
        """Every grid with `num_tokens` context tokens that some budget leads to, sorted.

        Budgets run from `min_num_patches` to `max_budget`. The token count is not monotone in the budget, so all of
        them are evaluated, once per size, in one vectorised pass.
        """
        if num_tokens < 1:
            return ()
        return _reachable(self, (int(size[0]), int(size[1]))).get(int(num_tokens), ())

    def most_tokens(self, size: Size) -> int:
        """The most context tokens that any budget gives an image of this size."""
        return _most_tokens(self, (int(size[0]), int(size[1])))

    def joint_grids(self, sizes: Sequence[Size], num_tokens: int) -> tuple[Grid, ...] | None:
        """The grids of all images of one request that share `num_tokens` context tokens (vLLM `compute_params`).

        Returns None where the engine's own iteration does not settle, or leaves a sliver without a patch across, and
        it would refuse the request.
        """
        if not sizes:
            return ()
        available = max(num_tokens * self.merge_size**2, self.min_num_patches * len(sizes))
        ceiling = min(available, self.max_num_patches) if self.max_num_patches else available
        budgets = [max(ceiling, self.min_num_patches)] * len(sizes)
        for _ in range(10):
            grids = tuple(self.grid(size, budget) for size, budget in zip(sizes, budgets, strict=True))
            total = sum(grid.num_patches for grid in grids)
            if total <= available:
                return grids if all(grid.num_patches for grid in grids) else None
            scale = available / total
            scaled = [max(self.min_num_patches, int(grid.num_patches * scale)) for grid in grids]
            shrank = any(new < old for new, old in zip(scaled, budgets, strict=True))
            budgets = scaled if shrank else [self.min_num_patches] * len(sizes)
        return None

    def shared_outcomes(self, sizes: Sequence[Size], max_tokens: int) -> Array:
        """Every outcome of `joint_grids` over budgets of 1 to `max_tokens` context tokens.

        int64 [outcomes, images, 2] (height, width) in patches, each outcome once. What a request's text, other media
        or a version's reserve take off the context only moves the budget, so the engine's own choice is among them.
        """
        static = [self.static_grid(size) for size in sizes]
        tokens_of = self.merge_size**2
        # From here on every image has its whole budget to itself.
        enough = max(sum(grid.num_patches for grid in static), max(map(self.own_budget, sizes), default=0))
        top = max(1, min(int(max_tokens), -(-enough // tokens_of)))
        lowest = max(1, min(top, self.min_num_patches * len(sizes) // tokens_of))
        available = np.arange(lowest, top + 1, dtype=np.int64) * tokens_of
        available = np.maximum(available, self.min_num_patches * len(sizes))
        ceiling = np.minimum(available, self.max_num_patches) if self.max_num_patches else available
        budgets = np.repeat(np.maximum(ceiling, self.min_num_patches)[:, None], len(sizes), axis=1)
        done: list[Array] = []
        for _ in range(10):
            grids = np.stack(
                [np.stack(_grids(self, size, budgets[:, i]), -1) for i, size in enumerate(sizes)], axis=1
            )
            patches = grids.prod(-1)
            total = patches.sum(-1)
            fits = total <= available
            done.append(grids[fits])
            if fits.all():
                break
            scale = available[~fits] / total[~fits]
            scaled = (patches[~fits] * scale[:, None]).astype(np.int64)
            scaled = np.maximum(scaled, self.min_num_patches)
            shrank = (scaled < budgets[~fits]).any(-1)
            budgets = np.where(shrank[:, None], scaled, self.min_num_patches)
            available = available[~fits]
        outcomes = np.concatenate(done)
        return np.unique(outcomes[outcomes.all(axis=(1, 2))], axis=0)


def _own_grid(size: Size, patch_size: int) -> tuple[int, int]:
    """The image's own grid before any budget; `round(x + 0.5)` with banker's rounding, as in the engine."""
    height, width = size
    if height < 1 or width < 1:
        raise ValueError(
            f"an image needs at least one pixel per side, got (height, width) = ({height}, {width})"
        )
    return round(height / patch_size + 0.5), round(width / patch_size + 0.5)


@functools.lru_cache(maxsize=4096)
def _max_budget(tiler: DynamicTiler, size: Size) -> int:
    top = tiler.own_budget(size)
    if not tiler.max_num_patches:
        return top
    # Of every budget up to here the grid, and of the largest grid the next budget, as often as the engine tries.
    bottom = tiler.min_num_patches
    for _ in range(9):
        height, width = _grids(tiler, size, np.arange(bottom, top + 1, dtype=np.int64))
        largest = int((height * width).max())
        if largest <= top:
            break
        bottom, top = top, largest
    return top


@functools.lru_cache(maxsize=4096)
def _most_tokens(tiler: DynamicTiler, size: Size) -> int:
    return max(_reachable(tiler, size), default=0)


@functools.lru_cache(maxsize=4096)
def _reachable(tiler: DynamicTiler, size: Size) -> Mapping[int, tuple[Grid, ...]]:
    """Context tokens -> grids, over every budget."""
    merge = tiler.merge_size
    height, width = _grids(
        tiler, size, np.arange(tiler.min_num_patches, tiler.max_budget(size) + 1, dtype=np.int64)
    )
    changes = np.flatnonzero((np.diff(height) != 0) | (np.diff(width) != 0)) + 1
    firsts = np.concatenate(([0], changes))
    table: dict[int, tuple[Grid, ...]] = {}
    for sides in sorted(set(zip(height[firsts].tolist(), width[firsts].tolist(), strict=True))):
        grid = Grid(*sides)
        if not grid.num_patches:
            continue
        table[grid.num_tokens(merge)] = (*table.get(grid.num_tokens(merge), ()), grid)
    return table


def _grids(tiler: DynamicTiler, size: Size, budget: Array) -> tuple[Array, Array]:
    """`DynamicTiler.grid` evaluated on budgets int64 [budgets]: heights and widths, int64 [budgets]."""
    own_height, own_width = _own_grid(size, tiler.patch_size)
    factor = np.minimum(np.sqrt(budget / (own_height * own_width)), 1.0)
    height = np.floor(factor * own_height).astype(np.int64)
    width = np.floor(factor * own_width).astype(np.int64)

    grow = (budget > tiler.min_num_patches) & (height * width < tiler.min_num_patches)
    if grow.any():
        low_height, low_width = np.maximum(height[grow], 1), np.maximum(width[grow], 1)
        factor = np.sqrt(tiler.min_num_patches / (low_height * low_width))
        height[grow] = np.ceil(factor * low_height).astype(np.int64)
        width[grow] = np.ceil(factor * low_width).astype(np.int64)

    height = tiler.snap(height, width, budget)
    return height, tiler.snap(width, height, budget)
