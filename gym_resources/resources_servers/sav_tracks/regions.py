# SPDX-License-Identifier: Apache-2.0
"""Overlap measures: box IoU, region similarity J and boundary accuracy F.

J and F follow the DAVIS 2017 definitions as TrackEval computes them (`trackeval/datasets` and `metrics/j_and_f.py`):
a boundary pixel differs from its right, lower or lower-right neighbour, and two boundaries match within a disk of
0.8 % of the frame's diagonal. What is measured here on drawn masks, `boxes.py` computes for rectangles in closed form.
"""

import math

import numpy as np

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
    near_ours = dilate(ours, radius, predicted.shape)
    near_theirs = dilate(theirs, radius, truth.shape)
    num_precise, num_recalled = (
        near_theirs[ours[:, 0], ours[:, 1]].sum(),
        near_ours[theirs[:, 0], theirs[:, 1]].sum(),
    )
    return float(f_measure(num_precise, len(ours), num_recalled, len(theirs)))


def f_measure(
    num_precise: np.ndarray, num_ours: np.ndarray, num_recalled: np.ndarray, num_theirs: np.ndarray
) -> np.ndarray:
    """F from counts, arrays or numbers; an empty side is perfect in one respect and hopeless in the other."""
    with np.errstate(divide="ignore", invalid="ignore"):
        precision, recall = np.divide(num_precise, num_ours), np.divide(num_recalled, num_theirs)
        f = np.nan_to_num(2 * precision * recall / (precision + recall))
    one_is_empty = (np.equal(num_ours, 0)) | (np.equal(num_theirs, 0))
    return np.where(one_is_empty, np.equal(num_ours, num_theirs).astype(float), f)


def dilate(pixels: np.ndarray, radius: int, shape: tuple[int, int]) -> np.ndarray:
    """Boolean `[height, width]`, true within a disk of each pixel."""
    padded = np.zeros((shape[0] + 2 * radius, shape[1] + 2 * radius), dtype=bool)
    offset = np.arange(-radius, radius + 1)
    disk = np.argwhere(offset[:, None] ** 2 + offset[None] ** 2 <= radius**2)
    rows = pixels[:, 0, None] + disk[None, :, 0]
    columns = pixels[:, 1, None] + disk[None, :, 1]
    padded[rows, columns] = True
    return padded[radius : radius + shape[0], radius : radius + shape[1]]
