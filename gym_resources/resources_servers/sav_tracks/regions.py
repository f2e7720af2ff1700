# SPDX-License-Identifier: Apache-2.0
"""Overlap measures: box IoU, region similarity J and boundary accuracy F.

J and F follow the DAVIS 2017 definitions as TrackEval computes them (`trackeval/datasets` and `metrics/j_and_f.py`):
a boundary pixel differs from its right, lower or lower-right neighbour, and two boundaries match within a disk of
0.8 % of the frame's diagonal. A predicted box is scored as the filled rectangle it describes; because the boundary
of a rectangle is known in closed form, no mask has to be drawn per answer and all frames are measured at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from resources_servers.sav_tracks.rle import Mask

GRID = 1000
_BOUNDARY_SHARE = 0.008


def box_iou(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """IoU of `[..., 4]` boxes `(x1, y1, x2, y2)`, broadcast; 0 where the union is empty."""
    low = np.maximum(predicted[..., :2], truth[..., :2])
    high = np.minimum(predicted[..., 2:], truth[..., 2:])
    overlap = np.clip(high - low, 0, None).prod(axis=-1)
    union = _area(predicted) + _area(truth) - overlap
    return np.divide(overlap, union, out=np.zeros_like(union, dtype=np.float64), where=union > 0)


def _area(box: np.ndarray) -> np.ndarray:
    return np.clip(box[..., 2:] - box[..., :2], 0, None).prod(axis=-1).astype(np.float64)


def grid_to_pixels(boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    """Pixels whose centres lie inside `[..., 4]` grid boxes: `(left, top, right, bottom)`, ends exclusive."""
    scale = np.array([width, height, width, height]) / GRID
    return np.ceil(np.asarray(boxes, dtype=np.float64) * scale - 0.5).astype(np.int64)


def boundary_radius(height: int, width: int) -> int:
    """Pixels within which two boundaries match."""
    return math.ceil(_BOUNDARY_SHARE * math.hypot(height, width))


def boundary_map(mask: np.ndarray) -> np.ndarray:
    """Boundary pixels of a boolean `[height, width]` mask, at most one pixel wide."""
    right, below, diagonal = mask.copy(), mask.copy(), mask.copy()
    right[:, :-1] = mask[:, 1:]
    below[:-1] = mask[1:]
    diagonal[:-1, :-1] = mask[1:, 1:]
    boundary = (mask ^ right) | (mask ^ below) | (mask ^ diagonal)
    boundary[-1] = mask[-1] ^ right[-1]
    boundary[:, -1] = mask[:, -1] ^ below[:, -1]
    boundary[-1, -1] = False
    return boundary


def region_similarity(predicted: np.ndarray, truth: np.ndarray) -> float:
    """J of two boolean masks; 1 when both are empty."""
    union = int((predicted | truth).sum())
    return int((predicted & truth).sum()) / union if union else 1.0


def boundary_accuracy(predicted: np.ndarray, truth: np.ndarray) -> float:
    """F of two boolean masks."""
    radius = boundary_radius(*truth.shape)
    ours, theirs = np.argwhere(boundary_map(predicted)), np.argwhere(boundary_map(truth))
    near_ours = _dilate(ours, radius, predicted.shape)
    near_theirs = _dilate(theirs, radius, truth.shape)
    num_precise, num_recalled = (
        near_theirs[ours[:, 0], ours[:, 1]].sum(),
        near_ours[theirs[:, 0], theirs[:, 1]].sum(),
    )
    return float(_f_measure(num_precise, len(ours), num_recalled, len(theirs)))


def _f_measure(
    num_precise: np.ndarray, num_ours: np.ndarray, num_recalled: np.ndarray, num_theirs: np.ndarray
) -> np.ndarray:
    """F from counts, arrays or numbers; an empty side is perfect in one respect and hopeless in the other."""
    with np.errstate(divide="ignore", invalid="ignore"):
        precision, recall = np.divide(num_precise, num_ours), np.divide(num_recalled, num_theirs)
        f = np.nan_to_num(2 * precision * recall / (precision + recall))
    one_is_empty = (np.equal(num_ours, 0)) | (np.equal(num_theirs, 0))
    return np.where(one_is_empty, np.equal(num_ours, num_theirs).astype(float), f)


def _dilate(pixels: np.ndarray, radius: int, shape: tuple[int, int]) -> np.ndarray:
    """Boolean `[height, width]`, true within a disk of each pixel."""
    padded = np.zeros((shape[0] + 2 * radius, shape[1] + 2 * radius), dtype=bool)
    offset = np.arange(-radius, radius + 1)
    disk = np.argwhere(offset[:, None] ** 2 + offset[None] ** 2 <= radius**2)
    rows = pixels[:, 0, None] + disk[None, :, 0]
    columns = pixels[:, 1, None] + disk[None, :, 1]
    padded[rows, columns] = True
    return padded[radius : radius + shape[0], radius : radius + shape[1]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundaries:
    """What F needs of a row's true masks, small enough to cache: their boundaries and, bit-packed, the disks around.

    Masks are numbered; all have one size. `mask_of` is sorted.
    """

    height: int
    width: int
    mask_of: np.ndarray  # [pixels] number of the mask
    pixels: np.ndarray  # [pixels, 2] (row, column)
    near: np.ndarray  # [masks, height, ceil(width / 8)] uint8

    @classmethod
    def of(cls, masks: Sequence[Mask]) -> "Boundaries":
        """Trace masks of one size, none of them empty."""
        height, width = masks[0].height, masks[0].width
        radius = boundary_radius(height, width)
        near = np.zeros((len(masks), height, -(-width // 8)), dtype=np.uint8)
        pixels = []
        for index, mask in enumerate(masks):
            left, top, right, bottom = mask.bounds()
            # one background line on each side, where there is one, holds all that the boundary depends on
            x0, y0 = max(left - 1, 0), max(top - 1, 0)
            x1, y1 = min(right + 1, width), min(bottom + 1, height)
            found = np.argwhere(boundary_map(mask.dense()[y0:y1, x0:x1]))
            found += (y0, x0)
            pixels.append(found)
            y0, y1 = max(top - 1 - radius, 0), min(bottom + radius, height)
            near[index, y0:y1] = np.packbits(_dilate(found - (y0, 0), radius, (y1 - y0, width)), axis=1)
        counts = [len(found) for found in pixels]
        return cls(
            height=height,
            width=width,
            mask_of=np.repeat(np.arange(len(masks), dtype=np.int32), counts),
            pixels=np.concatenate(pixels).astype(np.int32),
            near=near,
        )


def box_region_similarity(box: np.ndarray, mask: Mask) -> float:
    """J of one filled pixel rectangle `(left, top, right, bottom)` against a mask, without drawing either."""
    left, top, right, bottom = box.tolist()
    overlap = mask.area_in(left, top, right, bottom)
    union = max(right - left, 0) * max(bottom - top, 0) + mask.area - overlap
    return overlap / union if union else 1.0


def box_boundary_accuracy(boxes: np.ndarray, of_mask: np.ndarray, truth: Boundaries) -> np.ndarray:
    """F of `[n, 4]` filled pixel rectangles, each against the mask with number `of_mask[n]`.

    Equals `boundary_accuracy` of the drawn rectangles. Each mask is asked for at most once.
    """
    num_boxes = len(boxes)
    lines, exists = _outlines(boxes, truth.height, truth.width)
    # lines cross at the corners: a corner belongs to the horizontal line where there is one
    box_of, rows, columns = _pixels_on(lines, exists)
    precise = (truth.near[of_mask[box_of], rows, columns >> 3] >> (7 - (columns & 7))) & 1
    num_precise = np.bincount(box_of, weights=precise, minlength=num_boxes)
    num_ours = np.bincount(box_of, minlength=num_boxes)

    box_for = np.full(len(truth.near), -1)
    box_for[of_mask] = np.arange(num_boxes)
    box_at = box_for[truth.mask_of]
    asked = box_at >= 0
    box_at, row, column = box_at[asked], truth.pixels[asked, 0], truth.pixels[asked, 1]
    recalled = np.zeros(len(box_at), dtype=bool)
    reach = boundary_radius(truth.height, truth.width) ** 2
    for side in range(4):
        r0, c0, r1, c1 = lines[side][:, box_at]
        distance = (row - np.clip(row, r0, r1)) ** 2 + (column - np.clip(column, c0, c1)) ** 2
        recalled |= exists[side, box_at] & (distance <= reach)
    num_recalled = np.bincount(box_at, weights=recalled, minlength=num_boxes)
    num_theirs = np.bincount(box_at, minlength=num_boxes)
    return _f_measure(num_precise, num_ours, num_recalled, num_theirs)


def _outlines(boxes: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The lines that `boundary_map` marks for filled rectangles: above, lowest row, left of, rightmost column.

    Returns `[4, 4, n]`, side by (row, column, row, column) inclusive, and `[4, n]`, whether the side exists.
    """
    left, top, right, bottom = boxes.T
    first_row, first_column = np.maximum(top - 1, 0), np.maximum(left - 1, 0)
    lines = np.stack(
        [
            np.stack([top - 1, first_column, top - 1, right - 1]),
            np.stack([bottom - 1, first_column, bottom - 1, right - 1]),
            np.stack([first_row, left - 1, bottom - 1, left - 1]),
            np.stack([first_row, right - 1, bottom - 1, right - 1]),
        ]
    )
    exists = np.stack([top > 0, bottom < height, left > 0, right < width])
    return lines, exists & (right > left) & (bottom > top)


def _pixels_on(lines: np.ndarray, exists: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Box number, row and column of every outline pixel, each once."""
    found = []
    for side in range(4):
        r0, c0, r1, c1 = lines[side]
        if side >= 2:
            # the upper and lower ends are on the horizontal lines, where those exist
            r0 = r0 + exists[0]
            r1 = r1 - exists[1]
        length = np.where(exists[side], np.maximum((r1 - r0) + (c1 - c0) + 1, 0), 0)
        box_of = np.repeat(np.arange(len(length)), length)
        step = np.arange(len(box_of)) - np.repeat(np.cumsum(length) - length, length)
        across = side < 2
        found.append((box_of, r0[box_of] + (0 if across else step), c0[box_of] + (step if across else 0)))
    box_of, rows, columns = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return box_of, rows, columns
