# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 -- the catalogue is easier to read packed than one item a line
"""Two hundred answers that a policy can emit and no verifier may trip over, for each of the three tasks."""

import json
import math
import random

import numpy as np
import pytest
from resources_servers.sav_tracks.rle import encode
from resources_servers.sav_tracks.scoring import score_answer
from resources_servers.sav_tracks.truth import TruthCache

NUM_FRAMES, NUM_OBJECTS = 64, 5
BOX = [100, 100, 400, 500]


def row(task):
    mask = np.zeros((144, 256), dtype=bool)
    mask[14:72, 26:102] = True
    rle = encode(mask)
    objects = [
        {
            "id": str(i),
            "boxes": [BOX if frame % 4 else None for frame in range(NUM_FRAMES)],
            "masks": [rle if frame % 4 else None for frame in range(NUM_FRAMES)],
        }
        for i in range(NUM_OBJECTS)
    ]
    return {"row_id": "hostile", "task": task, "num_frames": NUM_FRAMES, "objects": objects}


def entries(**changes):
    return [{"frame": frame, "box": BOX, "point": [200, 200], **changes} for frame in range(NUM_FRAMES)]


def tracks(*items):
    return json.dumps({"tracks": list(items)})


def hostile_answers():
    """Exactly 200 texts (and things that are no text)."""
    good = tracks(*({"id": str(i), "frames": entries()} for i in range(NUM_OBJECTS)))
    one = tracks({"id": "0", "frames": entries()})
    big = "9" * 5000
    found = [
        None, 7, float("nan"), b"{}", [], {}, "", " ", "\x00", "\ufeff", "{", "}", "[", "]", '"', "\\", "```", "```json",
        "null", "NaN", "{}", '{"tracks"', '{"tracks":', '{"tracks":}', '{"tracks": null}', '{"tracks": {}}', '{"tracks": []}',
        '{"tracks": [[]]}', '{"tracks": [{}]}', '{"tracks": [null, true, 1, "x", 1.5]}', "<think>", "</think>",
        "<think></think>", "</think>" * 1000, "<think>" * 10_000, f"<think>{good}", f"{good}</think>", good + good,
        good + "{", good * 30, "\ud800" + good, good + "\udfff", good.replace("tracks", "tr\\u0061cks"),
        # nesting, in the places where a parser may meet it
        "[" * 100_000, "{" * 100_000, '{"a":' * 100_000, '{"tracks":' * 100_000, '{"tracks":[' * 100_000,
        '{"tracks":' + "[" * 100_000, '{"tracks":' + "[" * 100_000 + "]" * 100_000 + "}", '{"tracks":[' + '{"id":' * 50_000,
        '{"tracks":[{"id":"0","frames":' + "[" * 60_000 + "]" * 60_000 + "}]}", '{"x":"' + "[" * 100_000 + '","tracks":[]}',
        "[" * 31 + '{"tracks":[]}' + "]" * 31, '{"tracks":[' * 31, '{"tracks": ' * 5000 + "1" + "}" * 5000,
        # length
        "a" * 500_000, "a" * 500_000 + good, good + "a" * 500_000, "<think>" + "b " * 250_000 + "</think>" + good,
        "<think>" + "{" * 500_000 + "</think>" + good, "\n" * 500_000 + good, '{"tracks"' + " " * 500_000, '{"tracks" ' * 60_000,
        '"' * 500_000, "\\" * 500_000, '{"tracks":[' + "1," * 250_000, '{"tracks":[' + "{}," * 100_000, "\U0001f600" * 200_000,
        '{"tracks":["' + "x" * 500_000, '{"tracks": [' + ",".join(["{}"] * 20_000) + "]}", "```json\n" * 60_000 + good,
        '{"tracks": [' + ",".join(['{"id":"0","frames":[]}'] * 5000) + "]}",
        '{"tracks": [{"id":"0","frames":[' + ",".join(['{"frame":1,"visible":false}'] * 3000) + "]}]}",
        tracks({"id": "0", "frames": entries() * 20}), tracks(*({"id": str(i), "frames": entries()} for i in range(20))),
        '{"tracks": [{"id": "0", "frames": [{"frame": ' + ",".join(f'{i}}}, {{"frame": {i}' for i in range(2000)) + "}]}]}",
        # keys
        '{"tracks": [], "tracks": []}', one.replace('"id": "0"', '"id": "0", "id": "1"'),
        one.replace('"frame": 0,', '"frame": 0, "frame": 1,'), '{"tracks": [], ' + '"a": 1, ' * 5000 + '"b": 1}',
        '{"__class__": 1, "tracks": []}', '{"": {"tracks": []}}', '{"Tracks": []}', "{'tracks': []}", '{"tracks ": []}',
        # identifiers
        *(
            tracks({"id": value, "name": value, "frames": entries()})
            for value in (None, True, 0, -1, 1.5, "", " 0 ", "0\x00", "00", "\u0660", [], {}, ["0"], {"id": "0"}, "x" * 50_000)
        ),
        tracks(*({"id": "0", "frames": entries()} for _ in range(5))), tracks({"frames": entries()}), tracks({"id": "0"}),
        # frames
        *(
            tracks({"id": "0", "frames": value})
            for value in (None, {}, "x", 5, [None], [[]], ["0"], [0], [{"frame": 0}], [{"box": BOX}], [{}] * 5000)
        ),
        *(
            tracks({"id": "0", "frames": entries(frame=value)})
            for value in (None, -1, NUM_FRAMES, 10**8, True, "0", 0.0, [], {})
        ),
        # coordinates
        *(
            tracks({"id": "0", "frames": entries(box=value, point=value)})
            for value in (
                None, [], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [4, 3, 2, 1], [1, 1, 1, 1], [0, 0, 1000, 1000], [-1, -1, 2, 2],
                [0, 0, 1001, 1001], ["1", "2", "3", "4"], [None] * 4, [True] * 4, [[1, 2], [3, 4]], {"x": 1}, "1,2,3,4", 5, BOX * 2000,
            )
        ),
        *(
            one.replace("100, 100", f"{value}, {value}").replace("200, 200", f"{value}, {value}")
            for value in (
                "NaN", "Infinity", "-Infinity", big, "-" + big, big + ".0", "1e999999", "1E+308", "-0", "-0.0", "1e2", "1.5", "0x10", "01",
                "+1", ".5", "1_0", "\u0661\u0662", "null", '"NaN"', "1e-400", "0." + "0" * 5000 + "1",
            )
        ),
        *(
            tracks({"id": "0", "frames": entries(visible=value)})
            for value in (None, False, 0, 1, "false", "true", [], {}, 1e308)
        ),
    ]  # fmt: skip
    rng = random.Random(0)
    while len(found) < 200:  # a good answer, damaged
        text = list(good)
        for _ in range(rng.choice([1, 3, 30])):
            text[rng.randrange(len(text))] = rng.choice('{}[]",:0-9.eNaN\\ \x00')
        found.append("".join(text)[: rng.choice([len(good), rng.randrange(len(good))])])
    return found


ANSWERS = hostile_answers()


def test_there_are_two_hundred():
    assert len(ANSWERS) == 200


@pytest.mark.parametrize("task", ["box", "pt", "ref"])
def test_no_hostile_answer_raises_or_leaves_the_range(task):
    metadata, cache = row(task), TruthCache()
    for index, text in enumerate(ANSWERS):
        score = score_answer(text, metadata, cache=cache)
        fields = json.loads(json.dumps(score.as_fields(), allow_nan=False))
        assert score.error_class != "internal", (index, score.error)
        assert 0.0 <= fields["reward"] <= 1.0, index
        assert fields["reward"] == sum(fields["reward_components"].values()), index
        assert set(fields["reward_components"]) == {"accuracy", "format"}, index
        assert all(math.isfinite(value) for value in score.metrics.values()), index
    assert cache.num_misses == 1


def test_hostile_ground_truth_is_an_error_and_never_a_raise():
    nested = []
    for _ in range(5000):
        nested = [nested]
    good = row("box")
    for metadata in (
        None, [], 3, "x", {}, nested, {"task": nested}, {**good, "task": None}, {**good, "num_frames": 10**30},
        {**good, "objects": nested}, {**good, "objects": good["objects"] * 200}, {**good, "num_frames": float("nan")},
        {**good, "objects": [{**good["objects"][0], "masks": [{"size": [10**9, 10**9], "counts": "0"}] * NUM_FRAMES}]},
        {**good, "objects": [{**good["objects"][0], "boxes": [[math.inf] * 4] * NUM_FRAMES}]},
    ):  # fmt: skip
        for cache in (None, TruthCache()):
            score = score_answer(ANSWERS[0], metadata, cache=cache)
            assert (score.reward, score.error_class) == (0.0, "ground_truth")
