# SPDX-License-Identifier: Apache-2.0
"""What alignment did, as a flat dict of floats per step, and the log lines that tell a first offence in full."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.align.verdict import MediaAlignmentError, Reason, TurnReport, Verdict
from nemo_rl_ext.rollout.errors import MaskedFractionError

logger = logging.getLogger(__name__)


class MaskedWindow:
    """Stops a run whose rows are masked by the dozen: that is a configuration error, not noise.

    Judged over the last `size` rows once that many were seen.
    """

    def __init__(self, *, size: int, max_fraction: float) -> None:
        self.max_fraction = max_fraction
        self._rows: deque[tuple[Reason, ...]] = deque(maxlen=size)

    def add(self, reasons: Sequence[Reason], *, masked: bool) -> None:
        """Count one row. Raises `MaskedFractionError` with a diagnosis when the share passes the limit."""
        self._rows.append(tuple(reasons) if masked else ())
        masked_rows = [row for row in self._rows if row]
        if len(self._rows) < self._rows.maxlen or len(masked_rows) <= self.max_fraction * len(self._rows):
            return
        counts = Counter(reason for row in masked_rows for reason in set(row)).most_common()
        story = "; ".join(f"{count} rows {reason.value} ({reason.advice})" for reason, count in counts)
        raise MaskedFractionError(
            f"{len(masked_rows)} of the last {len(self._rows)} rows are masked, more than "
            f"grpo.media_alignment.max_masked_fraction={self.max_fraction}: {story}"
        )


class AlignmentMetrics:
    """Counts verdicts, reasons, bytes and log-prob gaps of one step, and logs the first offence of each reason."""

    def __init__(self, *, on_ambiguous: str = "mask", on_unalignable: str = "mask") -> None:
        self._raise_on = {
            verdict
            for verdict, action in ((Verdict.AMBIGUOUS, on_ambiguous), (Verdict.UNALIGNABLE, on_unalignable))
            if action == "raise"
        }
        self.first_offences: dict[Reason, str] = {}
        self._reset()

    def _reset(self) -> None:
        self._sums: Counter[str] = Counter()
        self._reasons: Counter[Reason] = Counter()
        self._gaps: dict[str, list[tuple[float, float, int]]] = {"matched": [], "repaired": []}
        self._shipped: set[int] = set()
        self._keep: list[object] = []

    def add_row(self, turns: Iterable[AlignedTurn], *, extra_reasons: Mapping[Reason, str] | None = None) -> bool:
        """Count the aligned turns of one row; returns whether the row must be masked.

        Raises:
            MediaAlignmentError: for a verdict that the configuration wants raised.
        """
        masked = False
        for aligned in turns:
            report = aligned.report
            masked |= report.neutral
            self._sums["turns"] += 1
            for item in report.media:
                self._sums[f"media_{item.verdict.value}"] += 1
            self._sums["token_delta"] += abs(report.token_delta)
            self._sums["repair_ms"] += report.repair_ms
            if aligned.tensors is not None and aligned.changed and id(aligned.tensors) not in self._shipped:
                self._shipped.add(id(aligned.tensors))
                self._keep.append(aligned.tensors)
                self._sums["bytes_shipped"] += aligned.tensors.num_bytes
            for reason in report.reasons():
                self._note(reason, str(report))
            self._raise_if_asked(report)
        for reason, text in (extra_reasons or {}).items():
            self._note(reason, text)
        self._sums["rows"] += 1
        self._sums["rows_masked"] += masked
        return masked

    def _note(self, reason: Reason, story: str) -> None:
        self._reasons[reason] += 1
        if reason not in self.first_offences:
            self.first_offences[reason] = story
            logger.warning("first %s: %s", reason.value, story)

    def _raise_if_asked(self, report: TurnReport) -> None:
        verdicts = {item.verdict for item in report.media}
        if report.neutral and not verdicts & {Verdict.AMBIGUOUS, Verdict.UNALIGNABLE}:
            verdicts.add(Verdict.UNALIGNABLE)
        if verdicts & self._raise_on:
            raise MediaAlignmentError(str(report))

    def add_gap(self, *, repaired: bool, mean: float, maximum: float, num_tokens: int) -> None:
        """Count the engine-against-trainer log-prob gap of one row's sampled tokens, in nats."""
        if num_tokens:
            self._gaps["repaired" if repaired else "matched"].append((mean, maximum, num_tokens))

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
        )
        out = {f"alignment/{name}": float(self._sums[name]) for name in names}
        for kind, gaps in self._gaps.items():
            tokens = sum(count for *_, count in gaps)
            if tokens:
                out[f"alignment/logprob_gap_{kind}_mean"] = sum(mean * count for mean, _, count in gaps) / tokens
                out[f"alignment/logprob_gap_{kind}_max"] = max(maximum for _, maximum, _ in gaps)
        out |= {f"alignment/reason/{reason.value}": float(count) for reason, count in self._reasons.items()}
        self._reset()
        return out
