# SPDX-License-Identifier: Apache-2.0
"""Where re-sizing is to be prevented, a re-sized image is a fault of the settings and no repair."""

from __future__ import annotations

import dataclasses

from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.align.verdict import MediaReport, Reason, Verdict


def refuse_resized(turn: AlignedTurn) -> AlignedTurn:
    """The turn, unalignable when it holds an image that the engine re-sized; clips stay as they were judged.

    A refused turn keeps its tensors, which have as many features as it has context tokens; its row's loss is zeroed.
    """
    report = turn.report
    if report.neutral or not any(map(_is_resized, report.media)):
        return turn
    media = tuple(
        dataclasses.replace(item, verdict=Verdict.UNALIGNABLE, reason=Reason.PREVENTION_FAILED)
        if _is_resized(item)
        else item
        for item in report.media
    )
    return dataclasses.replace(turn, report=dataclasses.replace(report, media=media, neutral=True))


def _is_resized(item: MediaReport) -> bool:
    return item.kind == "image" and item.verdict is Verdict.REPAIRED
