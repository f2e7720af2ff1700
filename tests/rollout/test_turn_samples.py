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
