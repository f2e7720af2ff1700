# SPDX-License-Identifier: Apache-2.0
import dataclasses

import torch

from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.align.verdict import MediaReport, Reason, TurnReport, Verdict
from nemo_rl_ext.rollout.metrics import AlignmentMetrics
from nemo_rl_ext.rollout.turn_samples import MAX_MATCHED, MAX_TURNS, TurnSamples


def aligned(row, verdict=Verdict.REPAIRED, ms=1.0, found=165):
    item = MediaReport(
        index=0,
        kind="image",
        size=(480, 640),
        source="a.jpg",
        verdict=verdict,
        expected=(252,),
        found=(found,),
        reason=Reason.RESIZED if verdict is Verdict.REPAIRED else None,
    )
    report = TurnReport(
        row_id=row,
        turn=0,
        media=(item,),
        expected=(252,),
        found=(found,),
        neutral=verdict is Verdict.UNALIGNABLE,
        repair_ms=ms,
    )
    tensors = MediaTensors(grids=(Grid(2, 2),), values={"pixel_values": torch.zeros(4, 3)})
    return AlignedTurn(tensors=tensors, report=report, changed=verdict is not Verdict.MATCHED)


def test_rollouts_of_a_group_that_fared_alike_are_one_entry_with_the_slowest_time():
    samples = TurnSamples()
    for ms in (1.0, 5.0, 2.0):
        samples.add(aligned("r1", ms=ms))
    samples.add(aligned("r1", found=144))
    first, second = samples.take()
    assert (first.rollouts, first.repair_ms, first.num_bytes) == (3, 5.0, 48)
    assert second.rollouts == 1
    assert samples.take() == []


def test_masked_turns_come_first_then_the_slowest_and_some_matched_ones_are_kept():
    samples = TurnSamples()
    for index in range(40):
        samples.add(aligned(f"fixed-{index}", ms=float(index)))
        samples.add(aligned(f"fine-{index}", Verdict.MATCHED, ms=0.0))
    samples.add(aligned("masked", Verdict.UNALIGNABLE, ms=0.5))
    taken = samples.take()
    assert len(taken) == MAX_TURNS
    assert [sample.report.row_id for sample in taken[:3]] == ["masked", "fixed-39", "fixed-38"]
    assert sum(sample.report.media[0].verdict is Verdict.MATCHED for sample in taken) == MAX_MATCHED


def test_a_flushed_step_leaves_its_turns_and_nothing_grows_when_nobody_reads_them():
    metrics = AlignmentMetrics()
    metrics.add_row([aligned("r1")])
    metrics.flush()
    assert [sample.report.row_id for sample in metrics.turn_samples] == ["r1"]
    metrics.add_row([dataclasses.replace(aligned("r2"), changed=False)])
    metrics.flush()
    assert [sample.report.row_id for sample in metrics.turn_samples] == ["r2"]


def test_a_row_that_is_masked_or_split_outside_its_turns_is_written_down_too():
    metrics = AlignmentMetrics()
    lost = {Reason.GENERATION_FAILED: "row 'long' (train.jsonl:7): the prompt has 9000 tokens"}
    split = {Reason.EARLIER_TURN_RESIZED: "row 'two': media 0 had 252 tokens in turn 0 and 165 in turn 1"}
    for _ in range(4):
        metrics.add_row([], masked=True, extra_reasons=lost, row_id="long")
        metrics.add_row([aligned("two")], extra_reasons=split, row_id="two")
    metrics.flush()
    first, second, third = metrics.turn_samples
    assert (first.report.row_id, first.rollouts, first.report.neutral) == ("long", 4, True)
    assert "train.jsonl:7" in first.report.detail
    told = {sample.report.reasons() for sample in (second, third)}
    assert told == {(Reason.RESIZED,), (Reason.EARLIER_TURN_RESIZED,)}
    assert metrics.first_occurrences[Reason.GENERATION_FAILED].report.row_id == "long"
