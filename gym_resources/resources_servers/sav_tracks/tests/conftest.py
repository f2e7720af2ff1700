# SPDX-License-Identifier: Apache-2.0
"""Makes `resources_servers.sav_tracks` importable however pytest is started, and builds rows for the tests."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from resources_servers.sav_tracks.rle import encode


def _rectangle(box, height, width):
    mask = np.zeros((height, width), dtype=bool)
    x1, y1, x2, y2 = box
    mask[
        round(y1 * height / 1000) : round(y2 * height / 1000),
        round(x1 * width / 1000) : round(x2 * width / 1000),
    ] = 1
    return encode(mask)


@pytest.fixture
def make_row():
    """`make_row(task, {"1": [box or None, ...], ...})`: metadata whose masks are the boxes, on 50 x 100 pixels."""

    def make(task, boxes, *, masks=True, names=None, **fields):
        objects = []
        for identifier, track in boxes.items():
            item = {"id": identifier, "boxes": track}
            if names:
                item["name"] = names[identifier]
            if masks:
                item["masks"] = [None if box is None else _rectangle(box, 50, 100) for box in track]
            objects.append(item)
        num_frames = len(next(iter(boxes.values())))
        return {"row_id": "r", "task": task, "num_frames": num_frames, "objects": objects, **fields}

    return make


@pytest.fixture
def make_answer():
    """`make_answer({"1": [box, None, ...]})`: the JSON answer; None claims absence, "skip" leaves a frame out."""

    def make(tracks, *, key="box", names=None):
        listed = []
        for identifier, places in tracks.items():
            frames = [
                {"frame": frame, "visible": False} if place is None else {"frame": frame, key: place}
                for frame, place in enumerate(places)
                if place != "skip"
            ]
            item = {"id": identifier, "frames": frames}
            if names:
                item["name"] = names[identifier]
            listed.append(item)
        return json.dumps({"tracks": listed})

    return make
