# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from resources_servers.sav_tracks.answer import Fault, Problem, Shape, max_characters, parse_answer

GOOD = '{"tracks": [{"id": "1", "frames": [{"frame": 0, "box": [1, 2, 30, 40]}, {"frame": 1, "visible": false}]}]}'


def parse(text, **limits):
    return parse_answer(text, **{"shape": Shape.BOX, "num_frames": 2, "num_objects": 1, **limits})


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"```json\n{GOOD}\n```",
        f"```\n{GOOD}\n```\n",
        f'<think>{{"tracks": []}} hmm</think>\n{GOOD}',
        f"It moves right {{fast}}.\n{GOOD} done",
        f'Draft: {{"tracks": []}} and then {GOOD}',
        GOOD.replace('{"tracks"', '{\n  "tracks"'),
        GOOD.replace('"1"', "1"),
        '{"note": "x", ' + GOOD[1:],
        '{"note": "x{y", ' + GOOD[1:],
        'It {moves}. {"note": "x", "sure": true, ' + GOOD[1:],
        'It {moves}. {"note": "x", "note": "y", ' + GOOD[1:],
        '{"note": "' + "[" * 100 + '", ' + GOOD[1:],
        '{"note": "' + '\\"{' * 100 + '", ' + GOOD[1:],
        GOOD[:-1] + ', "note": "' + "[{" * 5000 + '"}',
        GOOD + "[" * 100,
        GOOD + ' "' + "[" * 100,
        GOOD.replace('"visible": false', '"visible": false, "box": null'),
        GOOD.replace('"visible": false', '"box": [], "visible": false'),
        GOOD.replace('"visible": false', '"visible": false, "note": 1, "note": 2'),
        "x" * 600_000 + GOOD,
    ],
)
def test_the_answer_is_found_behind_reasoning_and_fences(text):
    answer = parse(text)
    assert answer.problem is None
    (track,) = answer.tracks
    assert track.id == "1" and track.is_complete
    assert track.visible.tolist() == [True, False] and track.absent.tolist() == [False, True]
    assert track.coordinates[0].tolist() == [1, 2, 30, 40]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, Problem.EMPTY),
        ("  \n", Problem.EMPTY),
        ("<think>still thinking " + GOOD, Problem.REASONING_CUT),
        ("no object here", Problem.NO_JSON),
        ("{broken", Problem.NO_JSON),
        ('{"tracks": [', Problem.NO_JSON),
        ('{"boxes": []}', Problem.NO_JSON),
        ('{"tracks": ' + "[" * 10_000, Problem.TOO_DEEP),
        ('{"tracks": ' + "[" * 100_000, Problem.NO_JSON),
        ('{"tracks": [], "tracks": []}', Problem.DUPLICATE_KEY),
        ('{"tracks": {"a": 1}}', Problem.NOT_A_LIST),
    ],
)
def test_an_unreadable_answer_has_a_named_problem(text, problem):
    assert parse(text).problem is problem


@pytest.mark.parametrize(
    "entry",
    [
        {"frame": 0, "box": [1, 2, 30]},
        {"frame": 0, "box": [30, 2, 1, 40]},
        {"frame": 0, "box": [1, 2, 30, 1001]},
        {"frame": 0, "box": [-1, 2, 30, 40]},
        {"frame": 0, "box": [1.5, 2, 30, 40]},
        {"frame": 0, "box": ["1", 2, 30, 40]},
        {"frame": 0, "box": [True, 2, 30, 40]},
        {"frame": 0, "box": {"x1": 1}},
        {"frame": 0, "box": [1, 2, 30, 40], "visible": False},
        {"frame": 0, "box": [1, 2, 30, 40], "visible": "yes"},
        {"frame": 0, "visible": True},
        {"frame": 0, "visible": 0},
        {"frame": 0},
    ],
)
def test_an_entry_against_the_rules_counts_as_not_given(entry):
    (track,) = parse(json.dumps({"tracks": [{"id": "1", "frames": [entry]}]})).tracks
    assert not track.visible.any() and not track.absent.any() and not track.is_complete
    assert track.num_extra_entries == 0


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 5000, "-" + "9" * 5000, "0.5"]
)
def test_no_number_literal_is_a_coordinate_by_accident(number):
    (track,) = parse(GOOD.replace("30", number)).tracks
    assert track.visible.tolist() == [False, False] and track.absent.tolist() == [False, True]


def test_a_frame_listed_twice_is_not_answered_and_strays_are_extra():
    entries = [
        {"frame": 0, "box": [1, 2, 3, 4]},
        {"frame": 0, "box": [1, 2, 3, 4]},
        {"frame": 0, "visible": False},
        {"frame": 7, "visible": False},
        {"frame": "1", "visible": False},
        {"frame": True, "visible": False},
        "frame",
    ]
    (track,) = parse(json.dumps({"tracks": [{"id": "1", "frames": entries}]})).tracks
    assert not track.visible.any() and not track.absent.any()
    assert track.num_extra_entries == 6
    assert not track.coordinates.any()


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("3", Fault.NO_ENTRY),
        ('{"frame": 7, "visible": false}', Fault.OTHER_FRAME),
        ('{"visible": false}', Fault.OTHER_FRAME),
        ('{"frame": 0, "visible": false}, {"frame": 0, "visible": false}', Fault.FRAME_TWICE),
        ('{"frame": 0}', Fault.NO_PLACE),
        ('{"frame": 0, "box": null}', Fault.NO_PLACE),
        ('{"frame": 0, "visible": true, "box": null}', Fault.NO_PLACE),
        ('{"frame": 0, "frame": 0, "visible": false}', Fault.REPEATED_KEY),
        ('{"frame": 0, "visible": false, "visible": true, "box": [1, 2, 3, 4]}', Fault.REPEATED_KEY),
        ('{"frame": 0, "box": [1, 2, 3, 4], "box": [5, 6, 7, 8]}', Fault.REPEATED_KEY),
    ],
)
def test_a_dropped_entry_is_named_and_costs_no_other(entry, fault):
    answer = parse('{"tracks": [{"id": "1", "frames": [{"frame": 1, "visible": false}, ' + entry + "]}]}")
    (track,) = answer.tracks
    assert answer.problem is None and answer.dropped == {fault: 1}
    assert not track.visible.any() and track.absent.tolist() == [False, True] and not track.is_complete


@pytest.mark.parametrize(
    ("track", "fault"),
    [
        ("3", Fault.NO_TRACK),
        ('{"id": "2"}', Fault.NO_TRACK),
        ('{"id": "2", "id": "3", "frames": []}', Fault.REPEATED_KEY),
        ('{"id": "2", "frames": [], "frames": []}', Fault.REPEATED_KEY),
    ],
)
def test_a_dropped_track_is_named_and_costs_no_other(track, fault):
    answer = parse(GOOD[:-2] + f", {track}]}}")
    assert answer.dropped == {fault: 1} and answer.num_tracks == 2
    assert len(answer.tracks) == 1 and answer.tracks[0].is_complete


def test_a_place_that_is_said_to_be_invisible_is_neither():
    (track,) = parse(GOOD.replace('"visible": false', '"visible": false, "box": [1, 2, 3, 4]')).tracks
    assert track.visible.tolist() == [True, False] and not track.absent.any()


def test_unreadable_tracks_are_counted():
    answer = parse(
        '{"tracks": [3, {"id": "1"}, {"id": "1", "frames": 5}, {"id": [], "name": 4, "frames": []}]}'
    )
    assert answer.num_tracks == 4
    (track,) = answer.tracks
    assert track.id is None


def test_only_a_bounded_number_of_tracks_is_read():
    answer = parse(json.dumps({"tracks": [{"id": str(i), "frames": []} for i in range(50)]}))
    assert answer.num_tracks == 50 and len(answer.tracks) == 4


def test_points_have_two_coordinates():
    text = '{"tracks": [{"id": "1", "frames": [{"frame": 0, "point": [5, 6]}, {"frame": 1, "box": [1, 2, 3, 4]}]}]}'
    (track,) = parse(text, shape=Shape.POINT).tracks
    assert track.visible.tolist() == [True, False]
    assert track.coordinates[0].tolist() == [5, 6]


def test_the_part_that_is_read_grows_with_the_row_up_to_a_limit():
    assert max_characters(1, 1) == 16_640
    assert max_characters(64, 5) == 98_304
    assert max_characters(512, 64) == 262_144
