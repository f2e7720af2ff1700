# SPDX-License-Identifier: Apache-2.0
"""Grids that an engine and a trainer leave as they are: even sides between a least and a most number of patches."""

from __future__ import annotations

import functools
import math

import numpy as np

WIDEST = math.inf


@functools.lru_cache(maxsize=65_536)
def nearest_even(
    size: tuple[int, int],
    static: tuple[int, int],
    *,
    step: int,
    least: int,
    most: int,
    widest: float = WIDEST,
) -> tuple[int, int] | None:
    """(height, width) in multiples of `step` patches, `least` to `most` of them together, nearest to the static grid.

    Near is a small change of the sides' ratio first, and of the area second. `widest` bounds the longer side by so
    many times the shorter one. None where no grid is in between.
    """
    area = min(max(static[0] * static[1], least), most)
    heights = np.arange(step, most // step + 1, step)
    if not len(heights):
        return None
    ideal = np.stack([heights * size[1] / size[0], area / heights, least / heights])
    widths = np.concatenate([np.floor(ideal / step), np.ceil(ideal / step)]).astype(np.int64) * step
    if widest < WIDEST:
        widths = np.clip(
            widths, np.ceil(heights / widest / step) * step, np.floor(heights * widest / step) * step
        ).astype(np.int64)
    patches = widths * heights
    usable = (widths >= step) & (patches >= least) & (patches <= most)
    if not usable.any():
        return None
    stretch = np.abs(np.log(np.maximum(widths, 1) / heights * (size[0] / size[1])))
    shrink = np.abs(np.log(np.maximum(patches, 1) / area))
    cost = np.where(usable, 2 * stretch + shrink, np.inf)
    _, column = np.unravel_index(int(cost.argmin()), cost.shape)
    row = int(cost[:, column].argmin())
    return int(heights[column]), int(widths[row, column])
