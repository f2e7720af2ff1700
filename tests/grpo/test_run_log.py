# SPDX-License-Identifier: Apache-2.0
import json

from rich.console import Console

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.verdict import MediaReport, Reason, TurnReport, Verdict
from nemo_rl_ext.grpo.run_log import RunLog, alignment_line
from nemo_rl_ext.manifest.row_order import steps_of
from nemo_rl_ext.rollout.turn_samples import TurnSample


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_is_one_flat_object_with_the_step_first(tmp_path):
    log = RunLog(tmp_path, resume_from=None, tensorboard=False, console=Console(quiet=True))
    log.step(1, {"train/loss": 0.5})
    log.step(2, {"train/loss": 0.25})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "train/loss": 0.5},
        {"step": 2, "train/loss": 0.25},
    ]
    assert list(lines(tmp_path / "metrics.jsonl")[0])[0] == "step"


def test_a_resumed_run_forgets_the_steps_it_will_write_again_and_a_cut_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "tra')
    RunLog(tmp_path, resume_from=2, tensorboard=False)
    assert [record["step"] for record in lines(path)] == [1, 2]
    RunLog(tmp_path, resume_from=None, tensorboard=False)
    assert lines(path) == []


def test_the_alignment_line_names_masked_rows_and_both_gaps():
    text = alignment_line(
        {
            "alignment/turns": 10.0,
            "alignment/rows": 8.0,
            "alignment/rows_masked": 2.0,
            "alignment/media_repaired": 5.0,
            "alignment/reason/ambiguous_grid": 2.0,
            "alignment/reason/resized": 5.0,
            "alignment/reason/context_outgrown": 1.0,
            "alignment/logprob_gap_matched_mean": 0.004,
            "alignment/logprob_gap_matched_max": 0.01,
            "alignment/logprob_gap_repaired_mean": 0.003,
            "alignment/logprob_gap_repaired_max": 0.02,
        }
    )
    assert "5 repaired" in text
    assert (
        "2 of 8 rows masked (ambiguous_grid 2); made again and trained: resized 5; ended early: context_outgrown 1;"
        in text
    )
    assert "matched 0.0040/0.0100, repaired 0.0030/0.0200" in text


def test_the_order_of_rows_is_the_same_from_any_step_on():
    rows = list(range(10))
    whole = dict(steps_of(rows, per_step=4, first=0, last=10, shuffle=True, seed=3))
    resumed = dict(steps_of(rows, per_step=4, first=6, last=10, shuffle=True, seed=3))
    assert all(whole[step] == batch for step, batch in resumed.items())
    seen = [row for step in range(5) for row in whole[step]]
    assert sorted(seen) == sorted(rows * 2)
    assert [
        row
        for _, batch in steps_of(rows, per_step=5, first=0, last=2, shuffle=False, seed=0)
        for row in batch
    ] == rows


def test_turns_are_written_with_their_media_and_cut_where_they_are_long(tmp_path):
    media = tuple(
        MediaReport(
            index=index,
            kind="video",
            size=(720, 1280),
            source=f"{index}.mp4",
            verdict=Verdict.REPAIRED,
            expected=(256,) * 200,
            found=(240,) * 200,
            static_grid=Grid(24, 42),
            grid=Grid(24, 40),
            reason=Reason.RESIZED,
        )
        for index in range(20)
    )
    report = TurnReport(row_id="r1", turn=1, media=media, expected=(256,) * 4000, found=(240,) * 4000)
    log = RunLog(tmp_path, resume_from=None, tensorboard=False, console=Console(quiet=True))
    log.turns(7, [TurnSample(report=report, rollouts=8, repair_ms=12.5, num_bytes=100)])
    (record,) = lines(tmp_path / "turns.jsonl")
    assert (record["step"], record["row_id"], record["turn"], record["rollouts"]) == (7, "r1", 1, 8)
    assert (record["reasons"], record["repair_ms"], record["num_media"]) == (["resized"], 12.5, 20)
    assert (record["num_expected"], record["num_found"]) == (4000 * 256, 4000 * 240)
    assert len(record["media"]) == 8 and len(record["media"][0]["found"]) == 64
    assert (record["media"][0]["static_grid"], record["media"][0]["grid"]) == ([24, 42], [24, 40])
