# SPDX-License-Identifier: Apache-2.0
"""IoU, J and boundary F against pycocotools, scikit-image and (where installed) TrackEval, on random tracks."""

import json
import math

import numpy as np
import pytest
from resources_servers.sav_tracks.boxes import TrueRegions, box_boundary_accuracy, box_region_similarity
from resources_servers.sav_tracks.regions import (
    boundary_accuracy,
    box_iou,
    grid_to_pixels,
    region_similarity,
)
from resources_servers.sav_tracks.rle import decode, encode
from resources_servers.sav_tracks.scoring import score_answer

coco = pytest.importorskip("pycocotools.mask", reason="pip install pycocotools")

TOLERANCE = 1e-6


def random_boxes(rng, count, limit=1000):
    low = rng.integers(0, limit, (count, 2))
    high = low + rng.integers(1, limit, (count, 2))
    return np.concatenate([low, np.minimum(high, limit)], axis=1)


def blob(rng, height, width):
    """A few overlapping discs and rectangles, sometimes touching the frame's edge, sometimes empty."""
    mask = np.zeros((height, width), dtype=bool)
    rows, columns = np.indices(mask.shape)
    for _ in range(rng.integers(0, 4)):
        row, column = rng.integers(0, height), rng.integers(0, width)
        if rng.random() < 0.5:
            mask |= (rows - row) ** 2 + (columns - column) ** 2 <= rng.integers(1, height + 1) ** 2 / 4
        else:
            mask[row : row + rng.integers(1, height + 1), column : column + rng.integers(1, width + 1)] = True
    return mask


def davis_f(predicted, truth):
    """Boundary F by morphology, written from the DAVIS definition: dilate each contour with a disk and intersect."""
    morphology = pytest.importorskip("skimage.morphology", reason="pip install scikit-image")

    def contour(mask):
        padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
        here, right, below, both = padded[:-1, :-1], padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
        found = (here != right) | (here != below) | (here != both)
        found[-1, -1] = False
        return found

    disk = morphology.disk(math.ceil(0.008 * np.linalg.norm(truth.shape)))
    ours, theirs = contour(predicted), contour(truth)
    if not ours.any() and not theirs.any():
        return 1.0
    if not ours.any() or not theirs.any():
        return 0.0
    precision = (ours & morphology.dilation(theirs, disk)).sum() / ours.sum()
    recall = (theirs & morphology.dilation(ours, disk)).sum() / theirs.sum()
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def test_box_iou_equals_pycocotools():
    rng = np.random.default_rng(0)
    ours, theirs = random_boxes(rng, 300), random_boxes(rng, 200)

    def as_coco(boxes):
        return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1).astype(float)

    expected = coco.iou(as_coco(ours), as_coco(theirs), [0] * len(theirs))
    assert np.abs(box_iou(ours[:, None], theirs[None]) - expected).max() < TOLERANCE


def test_run_length_masks_equal_pycocotools():
    rng = np.random.default_rng(1)
    for _ in range(300):
        mask = blob(rng, *rng.integers(1, 80, 2).tolist())
        reference = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
        assert encode(mask)["counts"].encode() == reference["counts"]
        ours = decode({"size": list(mask.shape), "counts": reference["counts"].decode()}, max_pixels=10_000)
        assert np.array_equal(ours.dense(), coco.decode(reference).astype(bool))
        assert ours.area == coco.area(reference)
        if ours.bounds():
            left, top, right, bottom = ours.bounds()
            assert coco.toBbox(reference).tolist() == [left, top, right - left, bottom - top]


def test_region_similarity_equals_pycocotools():
    rng = np.random.default_rng(2)
    for _ in range(300):
        height, width = rng.integers(8, 120, 2).tolist()
        mask = blob(rng, height, width)
        box = grid_to_pixels(random_boxes(rng, 1)[0], height, width)
        drawn = np.zeros_like(mask)
        drawn[box[1] : box[3], box[0] : box[2]] = True
        if not mask.any() and not drawn.any():
            continue
        references = [coco.encode(np.asfortranarray(side.astype(np.uint8))) for side in (drawn, mask)]
        expected = coco.iou([references[0]], [references[1]], [0])[0, 0]
        assert abs(region_similarity(drawn, mask) - expected) < TOLERANCE
        if mask.any():
            truth = TrueRegions.of([decode(encode(mask), max_pixels=20_000)])
            ours = box_region_similarity(box[None], np.array([0]), truth)[0]
            assert abs(ours - expected) < TOLERANCE


def test_boundary_accuracy_equals_the_morphological_definition():
    rng = np.random.default_rng(3)
    for _ in range(150):
        height, width = rng.integers(8, 200, 2).tolist()
        one, other = blob(rng, height, width), blob(rng, height, width)
        assert abs(boundary_accuracy(one, other) - davis_f(one, other)) < TOLERANCE
        box = grid_to_pixels(random_boxes(rng, 1)[0], height, width)
        drawn = np.zeros_like(other)
        drawn[box[1] : box[3], box[0] : box[2]] = True
        if other.any():
            truth = TrueRegions.of([decode(encode(other), max_pixels=40_000)])
            ours = box_boundary_accuracy(box[None], np.array([0]), truth)[0]
            assert abs(ours - davis_f(drawn, other)) < TOLERANCE


def test_j_and_f_equal_trackeval():
    trackeval = pytest.importorskip(
        "trackeval.metrics", reason="pip install trackeval (in an environment of its own)"
    )
    rng = np.random.default_rng(4)
    for _ in range(40):
        height, width = rng.integers(20, 200, 2).tolist()
        pairs = [(blob(rng, height, width), blob(rng, height, width)) for _ in range(5)]
        rles = [
            [{"size": [height, width], "counts": encode(side)["counts"].encode()} for side in sides]
            for sides in zip(*pairs, strict=True)
        ]
        measure = trackeval.JAndF()
        tracked, truth = ([[rle] for rle in side] for side in rles)
        expected_f = measure._compute_f(truth, tracked, 0, 0, 0.008)
        ours = [boundary_accuracy(one, other) for one, other in pairs]
        assert np.abs(np.asarray(expected_f) - ours).max() < TOLERANCE
        expected_j = measure._compute_j(truth, tracked, 1, 1, len(pairs))[0, 0]
        ours = [region_similarity(one, other) for one, other in pairs]
        assert np.abs(expected_j - ours).max() < TOLERANCE


def test_the_reported_metrics_equal_a_plain_loop_over_pycocotools():
    rng = np.random.default_rng(5)
    for _ in range(40):
        num_frames, height, width = 6, 60, 90
        masks = [blob(rng, height, width) for _ in range(num_frames)]
        if not any(mask.any() for mask in masks):
            continue
        references = [coco.encode(np.asfortranarray(mask.astype(np.uint8))) for mask in masks]
        boxes, frames = [], []
        for frame, (mask, reference) in enumerate(zip(masks, references, strict=True)):
            x, y, w, h = (np.array(coco.toBbox(reference)) / [width, height, width, height] * 1000).tolist()
            box = [round(x), round(y), round(x + w), round(y + h)]
            boxes.append(box if mask.any() else None)
            guess = random_boxes(rng, 1)[0].tolist() if rng.random() < 0.8 else None
            frames.append({"frame": frame, "box": guess} if guess else {"frame": frame, "visible": False})
        row = {
            "task": "box",
            "num_frames": num_frames,
            "objects": [
                {"id": "1", "boxes": boxes, "masks": [encode(m) if m.any() else None for m in masks]}
            ],
        }
        score = score_answer(json.dumps({"tracks": [{"id": "1", "frames": frames}]}), row)

        ious, hidden, j, f = [], [], [], []
        for box, entry, mask in zip(boxes, frames, masks, strict=True):
            drawn = np.zeros_like(mask)
            if "box" in entry:
                x1, y1, x2, y2 = entry["box"]
                rows, columns = (
                    (np.arange(height) + 0.5) / height * 1000,
                    (np.arange(width) + 0.5) / width * 1000,
                )
                drawn = ((rows >= y1) & (rows < y2))[:, None] & ((columns >= x1) & (columns < x2))[None]
            sides = [coco.encode(np.asfortranarray(side.astype(np.uint8))) for side in (drawn, mask)]
            # nothing predicted where there is nothing is a perfect region; something predicted there is not
            there, said = mask.any(), "box" in entry
            j.append(coco.iou([sides[0]], [sides[1]], [0])[0, 0] if there and said else float(there == said))
            f.append(davis_f(drawn, mask) if there and said else float(there == said))
            if box is None:
                hidden.append("box" not in entry)
            elif "box" in entry:
                pair = [[b[0], b[1], b[2] - b[0], b[3] - b[1]] for b in (entry["box"], box)]
                ious.append(coco.iou([pair[0]], [pair[1]], [0])[0, 0])
            else:
                ious.append(0.0)
        accuracy = np.mean(ious) * (len(ious) + sum(hidden)) / num_frames
        assert abs(score.accuracy - accuracy) < TOLERANCE
        assert abs(score.metrics["box/mean_iou"] - np.mean(ious)) < TOLERANCE
        assert abs(score.metrics["box/success@0.5"] - np.mean(np.array(ious) > 0.5)) < TOLERANCE
        auc = np.mean([np.mean(np.array(ious) > t) for t in np.linspace(0, 1, 21)])
        assert abs(score.metrics["box/success_auc"] - auc) < TOLERANCE
        assert abs(score.metrics["box/J"] - np.mean(j)) < TOLERANCE
        assert abs(score.metrics["box/F"] - np.mean(f)) < TOLERANCE
