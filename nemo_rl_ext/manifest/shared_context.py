# SPDX-License-Identifier: Apache-2.0
"""At which limits and contexts images that share a context keep their static grids.

The images of a request share `merge_size**2 * (max_model_len - 4 - text)` patches (vLLM's `compute_params`; whether the
text counts depends on its version and on how the prompt is given, so it always does here). Every image has its static
grid, whatever its siblings, the cache or the turn, when the static grids add up to no more than that and the shared
budget alone makes no image smaller. Both only get easier when some of the images or some of the text are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import numpy as np

from nemo_rl_ext.align.grids import RESERVED_TOKENS, Array, BudgetCurve, DynamicTiler, Size


def shared_patches(max_model_len: int, text_tokens: int, tiler: DynamicTiler) -> int:
    """Patches that the images of a request share when its text is deducted."""
    return tiler.merge_size**2 * max(max_model_len - RESERVED_TOKENS - text_tokens, 0)


def needed_patches(sizes: Sequence[Size], tiler: DynamicTiler) -> int:
    """Shared patches from which on every image has its static grid, in every part of the request."""
    curves = [_curve(tiler, size) for size in sizes]
    static = sum(int(curve.num_patches[-1]) for curve in curves)
    return max(static, *(int(curve.settled[-1]) for curve in curves))


def limit_for_any(num_images: int, text_tokens: int, tiler: DynamicTiler, max_model_len: int) -> int | None:
    """The largest `max_num_patches` at which `num_images` images of whatever sizes are never re-sized.

    It holds for images whose longer side is at most an eighth of the limit times the shorter one: of thinner ones a
    single row of patches is left, which is doubled whatever the budget.
    """
    if not num_images:
        return tiler.max_num_patches or None
    share = shared_patches(max_model_len, text_tokens, tiler) // num_images
    top = min(share, tiler.max_num_patches) if tiler.max_num_patches else share
    limits = range(top, tiler.min_num_patches - 1, -1)
    return next((limit for limit in limits if _most_patches_when_raised(tiler, limit) <= share), None)


def context_for_any(num_images: int, text_tokens: int, tiler: DynamicTiler) -> int:
    """The smallest context at which `limit_for_any` is the present limit, which must be one."""
    share = max(tiler.max_num_patches, _most_patches_when_raised(tiler, tiler.max_num_patches))
    return -(-num_images * share // tiler.merge_size**2) + RESERVED_TOKENS + text_tokens


def _most_patches_when_raised(tiler: DynamicTiler, limit: int) -> int:
    """Most patches of a small image that is raised to `min_num_patches`: rounding up both sides may pass the limit."""
    heights, widths = _small_grids(tiler.min_num_patches)
    if limit <= tiler.min_num_patches or not len(heights):
        return limit
    factor = np.sqrt(tiler.min_num_patches / (heights * widths))
    height, width = (np.ceil(factor * side).astype(np.int64) for side in (heights, widths))
    height = tiler.snap(height, width, limit)
    width = tiler.snap(width, height, limit)
    return int((height * width).max())


@functools.lru_cache(maxsize=8)
def _small_grids(min_num_patches: int) -> tuple[Array, Array]:
    """Heights and widths int64 [grids] of every grid of fewer patches."""
    sides = [(h, w) for h in range(1, min_num_patches) for w in range(1, (min_num_patches - 1) // h + 1)]
    heights, widths = np.array(sides, np.int64).reshape(-1, 2).T
    return heights, widths


@functools.lru_cache(maxsize=512)
def _curve(tiler: DynamicTiler, size: Size) -> BudgetCurve:
    return tiler.budget_curve(size)


def largest_limit(rows: Collection[tuple[tuple[Size, ...], int]], tiler: DynamicTiler) -> int | None:
    """The largest limit, no larger than today's, at which each (sizes, shared patches) keeps its static grids.

    Not a bisection: rounding makes the patches of a grid fall in places where the limit rises.
    """
    low = tiler.min_num_patches
    top = tiler.max_num_patches or max(
        (tiler.own_budget(size) for sizes, _ in rows for size in sizes), default=low
    )
    usable = np.ones(top - low + 1, bool)
    for sizes, shared in rows:
        budgets = [tiler.own_budget(size) for size in sizes]
        # No limit makes more patches of an image than twice its budget, or twice the minimum where it is raised.
        if max(budgets) <= shared and sum(2 * max(budget, low + 1) for budget in budgets) <= shared:
            continue
        total = np.zeros(len(usable), np.int64)
        settled = np.zeros(len(usable), np.int64)
        for size in sizes:
            curve = _curve(tiler, size)
            total += _held(curve.num_patches, len(usable))
            np.maximum(settled, _held(curve.settled, len(usable)), out=settled)
        usable &= (total <= shared) & (settled <= shared)
    return low + int(np.flatnonzero(usable)[-1]) if usable.any() else None


def _held(values: Array, length: int) -> Array:
    """The values, the last one repeated: a larger limit changes nothing for this image."""
    held: Array = np.concatenate((values, np.full(max(length - len(values), 0), values[-1])))[:length]
    return held
