# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from resources_servers.sav_tracks import scoring
from resources_servers.sav_tracks.scoring import score_answer
from resources_servers.sav_tracks.truth import TruthCache

LEFT, RIGHT, TALL = [0, 0, 400, 500], [500, 500, 900, 1000], [300, 0, 500, 1000]


def test_a_perfect_answer_earns_one_in_every_task(make_row, make_answer):
    boxes = {"1": [LEFT, None, LEFT], "2": [RIGHT, RIGHT, None]}
    points = {"1": [[200, 250], None, [200, 250]], "2": [[700, 700], [700, 700], None]}
    for task, answer in (
        ("box", make_answer(boxes)),
        ("ref", make_answer({"x": boxes["2"], "y": boxes["1"]})),
        ("pt", make_answer(points, key="point")),
    ):
        score = score_answer(answer, make_row(task, boxes))
        assert (score.reward, score.accuracy, score.format, score.error) == (1.0, 1.0, 1.0, None), task


def test_components_carry_the_weights_and_sum_to_the_reward_exactly(make_row, make_answer):
    score = score_answer(make_answer({"1": [[10, 10, 390, 495]]}), make_row("box", {"1": [LEFT]}))
    assert 0 < score.accuracy < 1
    assert score.reward_components == {"accuracy": 0.9 * score.accuracy, "format": 0.1}
    fields = json.loads(json.dumps(score.as_fields()))
    assert fields["reward"] == sum(fields["reward_components"].values())


def test_claiming_absence_everywhere_never_beats_a_poor_localisation(make_row, make_answer):
    row = make_row("box", {"1": [LEFT, None, None, None]})
    absent = score_answer(make_answer({"1": [None] * 4}), row)
    poor = score_answer(make_answer({"1": [[300, 400, 700, 900], None, None, None]}), row)
    silent = score_answer(make_answer({"1": [[300, 400, 700, 900], "skip", "skip", "skip"]}), row)
    assert absent.accuracy == 0.0
    assert poor.accuracy > silent.accuracy > 0.0
    wrong = score_answer(make_answer({"1": [LEFT, LEFT, LEFT, LEFT]}), row)
    right = score_answer(make_answer({"1": [LEFT, None, None, None]}), row)
    assert wrong.accuracy == pytest.approx(0.25) and right.accuracy == 1.0


def test_extra_tracks_duplicate_ids_and_stray_frames_cost(make_row, make_answer):
    row = make_row("box", {"1": [LEFT, LEFT]})
    track = json.loads(make_answer({"1": [LEFT, LEFT]}))["tracks"][0]
    other = {**track, "id": "9"}

    def accuracy(*tracks):
        return score_answer(json.dumps({"tracks": list(tracks)}), row).accuracy

    assert accuracy(track) == 1.0
    assert accuracy(track, track) == 0.5
    assert accuracy(track, other) == 0.5
    assert accuracy(track, "rubbish") == 0.5
    stray = {**track, "frames": track["frames"] + [{"frame": 5, "box": LEFT}] * 2}
    assert accuracy(stray) == 0.5
    # the first of two tracks with one id is the one that counts, so a second guess cannot help
    assert accuracy({**track, "frames": []}, track) == 0.0


def test_ref_matches_ids_by_the_best_assignment(make_row, make_answer):
    truth = {"a": [LEFT, LEFT], "b": [RIGHT, RIGHT]}
    row = make_row("ref", truth, names={"a": "Red disc", "b": "blue square"})
    good = score_answer(make_answer({"7": truth["b"], "3": truth["a"]}), row)
    assert good.reward == 1.0
    # a name is not asked for and does no harm
    named = make_answer({"7": truth["b"], "3": truth["a"]}, names={"7": "cat", "3": None})
    assert score_answer(named, row).reward == 1.0
    one = score_answer(make_answer({"7": truth["b"]}), row)
    assert one.accuracy == 0.5 and one.format == 0.5
    three = score_answer(make_answer({"7": truth["b"], "3": truth["a"], "1": truth["a"]}), row)
    assert three.accuracy == pytest.approx(2 / 3) and three.format == 0.5
    many = score_answer(make_answer({str(i): truth["b"] for i in range(4)}), row)
    assert many.accuracy == pytest.approx(1 / 4)
    switch = score_answer(make_answer({"7": [LEFT, RIGHT], "3": [RIGHT, LEFT]}), row)
    assert switch.accuracy == pytest.approx(0.5)


def test_points_count_inside_the_mask_only(make_row, make_answer):
    row = make_row("pt", {"1": [LEFT, LEFT, LEFT, LEFT]})
    answer = make_answer({"1": [[0, 0], [399, 499], [401, 10], [10, 501]]}, key="point")
    score = score_answer(answer, row)
    assert score.accuracy == 0.5 and score.metrics["pt/point_accuracy"] == 0.5
    edge = make_row("pt", {"1": [RIGHT]})
    assert score_answer(make_answer({"1": [[899, 1000]]}, key="point"), edge).accuracy == 1.0


def test_the_frame_that_the_prompt_shows_counts_neither_way(make_row, make_answer):
    row = make_row("box", {"1": [LEFT, RIGHT]})
    row["objects"][0]["prompt_frame"] = 0
    shown = score_answer(make_answer({"1": [LEFT, None]}), row)
    tracked = score_answer(make_answer({"1": [TALL, RIGHT]}), row)
    assert shown.accuracy == 0.0 and tracked.accuracy == 1.0


def test_format_has_three_steps(make_row, make_answer):
    row = make_row("box", {"1": [LEFT, LEFT], "2": [RIGHT, RIGHT]})
    whole = make_answer({"1": [LEFT, LEFT], "2": [RIGHT, RIGHT]})
    gap = make_answer({"1": [LEFT, "skip"], "2": [RIGHT, RIGHT]})
    unknown = make_answer({"1": [LEFT, LEFT], "3": [RIGHT, RIGHT]})
    nothing = make_answer({"1": ["skip", "skip"]})
    steps = [
        score_answer(text, row).format for text in (whole, gap, unknown, nothing, '{"tracks": []}', "words")
    ]
    assert steps == [1.0, 0.5, 0.5, 0.0, 0.0, 0.0]


def test_metrics_of_known_answers(make_row, make_answer):
    row = make_row("box", {"1": [LEFT, LEFT, None]})
    metrics = score_answer(make_answer({"1": [LEFT, [0, 0, 400, 250], LEFT]}), row).metrics
    assert metrics["box/mean_iou"] == pytest.approx(0.75)
    assert metrics["box/success@0.5"] == 0.5
    assert metrics["box/success_auc"] == pytest.approx((20 + 10) / 42)
    assert metrics["box/absence_recall"] == 0.0
    assert metrics["box/J"] == pytest.approx((1 + 12 / 25 + 0) / 3)
    assert metrics["box/J&F"] == pytest.approx((metrics["box/J"] + metrics["box/F"]) / 2)
    assert metrics["box/num_extra_tracks"] == 0.0
    perfect = score_answer(make_answer({"1": [LEFT, LEFT, None]}), row).metrics
    assert perfect["box/J"] == perfect["box/F"] == 1.0
    assert "box/J" not in score_answer("x", row, region_metrics=False).metrics
    assert "box/J" not in score_answer("x", make_row("box", {"1": [LEFT]}, masks=False)).metrics


def test_bad_ground_truth_is_reward_zero_with_an_error(make_row, make_answer):
    for metadata in (None, {}, {"task": "box", "num_frames": 1, "objects": [{}]}):
        for cache in (None, TruthCache()):
            score = score_answer(make_answer({"1": [LEFT]}), metadata, cache=cache)
            assert score.reward == 0.0 and score.error_class == "ground_truth" and score.error
            assert score.reward_components == {"accuracy": 0.0, "format": 0.0}


def test_an_unreadable_answer_names_the_problem(make_row):
    score = score_answer("", make_row("box", {"1": [LEFT]}))
    assert (score.reward, score.error, score.error_class) == (0.0, "no_answer_text", "answer")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"tracks": []}', "no_usable_track"),
        ('{"tracks": [{"id": "1", "frames": []}]}', "no_usable_track"),
        ('{"tracks": [7]}', "track_without_a_list_of_frames"),
        ('{"tracks": [{"id": "1", "id": "1", "frames": [{"frame": 0, "visible": false}]}]}', "repeated_key"),
        ('{"tracks": [{"id": "1", "frames": [{"frame": 0}]}]}', "neither_a_place_nor_an_absence"),
        ('{"tracks": [], "tracks": []}', "duplicate_json_key"),
        ("[" * 100, "no_json_object_with_tracks"),
        ('{"tracks": ' + "[" * 100, "nested_too_deep"),
    ],
)
def test_an_answer_that_earns_nothing_says_why(make_row, text, error):
    score = score_answer(text, make_row("box", {"1": [LEFT]}))
    assert (score.reward, score.error, score.error_class) == (0.0, error, "answer")


def test_a_dropped_part_is_reported_beside_what_was_scored(make_row, make_answer):
    row = make_row("box", {"1": [LEFT, LEFT]})
    text = make_answer({"1": [LEFT, LEFT]}).replace('"frame": 1', '"frame": 1, "frame": 1')
    score = score_answer(text, row)
    assert score.accuracy > 0 and score.format == 0.5 and score.error is None
    assert score.as_fields()["dropped"] == {"repeated_key": 1}


def test_our_own_mistake_is_reported_and_not_raised(make_row, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(scoring, "_metrics", broken)
    score = score_answer("", make_row("box", {"1": [LEFT]}))
    assert (score.reward, score.error_class, score.error) == (0.0, "internal", "ZeroDivisionError: boom")
