# SPDX-License-Identifier: Apache-2.0
"""What alignment did, as a flat dict of floats per step, and the first occurrence of each reason in full."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.align.verdict import MediaAlignmentError, MediaKind, Reason, TurnReport, Verdict
from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.rollout.errors import MaskedFractionError
from nemo_rl_ext.rollout.turn_samples import TurnSample, TurnSamples

logger = logging.getLogger(__name__)


class MaskedWindow:
    """Stops a run whose rows are masked by the dozen: that is a configuration error, not noise.

    Judged over the last `size` rows once that many were seen.
    """

    def __init__(self, *, size: int, max_fraction: float) -> None:
        self.max_fraction = max_fraction
        self._size = size
        self._rows: deque[tuple[Reason, ...]] = deque(maxlen=size)

    def add(self, reasons: Sequence[Reason], *, masked: bool) -> None:
        """Count one row; one that is masked by `grpo.overlong_filtering` alone is the user's choice and no fault.

        Raises `MaskedFractionError` with a diagnosis when the share passes the limit.
        """
        chosen = Reason.OVERLONG_FILTERED in reasons
        blamed = [reason for reason in reasons if reason is not Reason.OVERLONG_FILTERED]
        if chosen and all(reason.trains for reason in blamed):
            masked = False
        self._rows.append(tuple(blamed) if masked else ())
        masked_rows = [row for row in self._rows if row]
        if len(self._rows) < self._size or len(masked_rows) <= self.max_fraction * len(self._rows):
            return
        counts = Counter(reason for row in masked_rows for reason in set(row)).most_common()
        story = "; ".join(
            f"{counted(count, 'row')} {reason.value} ({reason.advice})" for reason, count in counts
        )
        raise MaskedFractionError(
            f"{len(masked_rows)} of the last {len(self._rows)} rows are masked, more than "
            f"grpo.media_alignment.max_masked_fraction={self.max_fraction}: {story}"
        )


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """The first occurrence of a reason: its story, and the turn's report where there is one."""

    reason: Reason
    story: str
    report: TurnReport | None = None


class AlignmentMetrics:
    """Counts verdicts, reasons, bytes and log-prob gaps of one step, and logs the first occurrence of each reason."""

    def __init__(
        self,
        *,
        on_ambiguous: str = "mask",
        on_unalignable: str = "mask",
        reported: Collection[str] = (),
    ) -> None:
        """`reported` names reasons whose first occurrence an earlier part of this run has reported."""
        self._reported = frozenset(reported)
        self._raise_on = {
            verdict
            for verdict, action in ((Verdict.AMBIGUOUS, on_ambiguous), (Verdict.UNALIGNABLE, on_unalignable))
            if action == "raise"
        }
        self.first_occurrences: dict[Reason, Occurrence] = {}
        self._pending: list[Occurrence] = []
        self._turns = TurnSamples()
        self.turn_samples: list[TurnSample] = []
        """A bounded choice of the turns of the step that was flushed last, for a run's `turns.jsonl`."""
        self._reset()

    def _reset(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._reasons: Counter[Reason] = Counter()
        self._gaps: dict[str, list[tuple[float, float, int]]] = {"matched": [], "repaired": [], "video": []}
        # Equal repairs share their tensor objects, which travel once; kept until the flush.
        self._shipped: set[tuple[torch.Tensor, ...]] = set()

    def add_row(
        self,
        turns: Iterable[AlignedTurn],
        *,
        masked: bool = False,
        extra_reasons: Mapping[Reason, str] | None = None,
        row_id: str = "",
    ) -> bool:
        """Count the aligned turns of one row; returns whether the row must be masked.

        `masked` says that the row is masked for a reason outside its turns, which `extra_reasons` gives; they are
        reported under `row_id`.

        Raises:
            MediaAlignmentError: for a verdict that the configuration wants raised.
        """
        for aligned in turns:
            report = aligned.report
            masked |= report.neutral
            self._turns.add(aligned)
            self._sums["turns"] += 1
            for item in report.media:
                self._sums[f"media_{item.verdict.value}"] += 1
                self._sums[f"{item.kind}_{item.verdict.value}"] += 1
            self._sums["token_delta"] += abs(report.token_delta)
            self._sums["repair_ms"] += report.repair_ms
            if aligned.tensors is not None and aligned.changed and _key(aligned.tensors) not in self._shipped:
                self._shipped.add(_key(aligned.tensors))
                self._sums["bytes_shipped"] += aligned.tensors.num_bytes
            for reason in report.reasons():
                self._note(Occurrence(reason=reason, story=str(report), report=report))
            self._raise_if_asked(report)
        for reason, text in (extra_reasons or {}).items():
            report = TurnReport(
                row_id=row_id,
                turn=0,
                media=(),
                expected=(),
                found=(),
                neutral=not reason.trains,
                reason=reason,
                detail=text,
            )
            self._turns.add(AlignedTurn(tensors=None, report=report, changed=False))
            self._note(
                Occurrence(reason=reason, story=f"{text}. {reason.value}: {reason.advice}", report=report)
            )
        self._sums["rows"] += 1
        self._sums["rows_masked"] += masked
        return masked

    def _note(self, occurrence: Occurrence) -> None:
        self._reasons[occurrence.reason] += 1
        if occurrence.reason not in self.first_occurrences:
            self.first_occurrences[occurrence.reason] = occurrence
            if occurrence.reason.value in self._reported:
                return
            self._pending.append(occurrence)
            logger.warning("first %s: %s", occurrence.reason.value, occurrence.story)

    def new_occurrences(self) -> list[Occurrence]:
        """First occurrences since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def _raise_if_asked(self, report: TurnReport) -> None:
        if report.verdicts() & self._raise_on:
            raise MediaAlignmentError(str(report))

    def add_gap(
        self, *, repaired: bool, mean: float, maximum: float, num_tokens: int, video: bool = False
    ) -> None:
        """Count the engine-against-trainer log-prob gap of one row's sampled tokens, in nats.

        A row with a `video` counts once more on its own: wrong frames would drown among the images.
        """
        if not num_tokens:
            return
        for kind in ("repaired" if repaired else "matched", *(("video",) if video else ())):
            self._gaps[kind].append((mean, maximum, num_tokens))

    def add_gap_candidates(self, num_tokens: int) -> None:
        """Count sampled tokens whose gap was to be measured, whether it then could be or not."""
        self._sums["gap_candidates"] += num_tokens

    def flush(self) -> dict[str, float]:
        """The step's metrics under `alignment/`; counting starts again from zero."""
        names = (
            "turns",
            "media_matched",
            "media_repaired",
            "media_ambiguous",
            "media_unalignable",
            "rows",
            "rows_masked",
            "token_delta",
            "repair_ms",
            "bytes_shipped",
            *(f"{kind}_{verdict.value}" for kind in get_args(MediaKind) for verdict in Verdict),
        )
        out = {f"alignment/{name}": float(self._sums[name]) for name in names}
        for kind, gaps in self._gaps.items():
            tokens = sum(count for *_, count in gaps)
            if tokens:
                out[f"alignment/logprob_gap_{kind}_mean"] = (
                    sum(mean * count for mean, _, count in gaps) / tokens
                )
                out[f"alignment/logprob_gap_{kind}_max"] = max(maximum for _, maximum, _ in gaps)
        if wanted := self._sums["gap_candidates"]:
            measured = sum(count for kind in ("matched", "repaired") for *_, count in self._gaps[kind])
            out["alignment/logprob_gap_share"] = measured / wanted
        out |= {f"alignment/reason/{reason.value}": float(count) for reason, count in self._reasons.items()}
        self.turn_samples = self._turns.take()
        self._reset()
        return out


def _key(tensors: MediaTensors) -> tuple[torch.Tensor, ...]:
    """Equal for the same tensor objects alone."""
    return tuple(tensors.values.values())
