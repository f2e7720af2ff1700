# SPDX-License-Identifier: Apache-2.0
"""Qwen's `smart_resize`, and its inverse: which grids a number of tokens leaves open.

The arithmetic is transformers' (models/qwen2_vl/image_processing_qwen2_vl.py for images and for the frames of
Qwen2.5-VL clips, models/qwen3_vl/video_processing_qwen3_vl.py for whole clips), which vLLM calls. A picture is rounded
to whole units, shrunk by floor under a maximum of pixels, or grown by ceil over a minimum. Each of the three depends on
its limit monotonically, in both sides, so a number of tokens is reached by at most one grid of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from nemo_rl_ext.align.even_grids import nearest_even
from nemo_rl_ext.align.grids import Grid, Size
from nemo_rl_ext.align.limits import Limits

WIDEST = 200
"""The longest side of a picture that the processor takes, as a multiple of the shortest."""
Units = tuple[int, int]
"""(height, width) in merged patches: one token each."""


@dataclass(frozen=True)
class SmartResizer:
    """How one processor sizes pictures. `patch_size` is in pixels, `merge_size` in patches, both limits in pixels.

    `over_all_frames`: the limits hold for a whole clip, frame count times area, instead of for one frame.
    """

    limit_name: ClassVar[str] = "max_pixels"
    shares_context: ClassVar[bool] = False
    reserved_tokens: ClassVar[int] = 0

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    over_all_frames: bool = False
    temporal_patch_size: int = 2

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "min_pixels", "max_pixels", "temporal_patch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def factor(self) -> int:
        """Pixels of one side of a token."""
        return self.patch_size * self.merge_size

    @property
    def limit(self) -> int:
        return self.max_pixels

    @property
    def least_limit(self) -> int:
        return self.min_pixels

    def with_limit(self, limit: int) -> SmartResizer:
        return replace(self, max_pixels=limit)

    def with_arguments(self, arguments: Mapping[str, Any]) -> SmartResizer:
        """Under a request's `size`, `min_pixels` and `max_pixels`, the last two first, as vLLM reads them."""
        edges = arguments.get("size") or {}
        low, high = (
            next((value for value in (arguments.get(name), edges.get(edge)) if value is not None), own)
            for name, edge, own in (
                ("min_pixels", "shortest_edge", self.min_pixels),
                ("max_pixels", "longest_edge", self.max_pixels),
            )
        )
        return replace(self, min_pixels=int(low), max_pixels=int(high))

    def of_row(self, max_num_tiles: int | None) -> SmartResizer:
        return self

    def meet(self, other: SmartResizer) -> SmartResizer:
        least = max(self.min_pixels, other.min_pixels)
        return replace(self, min_pixels=least, max_pixels=max(least, min(self.max_pixels, other.max_pixels)))

    def num_tokens(self, grid: Grid) -> int:
        return grid.num_tokens(self.merge_size)

    def joint_grids(self, sizes: Sequence[Size], num_tokens: int) -> tuple[Grid, ...] | None:
        """Each image's own grid: they share nothing. None where the processor refuses the shape of one."""
        if any(self._picture(size, 1).is_refused for size in sizes):
            return None
        return tuple(self.static_grid(size) for size in sizes)

    def fixed_grid(self, size: Size, num_patches: int) -> Grid | None:
        """Whole tokens between both limits are neither rounded, shrunk nor grown."""
        area = self.patch_size**2
        sides = nearest_even(
            size,
            self.static_grid(size),
            step=self.merge_size,
            least=-(-self.min_pixels // area),
            most=min(num_patches, self.max_pixels // area),
            widest=WIDEST,
        )
        return sides and Grid(*sides)

    def static_grid(self, size: Size, num_frames: int = 1) -> Grid:
        """The grid under the configured limits; of a size that the processor refuses, what it would be."""
        return self.grid(size, num_frames, self.min_pixels, self.max_pixels)

    def grid(self, size: Size, num_frames: int, min_pixels: int, max_pixels: int) -> Grid:
        """The grid of one picture, or of each frame of a clip of `num_frames`, under these limits."""
        picture = self._picture(size, num_frames)
        if picture.volume > max_pixels:
            return self._grid(picture.shrunk(max_pixels))
        if picture.volume < min_pixels:
            return self._grid(picture.grown(min_pixels))
        return self._grid(picture.own)

    def feasible_grids(self, size: Size, num_tokens: int, num_frames: int = 1) -> tuple[Grid, ...]:
        """Every grid with `num_tokens` tokens per frame that some limits lead to, sorted."""
        picture = self._picture(size, num_frames)
        if num_tokens < 1 or picture.is_refused:
            return ()
        found = {picture.own} if math.prod(picture.own) == num_tokens else set()
        # An odd number of frames is rounded for the comparison alone: a shrunk clip can have more tokens.
        if picture.volume > 1:
            found |= _reached(picture.shrunk, num_tokens, 1, picture.volume - 1)
        top = picture.volume + 1
        while math.prod(picture.grown(top)) < num_tokens:
            top *= 2
        found |= _reached(picture.grown, num_tokens, picture.volume + 1, top)
        return tuple(sorted(self._grid(units) for units in found))

    def limits(self, size: Size, num_tokens: int, num_frames: int = 1) -> tuple[Limits, ...]:
        """Every range of limits, in pixels, under which a picture has `num_tokens` tokens per frame."""
        picture = self._picture(size, num_frames)
        if num_tokens < 1 or picture.is_refused:
            return ()
        ranges: list[Limits] = []
        if math.prod(picture.own) == num_tokens:
            ranges.append(Limits(min_high=picture.volume, max_low=picture.volume))
        low, high = _range(picture.shrunk, num_tokens, 1, picture.volume - 1)
        if low <= high:
            ranges.append(Limits(max_low=low, max_high=high))
        top = picture.volume + 1
        while math.prod(picture.grown(top)) <= num_tokens:
            top *= 2
        low, high = _range(picture.grown, num_tokens, picture.volume + 1, top)
        if low <= high:
            ranges.append(Limits(min_low=low, min_high=high, max_low=picture.volume))
        return tuple(ranges)

    def _grid(self, units: Units) -> Grid:
        return Grid(units[0] * self.merge_size, units[1] * self.merge_size)

    def _picture(self, size: Size, num_frames: int) -> _Picture:
        frames = num_frames if self.over_all_frames else 1
        height, width = size
        if height < 1 or width < 1:
            raise ValueError(f"a picture needs at least one pixel per side, got (height, width) = {size}")
        if self.over_all_frames and min(height, width) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        step = self.temporal_patch_size
        return _Picture(
            height, width, frames, self.factor, round(frames / step) * step if self.over_all_frames else 1
        )


@dataclass(frozen=True)
class _Picture:
    """One picture or clip before any limit; `rounded_frames` is what the comparison with the limits counts."""

    height: int
    width: int
    frames: int
    factor: int
    rounded_frames: int

    @property
    def own(self) -> Units:
        # A side that rounds to nothing is only ever grown.
        return round(self.height / self.factor), round(self.width / self.factor)

    @property
    def volume(self) -> int:
        return self.rounded_frames * math.prod(self.own) * self.factor**2

    @property
    def is_refused(self) -> bool:
        return max(self.height, self.width) / min(self.height, self.width) > WIDEST

    def shrunk(self, max_pixels: int) -> Units:
        factor = self.factor
        beta = math.sqrt((self.frames * self.height * self.width) / max_pixels)
        return (
            max(factor, math.floor(self.height / beta / factor) * factor) // factor,
            max(factor, math.floor(self.width / beta / factor) * factor) // factor,
        )

    def grown(self, min_pixels: int) -> Units:
        beta = math.sqrt(min_pixels / (self.frames * self.height * self.width))
        return math.ceil(self.height * beta / self.factor), math.ceil(self.width * beta / self.factor)


def _range(units: Callable[[int], Units], num_tokens: int, low: int, high: int) -> tuple[int, int]:
    """The first and last limit from `low` to `high` that lead to `num_tokens`; an empty range where none does."""
    first, last = low, high + 1
    while first < last:
        middle = (first + last) // 2
        if math.prod(units(middle)) < num_tokens:
            first = middle + 1
        else:
            last = middle
    begin, last = first, high + 1
    while first < last:
        middle = (first + last) // 2
        if math.prod(units(middle)) <= num_tokens:
            first = middle + 1
        else:
            last = middle
    return begin, first - 1


def _reached(units: Callable[[int], Units], num_tokens: int, low: int, high: int) -> set[Units]:
    """The one pair of sides with `num_tokens` that limits from `low` to `high` lead to, by bisection."""
    while low < high:
        middle = (low + high) // 2
        if math.prod(units(middle)) < num_tokens:
            low = middle + 1
        else:
            high = middle
    return {units(low)} if math.prod(units(low)) == num_tokens else set()
