# SPDX-License-Identifier: Apache-2.0
"""Which turns of a step are worth writing down: masked ones, the slowest, some matched ones, a bounded number."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.align.verdict import TurnReport

MAX_TURNS, MAX_MATCHED = 16, 4
"""Turns kept per step, and how many of them may be matched ones."""


@dataclass(kw_only=True)
class TurnSample:
    """One outcome of a row's turn, and how many rollouts of the step had exactly this outcome.

    `repair_ms` and `num_bytes` are those of the slowest of them.
    """

    report: TurnReport
    rollouts: int = 0
    repair_ms: float = 0.0
    num_bytes: int = 0


class TurnSamples:
    """Gathers a step's turns, equal outcomes together."""

    def __init__(self) -> None:
        self._samples: dict[TurnReport, TurnSample] = {}

    def add(self, aligned: AlignedTurn) -> None:
        """Count one turn."""
        # Reports compare without their timing, so the rollouts of a prompt group that fared alike are one entry.
        sample = self._samples.setdefault(aligned.report, TurnSample(report=aligned.report))
        sample.rollouts += 1
        if aligned.report.repair_ms >= sample.repair_ms:
            sample.repair_ms = aligned.report.repair_ms
            sample.num_bytes = (
                aligned.tensors.num_bytes if aligned.changed and aligned.tensors is not None else 0
            )

    def take(self) -> list[TurnSample]:
        """The step's turns, masked first, then the slowest, then matched ones; gathering starts again."""
        samples, self._samples = list(self._samples.values()), {}
        samples.sort(key=lambda sample: (not sample.report.neutral, -sample.repair_ms))
        changed = [sample for sample in samples if _tells(sample.report)]
        matched = [sample for sample in samples if not _tells(sample.report)][:MAX_MATCHED]
        return changed[: MAX_TURNS - len(matched)] + matched


def _tells(report: TurnReport) -> bool:
    """Whether there is more to say of a turn than that it matched."""
    return report.neutral or report.repaired or bool(report.reasons())
