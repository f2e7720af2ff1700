# SPDX-License-Identifier: Apache-2.0
"""What is compiled: `resize` for `align.resize`, `scan` for `align.runs`. Imported through `align.compiled` alone.

Resizing makes two passes over a strip of columns that stays in the processor's cache. torch computes
`x0 w0 + x1 w1 + ...` in this order, in float32. After the first product some taps are rounded twice (product, then sum)
and the last ones once (fused); which, is in `Axis.num_rounded`. Both passes keep that order for every value and do it
for many neighbours at a time.
"""

# mypy: disable-error-code="untyped-decorator,no-any-return"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

Array = np.ndarray[Any, np.dtype[Any]]

ROWS = 32
"""Rows of a frame that the horizontal pass takes together."""
STRIP = 128
"""Columns of the result that are finished together."""
TILE = 16
"""Columns that the horizontal pass writes back together: one cache line of float32."""
BLOCK = 64
"""Token ids that are skipped together when nothing begins or ends among them."""
ROOM = 1024
"""Runs that are made room for at first."""
LANES = 16
"""Those of a block in which something does: as many as fit one vector."""


@intrinsic
def _fused(typing_context: Any, x: Any, weight: Any, total: Any) -> tuple[Any, Callable[..., Any]]:
    """x * weight + total with one rounding."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return signature, generate


@njit(nogil=True, inline="always")
def _weighted_sum(
    total: Array, lines: Array, first: int, size: int, num_rounded: int, weights: Array
) -> None:
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
def _turn(columns: Array, frame: Array, top: int, num_rows: int, left: int, right: int) -> None:
    """columns [x, 3 * ROWS] = the pixels of rows from `top` and columns from `left`, channel by channel."""
    for x in range(left, right):
        for y in range(num_rows):
            for channel in range(3):
                columns[x - left, channel * ROWS + y] = frame[top + y, x, channel]


@njit(nogil=True, inline="always")
def _turn_back(strip: Array, tile: Array, top: int, num_rows: int, left: int, num_columns: int) -> None:
    """strip [y, 3 * STRIP] = the finished columns of a tile [columns, 3 * ROWS]."""
    for y in range(num_rows):
        for channel in range(3):
            for x in range(num_columns):
                strip[top + y, channel * STRIP + left + x] = tile[x, channel * ROWS + y]


_FRAMES = types.Array(types.uint8, 4, "C", readonly=True)
_AXIS = (types.int64[::1], types.int64[::1], types.int64[::1], types.float32[:, ::1])


@njit(types.void(_FRAMES, *_AXIS, *_AXIS, types.float32[:, :, :, ::1]), nogil=True, cache=True)
def resize(
    frames: Array,
    x_first: Array,
    x_size: Array,
    x_rounded: Array,
    x_weights: Array,
    y_first: Array,
    y_size: Array,
    y_rounded: Array,
    y_weights: Array,
    out: Array,
) -> None:
    """uint8 `frames` [frames, height, width, 3] -> float32 `out` [frames, 3, new height, new width]."""
    height, width = frames.shape[1], frames.shape[2]
    new_height, new_width = y_first.size, x_first.size
    columns = np.zeros((width, 3 * ROWS), np.float32)
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


@njit(nogil=True, inline="always")
def _goes_on(ids: Array, start: int, length: int, inside: bool, context_id: int, end_id: int) -> bool:
    """Whether tokens [start, start + length) are context tokens alone, if inside a run, else neither they nor ends."""
    # Comparisons alone and an index that cannot be negative: what the compiler makes vector instructions of.
    others, at = np.int32(0), np.uint64(start)
    if inside:
        for lane in range(length):
            others |= np.int32(ids[at + np.uint64(lane)] != context_id)
    else:
        for lane in range(length):
            token = ids[at + np.uint64(lane)]
            others |= np.int32(token == context_id) | np.int32(token == end_id)
    return others == 0


@njit(nogil=True)
def _fill(
    ids: Array,
    start_id: int,
    context_id: int,
    end_id: int,
    kinds: Array,
    empty: int,
    offsets: Array,
    lengths: Array,
    codes: Array,
) -> int:
    """Write the runs in `ids` [tokens] down in order; returns their number, -1 when there is not room for them."""
    count, first, at = 0, -1, 0
    while at < ids.size:
        if at + BLOCK <= ids.size and _goes_on(ids, at, BLOCK, first >= 0, context_id, end_id):
            at += BLOCK
            continue
        # No token ends more than one run, and the last one may be open.
        if count + BLOCK >= offsets.size:
            return -1
        stop = min(at + BLOCK, ids.size)
        while at < stop:
            if at + LANES <= stop and _goes_on(ids, at, LANES, first >= 0, context_id, end_id):
                at += LANES
                continue
            for index in range(at, min(at + LANES, stop)):
                token = ids[index]
                if token == context_id:
                    if first < 0:
                        first = index
                elif first >= 0:
                    opened = first > 0 and ids[first - 1] == start_id
                    offsets[count], lengths[count] = first, index - first
                    codes[count] = kinds[opened + 2 * (token == end_id)]
                    count, first = count + 1, -1
                elif token == end_id and index > 0 and ids[index - 1] == start_id:
                    offsets[count], lengths[count], codes[count] = index, 0, empty
                    count += 1
            at += LANES
        at = stop
    if first >= 0:
        opened = first > 0 and ids[first - 1] == start_id
        offsets[count], lengths[count], codes[count] = first, ids.size - first, kinds[opened + 0]
        count += 1
    return count


def _scan(
    ids: Array, start_id: int, context_id: int, end_id: int, kinds: Array, empty: int
) -> tuple[Array, Array, Array]:
    """Runs in `ids` [tokens]: offsets, lengths int64 [runs] and kinds int8 [runs], in order.

    `kinds` [4] holds a code by "a start token before" + 2 * "an end token behind"; `empty` is that of `<img></img>`.
    """
    room = ROOM
    while True:
        offsets, lengths, codes = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int8)
        count = _fill(ids, start_id, context_id, end_id, kinds, empty, offsets, lengths, codes)
        if count >= 0:
            return offsets[:count].copy(), lengths[:count].copy(), codes[:count].copy()
        # Every token could be a run: rare enough to begin again.
        room = ids.size + BLOCK + 1


def _scanned(item: Any) -> Any:
    ids = types.Array(item, 1, "C", readonly=True)
    return types.Tuple((types.int64[::1], types.int64[::1], types.int8[::1]))(
        ids, item, item, item, types.Array(types.int8, 1, "C", readonly=True), types.int8
    )


scan = njit([_scanned(types.int32), _scanned(types.int64)], nogil=True, cache=True)(_scan)
