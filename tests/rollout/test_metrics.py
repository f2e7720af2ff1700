# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.align.verdict import MediaAlignmentError, MediaReport, Reason, TurnReport, Verdict
from nemo_rl_ext.rollout.errors import MaskedFractionError
from nemo_rl_ext.rollout.metrics import AlignmentMetrics, MaskedWindow


def aligned(verdict, reason=None, *, expected=252, found=165):
    item = MediaReport(
        index=0,
        kind="image",
        size=(480, 640),
        source="a.jpg",
        verdict=verdict,
        expected=(expected,),
        found=(found,),
        reason=reason,
    )
    neutral = verdict in (Verdict.AMBIGUOUS, Verdict.UNALIGNABLE)
    report = TurnReport(
        row_id="r1",
        turn=0,
        media=(item,),
        expected=(expected,),
        found=(found,),
        neutral=neutral,
        repair_ms=2.0,
    )
    return AlignedTurn(tensors=None, report=report, changed=verdict is not Verdict.MATCHED)


def test_one_step_is_counted_under_the_fixed_names():
    metrics = AlignmentMetrics()
    assert not metrics.add_row([aligned(Verdict.MATCHED, expected=252, found=252)])
    assert not metrics.add_row([aligned(Verdict.REPAIRED, Reason.RESIZED)])
    assert metrics.add_row([aligned(Verdict.AMBIGUOUS, Reason.AMBIGUOUS_GRID, found=252)])
    metrics.add_gap(repaired=True, mean=0.1, maximum=0.2, num_tokens=1)
    metrics.add_gap(repaired=True, mean=0.4, maximum=0.5, num_tokens=3)
    out = metrics.flush()
    assert out["alignment/rows"] == out["alignment/turns"] == 3
    assert out["alignment/rows_masked"] == 1
    assert (
        out["alignment/media_matched"]
        == out["alignment/media_repaired"]
        == out["alignment/media_ambiguous"]
        == 1
    )
    assert out["alignment/token_delta"] == 87
    assert out["alignment/reason/resized"] == 1
    assert out["alignment/logprob_gap_repaired_mean"] == pytest.approx((0.1 + 3 * 0.4) / 4)
    assert out["alignment/logprob_gap_repaired_max"] == 0.5
    assert metrics.flush()["alignment/rows"] == 0


def test_the_first_occurrence_of_each_reason_is_logged_in_full_and_only_once(caplog):
    metrics = AlignmentMetrics()
    with caplog.at_level(logging.WARNING, logger="nemo_rl_ext"):
        for _ in range(3):
            metrics.add_row([aligned(Verdict.REPAIRED, Reason.RESIZED)])
        metrics.add_row([aligned(Verdict.UNALIGNABLE, Reason.INFEASIBLE_LENGTH)])
    assert len(caplog.messages) == 2
    assert all(part in caplog.messages[0] for part in ("r1", "a.jpg", "252", "165", "480"))


@pytest.mark.parametrize(
    ("verdict", "reason", "option"),
    [
        (Verdict.AMBIGUOUS, Reason.AMBIGUOUS_GRID, "on_ambiguous"),
        (Verdict.UNALIGNABLE, Reason.RUN_COUNT, "on_unalignable"),
    ],
)
def test_a_verdict_can_stop_the_run(verdict, reason, option):
    AlignmentMetrics().add_row([aligned(verdict, reason)])
    with pytest.raises(MediaAlignmentError, match=reason.value):
        AlignmentMetrics(**{option: "raise"}).add_row([aligned(verdict, reason)])


def test_too_many_masked_rows_stop_the_run_with_a_diagnosis():
    window = MaskedWindow(size=8, max_fraction=0.25)
    for index in range(8):
        window.add([Reason.RUN_COUNT], masked=index < 2)
    window.add([], masked=False)
    with pytest.raises(MaskedFractionError, match=r"3 of the last 8 rows.*run_count.*chat template"):
        for _ in range(8):
            window.add([Reason.RUN_COUNT], masked=True)


def test_a_few_masked_rows_before_the_window_is_full_are_noise():
    window = MaskedWindow(size=100, max_fraction=0.1)
    for _ in range(99):
        window.add([Reason.RUN_COUNT], masked=True)
