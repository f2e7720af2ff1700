# SPDX-License-Identifier: Apache-2.0
"""The compiled part of `align.resize`: two passes over a strip of columns that stays in the processor's cache.

torch computes `x0 w0 + x1 w1 + ...` in this order, in float32. After the first product some taps are rounded twice
(product, then sum) and the last ones once (fused); which, is in `Axis.num_rounded`. Both passes here keep that order
for every value and do it for many neighbours at a time.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

ROWS = 32
"""Rows of a frame that the horizontal pass takes together."""
STRIP = 128
"""Columns of the result that are finished together."""
TILE = 16
"""Columns that the horizontal pass writes back together: one cache line of float32."""


@intrinsic
def _fused(typing_context, x, weight, total):
    """x * weight + total with one rounding."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return signature, generate


@njit(nogil=True, inline="always")
def _weighted_sum(total, lines, first, size, num_rounded, weights):
    """total [n] = the lines [first, first + size) of `lines` [lines, n], weighted, in torch's order."""
    weight = weights[0]
    for n in range(total.size):
        total[n] = lines[first, n] * weight
    for tap in range(1, num_rounded):
        weight = weights[tap]
        for n in range(total.size):
            total[n] += lines[first + tap, n] * weight
    for tap in range(num_rounded, size):
        weight = weights[tap]
        for n in range(total.size):
            total[n] = _fused(lines[first + tap, n], weight, total[n])


@njit(nogil=True, inline="always")
def _turn(columns, frame, top, num_rows, left, right):
    """columns [x, 3 * ROWS] = the pixels of rows from `top` and columns from `left`, channel by channel."""
    for x in range(left, right):
        for y in range(num_rows):
            for channel in range(3):
                columns[x - left, channel * ROWS + y] = frame[top + y, x, channel]


@njit(nogil=True, inline="always")
def _turn_back(strip, tile, top, num_rows, left, num_columns):
    """strip [y, 3 * STRIP] = the finished columns of a tile [columns, 3 * ROWS]."""
    for y in range(num_rows):
        for channel in range(3):
            for x in range(num_columns):
                strip[top + y, channel * STRIP + left + x] = tile[x, channel * ROWS + y]


_FRAMES = types.Array(types.uint8, 4, "C", readonly=True)
_AXIS = (types.int64[::1], types.int64[::1], types.int64[::1], types.float32[:, ::1])


@njit(types.void(_FRAMES, *_AXIS, *_AXIS, types.float32[:, :, :, ::1]), nogil=True, cache=True)
def resize(
    frames,
    x_first,
    x_size,
    x_rounded,
    x_weights,
    y_first,
    y_size,
    y_rounded,
    y_weights,
    out,
):
    """uint8 `frames` [frames, height, width, 3] -> float32 `out` [frames, 3, new height, new width]."""
    height, width = frames.shape[1], frames.shape[2]
    new_height, new_width = y_first.size, x_first.size
    columns = np.empty((width, 3 * ROWS), np.float32)
    columns[:] = 0
    tile = np.empty((TILE, 3 * ROWS), np.float32)
    strip = np.zeros((height, 3 * STRIP), np.float32)
    line = np.empty(3 * STRIP, np.float32)
    for index in range(frames.shape[0]):
        frame = frames[index]
        for start in range(0, new_width, STRIP):
            stop = min(start + STRIP, new_width)
            left, right = x_first[start], x_first[stop - 1] + x_size[stop - 1]
            for top in range(0, height, ROWS):
                num_rows = min(ROWS, height - top)
                # A number that the compiler knows lets it unroll the loops of a whole block.
                if num_rows == ROWS:
                    _turn(columns, frame, top, ROWS, left, right)
                else:
                    _turn(columns, frame, top, num_rows, left, right)
                for begin in range(start, stop, TILE):
                    num_columns = min(TILE, stop - begin)
                    for x in range(num_columns):
                        at = begin + x
                        _weighted_sum(
                            tile[x], columns, x_first[at] - left, x_size[at], x_rounded[at], x_weights[at]
                        )
                    if num_columns == TILE:
                        _turn_back(strip, tile, top, num_rows, begin - start, TILE)
                    else:
                        _turn_back(strip, tile, top, num_rows, begin - start, num_columns)
            for y in range(new_height):
                _weighted_sum(line, strip, y_first[y], y_size[y], y_rounded[y], y_weights[y])
                for channel in range(3):
                    for x in range(stop - start):
                        out[index, channel, y, start + x] = line[channel * STRIP + x]
