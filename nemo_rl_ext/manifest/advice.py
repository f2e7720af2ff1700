# SPDX-License-Identifier: Apache-2.0
"""Settings at which the engine re-sizes no image of a manifest, and what resolution they cost.

Where images share the context, siblings and text re-size them (`shared_context`). Where they do not, an engine re-sizes
an image only when it is given other limits than the trainer, and refuses a row that is too long.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nemo_rl_ext.align.grids import RESERVED_TOKENS, DynamicTiler, Size
from nemo_rl_ext.align.sizer import Sizer
from nemo_rl_ext.manifest.forecast import Measured, RowForecast
from nemo_rl_ext.manifest.shared_context import (
    largest_limit,
    limit_for_any,
    needed_patches,
    shared_patches,
)


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

    limit_name: str
    """What limits an image, and the option of `pin` that changes it."""
    num_rows: int
    """Rows with images."""
    num_resized: int
    """Those of them in which the engine may re-size an image under the present limits."""
    num_too_long: int
    """Those that the engine refuses under the present limits, where images are not re-sized to fit."""
    num_hopeless: int
    """Those of both that no limit helps: even the smallest grids do not fit beside the text, or the engine refuses an
    image's shape. They are left out of the next four numbers."""
    max_images: int
    """Most images of one request."""
    max_text_tokens: int
    """Most text of a request with images."""
    limit: int | None
    """The largest limit, for engine and trainer, at which no row of this manifest is re-sized or refused."""
    any_limit: int | None
    """The largest limit at which no request of `max_images` images of any size and `max_text_tokens` is re-sized; only
    where images share the context."""
    max_model_len: int | None
    """The smallest context at which no row is re-sized under the present limit; only where images share the context."""
    fitting_model_len: int
    """The smallest context that holds every row at its static grids, its answer included."""
    resolution: dict[str, Resolution]
    """Per kind of row, what `limit` costs; empty without that number."""

    @property
    def is_needed(self) -> bool:
        """Whether a row is re-sized or refused under the present limits."""
        return bool(self.num_resized or self.num_too_long)


def advise(
    rows: Iterable[RowImages], sizer: Sizer, max_model_len: int, *, trainer: Sizer | None = None
) -> Advice:
    """Advice for rows under an engine's `sizer` and a context of `max_model_len` tokens, `trainer` being the trainer's.

    Rows without images take no part.
    """
    rows = [row for row in rows if row.sizes]
    if isinstance(sizer, DynamicTiler):
        return _advise_shared(rows, sizer, max_model_len)
    return _advise_apart(rows, sizer, trainer or sizer, max_model_len)


def _advise_shared(rows: Sequence[RowImages], tiler: DynamicTiler, max_model_len: int) -> Advice:
    distinct = list({(row.sizes, row.text_tokens): row for row in rows}.values())
    needs = {(row.sizes, row.text_tokens): needed_patches(row.sizes, tiler) for row in distinct}

    def shared(row: RowImages) -> int:
        return shared_patches(max_model_len, row.text_tokens, tiler)

    def need(row: RowImages) -> int:
        return needs[row.sizes, row.text_tokens]

    smallest = tiler.with_limit(tiler.least_limit)
    hopeless = {
        (row.sizes, row.text_tokens)
        for row in distinct
        if need(row) > shared(row) and needed_patches(row.sizes, smallest) > shared(row)
    }
    helped = [row for row in rows if (row.sizes, row.text_tokens) not in hopeless]
    pin = largest_limit({(row.sizes, shared(row)) for row in helped}, tiler) if helped else None
    max_images, max_text = _most(helped)
    return Advice(
        limit_name=tiler.limit_name,
        num_rows=len(rows),
        num_resized=sum(need(row) > shared(row) for row in rows),
        num_too_long=0,
        num_hopeless=len(rows) - len(helped),
        max_images=max_images,
        max_text_tokens=max_text,
        limit=pin,
        any_limit=limit_for_any(max_images, max_text, tiler, max_model_len) if helped else None,
        max_model_len=max(
            (-(-need(row) // tiler.merge_size**2) + RESERVED_TOKENS + row.text_tokens for row in rows),
            default=1,
        ),
        fitting_model_len=max((_length(row, tiler) for row in rows), default=1),
        resolution={} if pin is None else _resolution(helped, tiler, tiler.with_limit(pin)),
    )


def _advise_apart(rows: Sequence[RowImages], served: Sizer, trainer: Sizer, max_model_len: int) -> Advice:
    """The smaller of both limits, or the largest below it at which every row fits."""
    both = trainer.with_limit(max(min(served.limit, trainer.limit), trainer.least_limit))
    smallest = both.with_limit(both.least_limit)

    def fits(sizer: Sizer) -> Callable[[RowImages], bool]:
        return lambda row: _length(row, sizer) <= max_model_len

    resized = [
        row
        for row in rows
        if any(served.static_grid(size) != trainer.static_grid(size) for size in row.sizes)
    ]
    helped = [
        row
        for row in rows
        if fits(smallest)(row) and served.joint_grids(row.sizes, max_model_len) is not None
    ]
    limit = None
    if helped:
        limit = _largest(
            both.least_limit, both.limit, lambda limit: all(map(fits(both.with_limit(limit)), helped))
        )
    max_images, max_text = _most(helped)
    return Advice(
        limit_name=served.limit_name,
        num_rows=len(rows),
        num_resized=len(resized),
        num_too_long=sum(not fits(served)(row) for row in rows),
        num_hopeless=len(rows) - len(helped),
        max_images=max_images,
        max_text_tokens=max_text,
        limit=limit,
        any_limit=None,
        max_model_len=None,
        fitting_model_len=max((_length(row, served) for row in rows), default=1),
        resolution={} if limit is None else _resolution(helped, trainer, both.with_limit(limit)),
    )


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number from `low`, which holds, to `high` that holds; of many a bisection finds it."""
    if high - low < 64:
        return next(number for number in range(high, low - 1, -1) if number == low or holds(number))
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _most(rows: Sequence[RowImages]) -> tuple[int, int]:
    """Most images and most text of a row."""
    return (
        max((len(row.sizes) for row in rows), default=0),
        max((row.text_tokens for row in rows), default=0),
    )


def _length(row: RowImages, sizer: Sizer) -> int:
    """Tokens of a row at its static grids, its answer included."""
    images = sum(sizer.num_tokens(sizer.static_grid(size)) for size in row.sizes)
    return images + row.text_tokens + row.other_tokens


def _resolution(rows: Sequence[RowImages], sizer: Sizer, pinned: Sizer) -> dict[str, Resolution]:
    shares: dict[str, list[float]] = {}
    for row in rows:
        shares.setdefault(row.kind, []).extend(_kept(size, sizer, pinned) for size in row.sizes)
    return {
        kind: Resolution(num_images=len(found), mean=sum(found) / len(found), worst=min(found))
        for kind, found in sorted(shares.items())
    }


@functools.lru_cache(maxsize=65_536)
def _kept(size: Size, sizer: Sizer, pinned: Sizer) -> float:
    return math.sqrt(pinned.static_grid(size).num_patches / sizer.static_grid(size).num_patches)
