# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from resources_servers.sav_tracks.regions import (
    boundary_accuracy,
    boundary_map,
    boundary_radius,
    box_iou,
    grid_to_pixels,
    region_similarity,
)


def test_box_iou_of_known_boxes():
    boxes = np.array([[0, 0, 10, 10], [5, 0, 15, 10], [20, 20, 30, 30]])
    assert box_iou(boxes, boxes[0]).tolist() == pytest.approx([1.0, 1 / 3, 0.0])
    assert box_iou(np.zeros((1, 4)), np.zeros((1, 4))).tolist() == [0.0]


def test_grid_covers_the_whole_frame():
    assert grid_to_pixels(np.array([0, 0, 1000, 1000]), 48, 64).tolist() == [0, 0, 64, 48]
    assert grid_to_pixels(np.array([250, 500, 500, 1000]), 48, 64).tolist() == [16, 24, 32, 48]


def test_the_boundary_of_a_square_is_one_pixel_wide():
    mask = np.zeros((8, 8), dtype=bool)
    mask[2:5, 2:5] = True
    assert np.argwhere(boundary_map(mask)).tolist() == [
        [1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 4], [3, 1], [3, 4], [4, 1], [4, 2], [4, 3], [4, 4],
    ]  # fmt: skip
    full = np.ones((4, 4), dtype=bool)
    assert not boundary_map(full).any()


def test_equal_masks_score_one_and_empty_sides_follow_the_benchmark():
    mask = np.zeros((60, 80), dtype=bool)
    mask[10:30, 20:50] = True
    empty = np.zeros_like(mask)
    assert (region_similarity(mask, mask), boundary_accuracy(mask, mask)) == (1.0, 1.0)
    assert (region_similarity(empty, empty), boundary_accuracy(empty, empty)) == (1.0, 1.0)
    assert (region_similarity(mask, empty), boundary_accuracy(mask, empty)) == (0.0, 0.0)
    far = np.roll(mask, (25, 30), axis=(0, 1))
    assert boundary_accuracy(mask, far) < 0.2


def test_a_shift_within_the_radius_costs_no_boundary_accuracy():
    mask = np.zeros((480, 640), dtype=bool)
    mask[100:300, 100:300] = True
    radius = boundary_radius(480, 640)
    assert radius == 7
    assert boundary_accuracy(mask, np.roll(mask, radius, axis=1)) == 1.0
    assert boundary_accuracy(mask, np.roll(mask, 4 * radius, axis=1)) < 1.0
