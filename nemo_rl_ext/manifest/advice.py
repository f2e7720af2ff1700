# SPDX-License-Identifier: Apache-2.0
"""Settings at which the engine re-sizes no image of a manifest, and what resolution they cost.

The images of a request share `merge_size**2 * (max_model_len - 4 - text)` patches (vLLM's `compute_params`; whether the
text counts depends on its version and on how the prompt is given, so it always does here). Every image has its static
grid, whatever its siblings, the cache or the turn, when the static grids add up to no more than that and the shared
budget alone makes no image smaller. Both only get easier when some of the images or some of the text are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl_ext.align.grids import RESERVED_TOKENS, Array, BudgetCurve, DynamicTiler, Size
from nemo_rl_ext.manifest.forecast import Measured, RowForecast


@dataclass(frozen=True, kw_only=True)
class RowImages:
    """What a row asks of the shared budget at its last turn."""

    kind: str
    """Which row of the resolution table it belongs to."""
    sizes: tuple[Size, ...]
    """(height, width) in pixels of every image."""
    text_tokens: int
    """Everything in the last request that is no image: text, earlier answers, wrappers, clips' timestamps."""
    other_tokens: int = 0
    """Context tokens of clips, and room for the answer: they take no part in the sharing but must fit."""


def row_images(media: Sequence[Measured], predicted: RowForecast, max_new_tokens: int) -> RowImages:
    """A forecast row as advice wants it."""
    images = [item for item in media if item.kind == "image"]
    if len(images) < len(media):
        kind = "images and clips"
    elif len({item.turn for item in media}) > 1:
        kind = "images of several turns"
    else:
        kind = "one image" if len(images) == 1 else "several images"
    return RowImages(
        kind=kind,
        sizes=tuple(item.size for item in images),
        text_tokens=predicted.text_tokens,
        other_tokens=sum(predicted.video_runs) + max_new_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """Linear resolution that a pin leaves, as a share of what the images have alone today."""

    num_images: int
    mean: float
    worst: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Numbers for a manifest under one context length; None where no number does."""

    num_rows: int
    """Rows with images."""
    num_resized: int
    """Those of them in which the engine may re-size an image under the present limits."""
    num_hopeless: int
    """Those of the re-sized ones that no limit helps: even the smallest grids do not fit beside the text. They are
    left out of the next four numbers."""
    max_images: int
    """Most images of one request."""
    max_text_tokens: int
    """Most text of a request with images."""
    max_num_patches: int | None
    """The largest limit at which no row of this manifest is re-sized."""
    any_max_num_patches: int | None
    """The largest limit at which no request of `max_images` images of any size and `max_text_tokens` is."""
    max_model_len: int
    """The smallest context at which no row is re-sized under the present limit."""
    fitting_model_len: int
    """The smallest context that holds every row at its static grids, its answer included."""
    resolution: dict[str, Resolution]
    """Per kind of row, what `max_num_patches` costs; empty without that number."""


def advise(rows: Iterable[RowImages], tiler: DynamicTiler, max_model_len: int) -> Advice:
    """Advice for rows under `tiler` and a context of `max_model_len` tokens; rows without images take no part."""
    rows = [row for row in rows if row.sizes]
    distinct = list({(row.sizes, row.text_tokens): row for row in rows}.values())
    needs = {(row.sizes, row.text_tokens): needed_patches(row.sizes, tiler) for row in distinct}
    tokens_of = tiler.merge_size**2

    def shared(row: RowImages) -> int:
        return shared_patches(max_model_len, row.text_tokens, tiler)

    def need(row: RowImages) -> int:
        return needs[row.sizes, row.text_tokens]

    smallest = dataclasses.replace(tiler, max_num_patches=tiler.min_num_patches)
    hopeless = {
        (row.sizes, row.text_tokens)
        for row in distinct
        if need(row) > shared(row) and needed_patches(row.sizes, smallest) > shared(row)
    }
    helped = [row for row in rows if (row.sizes, row.text_tokens) not in hopeless]
    pin = _largest_limit({(row.sizes, shared(row)) for row in helped}, tiler) if helped else None
    max_images = max((len(row.sizes) for row in helped), default=0)
    max_text = max((row.text_tokens for row in helped), default=0)
    return Advice(
        num_rows=len(rows),
        num_resized=sum(need(row) > shared(row) for row in rows),
        num_hopeless=len(rows) - len(helped),
        max_images=max_images,
        max_text_tokens=max_text,
        max_num_patches=pin,
        any_max_num_patches=limit_for_any(max_images, max_text, tiler, max_model_len) if helped else None,
        max_model_len=max(
            (-(-need(row) // tokens_of) + RESERVED_TOKENS + row.text_tokens for row in rows), default=1
        ),
        fitting_model_len=max(
            (_static_tokens(row.sizes, tiler) + row.text_tokens + row.other_tokens for row in rows), default=1
        ),
        resolution={} if pin is None else _resolution(helped, tiler, pin),
    )


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


def _static_tokens(sizes: Sequence[Size], tiler: DynamicTiler) -> int:
    return sum(tiler.static_grid(size).num_tokens(tiler.merge_size) for size in sizes)


def _largest_limit(rows: Collection[tuple[tuple[Size, ...], int]], tiler: DynamicTiler) -> int | None:
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


def _resolution(rows: Sequence[RowImages], tiler: DynamicTiler, limit: int) -> dict[str, Resolution]:
    pinned = dataclasses.replace(tiler, max_num_patches=limit)
    shares: dict[str, list[float]] = {}
    for row in rows:
        shares.setdefault(row.kind, []).extend(_kept(size, tiler, pinned) for size in row.sizes)
    return {
        kind: Resolution(num_images=len(found), mean=sum(found) / len(found), worst=min(found))
        for kind, found in sorted(shares.items())
    }


@functools.lru_cache(maxsize=65_536)
def _kept(size: Size, tiler: DynamicTiler, pinned: DynamicTiler) -> float:
    return math.sqrt(pinned.static_grid(size).num_patches / tiler.static_grid(size).num_patches)
