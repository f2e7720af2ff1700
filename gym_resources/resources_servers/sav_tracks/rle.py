# SPDX-License-Identifier: Apache-2.0
"""COCO run-length masks: decoding, encoding, and the questions that need no dense mask.

A COCO mask is a list of run lengths in column-major order that starts with background; the compressed form
packs each length, as a difference to the length two before it, into printable characters of five bits.
Format: `rleFrString`/`rleToString` in `common/maskApi.c` of the COCO API.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

_MAX_GROUPS = 7  # seven five-bit groups hold every length below 2**34; more is not a mask


class MaskError(ValueError):
    """A run-length mask that cannot be decoded; the message says what is wrong with it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """One object's region in one frame; `ends[i]` is the pixel (column-major) at which run `i` ends."""

    height: int
    width: int
    ends: np.ndarray

    @cached_property
    def area(self) -> int:
        """Foreground pixels."""
        return int(np.diff(self.ends, prepend=0)[1::2].sum())

    def contains(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Whether each pixel lies inside the region."""
        run = np.searchsorted(self.ends, np.asarray(column) * self.height + np.asarray(row), side="right")
        return run % 2 == 1

    def bounds(self) -> tuple[int, int, int, int] | None:
        """Tight `(left, top, right, bottom)` in pixels, right and bottom exclusive; None for an empty mask."""
        if self.area == 0:
            return None
        starts, stops = self.ends[:-1:2], self.ends[1::2]
        filled = stops > starts
        starts, lasts = starts[filled], stops[filled] - 1
        first_column, last_column = starts // self.height, lasts // self.height
        if np.any(first_column != last_column):  # a run over a column break touches both edges of the frame
            top, bottom = 0, self.height
        else:
            top, bottom = int((starts % self.height).min()), int((lasts % self.height).max()) + 1
        return int(first_column.min()), top, int(last_column.max()) + 1, bottom

    def dense(self) -> np.ndarray:
        """Boolean `[height, width]`."""
        counts = np.diff(self.ends, prepend=0)
        flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
        return flat.reshape(self.width, self.height).T


def decode(rle: Any, *, max_pixels: int) -> Mask:
    """Decode one COCO RLE, `{"size": [height, width], "counts": str | bytes | list of int}`.

    Raises `MaskError` for anything else, for runs that do not fill the frame exactly, and for frames above
    `max_pixels`.
    """
    if not isinstance(rle, dict):
        raise MaskError(f"expected an object with 'size' and 'counts', got {type(rle).__name__}")
    size, counts = rle.get("size"), rle.get("counts")
    if (
        not isinstance(size, (list, tuple))
        or len(size) != 2
        or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in size)
    ):
        raise MaskError("'size' must be [height, width] in pixels, two positive integers")
    height, width = size
    if height * width > max_pixels:
        raise MaskError(f"a mask may have {max_pixels} pixels; convert the rows with a smaller --mask-side")
    if isinstance(counts, (str, bytes)):
        lengths = _decompress(counts)
    elif isinstance(counts, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in counts):
        try:
            lengths = np.asarray(counts, dtype=np.int64)
        except OverflowError:
            raise MaskError("'counts' holds a number that is no run length") from None
    else:
        raise MaskError(f"'counts' must be a string or a list of integers, got {type(counts).__name__}")
    if len(lengths) == 0 or lengths.min() < 0 or lengths.max() > height * width:
        raise MaskError("'counts' is empty or holds a run longer than the frame")
    if int(lengths.sum()) != height * width:
        raise MaskError(f"the runs cover {int(lengths.sum())} pixels, the frame has {height * width}")
    return Mask(height=height, width=width, ends=np.cumsum(lengths))


def encode(mask: np.ndarray) -> dict[str, Any]:
    """Compress a boolean `[height, width]` mask to COCO RLE with a string as `counts`."""
    height, width = mask.shape
    flat = np.asarray(mask, dtype=bool).T.reshape(-1)
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    ends = np.concatenate([[0] if flat[0] else [], changes, [flat.size]]).astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    deltas = lengths.copy()
    deltas[3:] -= lengths[1:-2]
    characters = []
    for delta in deltas.tolist():
        more = True
        while more:
            group, delta = delta & 0x1F, delta >> 5
            more = delta != -1 if group & 0x10 else delta != 0
            characters.append(chr((group | 0x20 if more else group) + 48))
    return {"size": [height, width], "counts": "".join(characters)}


def _decompress(counts: str | bytes) -> np.ndarray:
    try:
        raw = counts.encode("ascii") if isinstance(counts, str) else counts
    except UnicodeEncodeError:
        raise MaskError("'counts' holds a character that COCO RLE does not use") from None
    codes = np.frombuffer(raw, dtype=np.uint8).astype(np.int64) - 48
    if len(codes) == 0 or codes.min() < 0 or codes.max() > 63:
        raise MaskError("'counts' is empty or holds a character that COCO RLE does not use")
    last = (codes & 0x20) == 0
    if not last[-1]:
        raise MaskError("'counts' is cut in the middle of a number")
    stops = np.flatnonzero(last)
    starts = np.concatenate([[0], stops[:-1] + 1])
    groups = stops - starts + 1
    if groups.max() > _MAX_GROUPS:
        raise MaskError("'counts' holds a number that is too long to be a run length")
    position = np.arange(len(codes)) - np.repeat(starts, groups)
    values = np.add.reduceat((codes & 0x1F) << (5 * position), starts)
    negative = (codes[stops] & 0x10) != 0
    values = np.where(negative, values - (np.int64(1) << (5 * groups)), values)
    # lengths are stored as differences to the one two places before, from the fourth on
    values[1::2] = np.cumsum(values[1::2])
    values[2::2] = np.cumsum(values[2::2])
    return values
