# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from resources_servers.sav_tracks.boxes import TrueRegions, box_boundary_accuracy, box_region_similarity
from resources_servers.sav_tracks.regions import boundary_accuracy, region_similarity
from resources_servers.sav_tracks.rle import decode, encode


def test_closed_form_box_measures_equal_the_drawn_rectangles():
    rng = np.random.default_rng(3)
    for _ in range(60):
        height, width = rng.integers(2, 90, 2)
        masks, boxes, drawn = [], [], []
        for _ in range(rng.integers(1, 9)):
            mask = np.zeros((height, width), dtype=bool)
            for _ in range(rng.integers(1, 4)):
                top, left = rng.integers(0, height), rng.integers(0, width)
                mask[top : top + rng.integers(1, 40), left : left + rng.integers(1, 40)] = True
            left, right = np.sort(rng.integers(0, width + 1, 2)).tolist()
            top, bottom = np.sort(rng.integers(0, height + 1, 2)).tolist()
            masks.append(mask)
            boxes.append([left, top, right, bottom])
            drawn.append(np.zeros_like(mask))
            drawn[-1][top:bottom, left:right] = True
        truths = [decode(encode(mask), max_pixels=10_000) for mask in masks]
        asked = rng.permutation(len(masks))[: rng.integers(1, len(masks) + 1)]
        truth = TrueRegions.of(truths)
        ours = box_region_similarity(np.array(boxes)[asked], asked, truth)
        assert ours.tolist() == [region_similarity(drawn[i], masks[i]) for i in asked]
        ours = box_boundary_accuracy(np.array(boxes)[asked], asked, truth)
        assert ours.tolist() == pytest.approx(
            [boundary_accuracy(drawn[i], masks[i]) for i in asked], abs=1e-12
        )
