# SPDX-License-Identifier: Apache-2.0
"""Overlap measures: box IoU, region similarity J and boundary accuracy F.

J and F follow the DAVIS 2017 definitions as TrackEval computes them (`trackeval/datasets` and `metrics/j_and_f.py`):
a boundary pixel differs from its right, lower or lower-right neighbour, and two boundaries match within a disk of
0.8 % of the frame's diagonal. A predicted box is scored as the filled rectangle it describes; because the boundary
of a rectangle is known in closed form, no dense mask has to be drawn per answer.
"""

import math
from dataclasses import dataclass

import numpy as np

from resources_servers.sav_tracks.rle import Mask

GRID = 1000
_BOUNDARY_SHARE = 0.008

PixelBox = tuple[int, int, int, int]


def box_iou(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """IoU of `[..., 4]` boxes `(x1, y1, x2, y2)`, broadcast; 0 where the union is empty."""
    low = np.maximum(predicted[..., :2], truth[..., :2])
    high = np.minimum(predicted[..., 2:], truth[..., 2:])
    overlap = np.clip(high - low, 0, None).prod(axis=-1)
    union = _area(predicted) + _area(truth) - overlap
    return np.divide(overlap, union, out=np.zeros_like(union, dtype=np.float64), where=union > 0)


def _area(box: np.ndarray) -> np.ndarray:
    return np.clip(box[..., 2:] - box[..., :2], 0, None).prod(axis=-1).astype(np.float64)


def grid_box_to_pixels(box: np.ndarray, height: int, width: int) -> PixelBox:
    """The pixels whose centres lie inside a box on the 0-1000 grid: `(left, top, right, bottom)`, exclusive ends."""
    scale = np.array([width, height, width, height]) / GRID
    left, top, right, bottom = np.ceil(np.asarray(box, dtype=np.float64) * scale - 0.5).astype(int).tolist()
    return left, top, right, bottom


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
    return _f_measure(
        near_theirs[ours[:, 0], ours[:, 1]].sum(), len(ours), near_ours[theirs[:, 0], theirs[:, 1]].sum(), len(theirs)
    )


def _f_measure(num_precise: float, num_ours: int, num_recalled: float, num_theirs: int) -> float:
    if num_ours == 0 or num_theirs == 0:
        # as in TrackEval: an empty side is perfect in one respect and hopeless in the other
        return 1.0 if num_ours == num_theirs else 0.0
    precision, recall = num_precise / num_ours, num_recalled / num_theirs
    total = precision + recall
    return float(2 * precision * recall / total) if total else 0.0


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
class MaskBoundary:
    """What F needs of one true mask, kept small enough to cache: its boundary and, bit-packed, the disk around it."""

    height: int
    width: int
    pixels: np.ndarray  # [n, 2] (row, column)
    near: np.ndarray  # [height, ceil(width / 8)] uint8

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.pixels.nbytes + self.near.nbytes

    @classmethod
    def of(cls, mask: Mask) -> "MaskBoundary":
        """Trace a mask once."""
        pixels = np.argwhere(boundary_map(mask.dense())).astype(np.int32)
        radius = boundary_radius(mask.height, mask.width)
        near = np.packbits(_dilate(pixels, radius, (mask.height, mask.width)), axis=1)
        return cls(height=mask.height, width=mask.width, pixels=pixels, near=near)


def box_region_similarity(box: PixelBox, mask: Mask) -> float:
    """J of a filled pixel rectangle against a mask, without drawing either."""
    left, top, right, bottom = box
    box_area = max(right - left, 0) * max(bottom - top, 0)
    overlap = mask.area_in(*box)
    union = box_area + mask.area - overlap
    return overlap / union if union else 1.0


def box_boundary_accuracy(box: PixelBox, truth: MaskBoundary) -> float:
    """F of a filled pixel rectangle against a mask; equals `boundary_accuracy` of the drawn rectangle."""
    lines = _outline(box, truth.height, truth.width)
    num_theirs = len(truth.pixels)
    if not lines or not num_theirs:
        return 1.0 if not lines and not num_theirs else 0.0
    # lines that cross share pixels: count each pixel once
    flat = np.unique(
        np.concatenate(
            [
                (np.arange(r0, r1 + 1)[:, None] * truth.width + np.arange(c0, c1 + 1)).reshape(-1)
                for r0, c0, r1, c1 in lines
            ]
        )
    )
    rows, columns = flat // truth.width, flat % truth.width
    precise = (truth.near[rows, columns >> 3] >> (7 - (columns & 7))) & 1
    row, column = truth.pixels[:, 0], truth.pixels[:, 1]
    closest = None
    for r0, c0, r1, c1 in lines:
        distance = (row - np.clip(row, r0, r1)) ** 2 + (column - np.clip(column, c0, c1)) ** 2
        closest = distance if closest is None else np.minimum(closest, distance)
    recalled = closest <= boundary_radius(truth.height, truth.width) ** 2
    return _f_measure(int(precise.sum()), len(flat), int(recalled.sum()), num_theirs)


def _outline(box: PixelBox, height: int, width: int) -> list[tuple[int, int, int, int]]:
    """The lines `(row, column, row, column)`, inclusive, that `boundary_map` marks for a filled rectangle."""
    left, top, right, bottom = box
    if right <= left or bottom <= top:
        return []
    first_row, first_column = max(top - 1, 0), max(left - 1, 0)
    lines = []
    if top > 0:
        lines.append((top - 1, first_column, top - 1, right - 1))
    if bottom < height:
        lines.append((bottom - 1, first_column, bottom - 1, right - 1))
    if left > 0:
        lines.append((first_row, left - 1, bottom - 1, left - 1))
    if right < width:
        lines.append((first_row, right - 1, bottom - 1, right - 1))
    return lines
