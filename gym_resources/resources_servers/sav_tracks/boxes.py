# SPDX-License-Identifier: Apache-2.0
"""J and F of predicted boxes against true masks, for all frames of a row at once.

A box is scored as the filled rectangle it describes. The boundary of a rectangle and its overlap with run-length masks
are known in closed form, so nothing is drawn per answer; what does not depend on the answer is computed once per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from resources_servers.sav_tracks.regions import boundary_map, boundary_radius, dilate, f_measure
from resources_servers.sav_tracks.rle import Mask


@dataclass(frozen=True, kw_only=True, eq=False)
class TrueRegions:
    """A row's true masks, numbered, as J and F need them; all have one size.

    The runs of mask k lie at `k * height * width` in one sequence over all masks.
    """

    height: int
    width: int
    ends: np.ndarray  # [runs] where each run ends
    is_inside: np.ndarray  # [runs] bool
    inside_before: np.ndarray  # [runs] foreground up to the end of each run
    areas: np.ndarray  # [masks]
    mask_of: np.ndarray  # [pixels] whose boundary each pixel belongs to
    pixels: np.ndarray  # [pixels, 2] (row, column) of all boundaries
    near: np.ndarray  # [masks, height, ceil(width / 8)] uint8: bit-packed disks around each boundary

    @classmethod
    def of(cls, masks: Sequence[Mask]) -> "TrueRegions":
        """Prepare masks of one size, none of them empty."""
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
            near[index, y0:y1] = np.packbits(dilate(found - (y0, 0), radius, (y1 - y0, width)), axis=1)
        num_runs = [len(mask.ends) for mask in masks]
        run = np.arange(sum(num_runs)) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
        ends = np.concatenate([mask.ends + index * height * width for index, mask in enumerate(masks)])
        is_inside = run % 2 == 1
        return cls(
            height=height,
            width=width,
            ends=ends,
            is_inside=is_inside,
            inside_before=np.cumsum(np.where(is_inside, np.diff(ends, prepend=0), 0)),
            areas=np.array([mask.area for mask in masks]),
            mask_of=np.repeat(np.arange(len(masks), dtype=np.int32), [len(found) for found in pixels]),
            pixels=np.concatenate(pixels).astype(np.int32),
            near=near,
        )

    def foreground_before(self, pixel: np.ndarray) -> np.ndarray:
        """Foreground pixels before each position in the sequence over all masks."""
        run = np.minimum(np.searchsorted(self.ends, pixel, side="right"), len(self.ends) - 1)
        return self.inside_before[run] - np.where(self.is_inside[run], self.ends[run] - pixel, 0)


def box_region_similarity(boxes: np.ndarray, of_mask: np.ndarray, truth: TrueRegions) -> np.ndarray:
    """J of `[n, 4]` filled pixel rectangles `(left, top, right, bottom)`, each against mask number `of_mask[n]`."""
    left, top, right, bottom = boxes.T
    box_areas = np.maximum(right - left, 0) * np.maximum(bottom - top, 0)
    num_columns = np.where(box_areas > 0, right - left, 0)
    box_of, step = _count_up(num_columns)
    column = of_mask[box_of] * truth.height * truth.width + (left[box_of] + step) * truth.height
    inside = truth.foreground_before(column + bottom[box_of]) - truth.foreground_before(column + top[box_of])
    overlaps = np.bincount(box_of, weights=inside, minlength=len(boxes))
    return overlaps / (box_areas + truth.areas[of_mask] - overlaps)


def box_boundary_accuracy(boxes: np.ndarray, of_mask: np.ndarray, truth: TrueRegions) -> np.ndarray:
    """F of `[n, 4]` filled pixel rectangles, each against mask number `of_mask[n]`.

    Equals `boundary_accuracy` of the drawn rectangles. Each mask is asked for at most once.
    """
    num_boxes = len(boxes)
    lines, exists = _outlines(boxes, truth.height, truth.width)
    box_of, rows, columns = _pixels_on(lines, exists)
    precise = (truth.near[of_mask[box_of], rows, columns >> 3] >> (7 - (columns & 7))) & 1
    num_precise = np.bincount(box_of, weights=precise, minlength=num_boxes)
    num_ours = np.bincount(box_of, minlength=num_boxes)

    box_for = np.full(len(truth.near), -1, dtype=np.int32)
    box_for[of_mask] = np.arange(num_boxes)
    box_at = box_for[truth.mask_of]
    asked = np.flatnonzero(box_at >= 0)
    box_at = box_at[asked]
    place = truth.pixels[asked].T  # row, column
    recalled = np.zeros(len(box_at), dtype=bool)
    radius = boundary_radius(truth.height, truth.width)
    for side in range(4):
        along = 0 if side >= 2 else 1  # a horizontal line has one row and runs along the columns
        fixed, first, last = lines[side, 1 - along], lines[side, along], lines[side, along + 2]
        away = place[1 - along] - fixed[box_at]
        # most boundary pixels are far from most lines: only the others need the exact distance
        close = np.flatnonzero((np.abs(away) <= radius) & exists[side, box_at])
        box, at = box_at[close], place[along, close]
        beyond = np.maximum(np.maximum(first[box] - at, at - last[box]), 0)
        recalled[close[away[close] ** 2 + beyond**2 <= radius**2]] = True
    num_recalled = np.bincount(box_at, weights=recalled, minlength=num_boxes)
    num_theirs = np.bincount(box_at, minlength=num_boxes)
    return f_measure(num_precise, num_ours, num_recalled, num_theirs)


def _count_up(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts (2, 0, 3): which (0, 0, 2, 2, 2) and how far (0, 1, 0, 1, 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


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
            # lines cross at the corners; a corner belongs to the horizontal line, where there is one
            r0 = r0 + exists[0]
            r1 = r1 - exists[1]
        length = np.where(exists[side], np.maximum((r1 - r0) + (c1 - c0) + 1, 0), 0)
        box_of, step = _count_up(length)
        across = side < 2
        found.append((box_of, r0[box_of] + (0 if across else step), c0[box_of] + (step if across else 0)))
    box_of, rows, columns = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return box_of, rows, columns
