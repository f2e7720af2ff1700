# SPDX-License-Identifier: Apache-2.0
"""What a run writes and shows: metrics as JSONL and TensorBoard, one alignment line per step on screen."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_rl_ext.align.verdict import MediaReport, Reason, Verdict
from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.rollout.metrics import Occurrence
from nemo_rl_ext.rollout.step_log import METRICS_FILE, StepLog
from nemo_rl_ext.rollout.turn_samples import TurnSample

OCCURRENCES_FILE = "offences.jsonl"
TURNS_FILE = "turns.jsonl"
MAX_MEDIA, MAX_RUNS = 8, 64
"""Media items and run lengths of one turn that are written out; what is left out is counted."""


class RunLog:
    """The files of one run directory. Every step is one flat JSON object, `step` first."""

    def __init__(
        self, run_dir: Path, *, resume_from: int | None, tensorboard: bool, console: Console | None = None
    ) -> None:
        self.run_dir = run_dir
        self.console = console or Console()
        self._durations: deque[float] = deque(maxlen=16)
        self._files = StepLog(
            run_dir,
            keep_until=resume_from,
            tensorboard=tensorboard,
            names=(METRICS_FILE, OCCURRENCES_FILE, TURNS_FILE),
        )

    def reported_reasons(self) -> set[str]:
        """Reasons whose first occurrence stands in the run's file: a resumed run does not report them again."""
        path = self.run_dir / OCCURRENCES_FILE
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return {str(json.loads(line)["reason"]) for line in lines}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's metrics."""
        self._files.metrics(step, metrics)

    def occurrence(self, step: int, occurrence: Occurrence) -> None:
        """Append the first occurrence of a reason in full, with what a report needs to show its media."""
        media = [] if occurrence.report is None else [_media_record(item) for item in occurrence.report.media]
        record = {"step": step, "reason": occurrence.reason.value, "story": occurrence.story, "media": media}
        if occurrence.report is not None:
            record |= {"row_id": occurrence.report.row_id, "turn": occurrence.report.turn}
        self._files.append(OCCURRENCES_FILE, record)

    def turns(self, step: int, samples: Iterable[TurnSample]) -> None:
        """Append a step's choice of turns: which rows were repaired or masked, why, and what it took."""
        self._files.append(TURNS_FILE, *(_turn_record(step, sample) for sample in samples))

    def show(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Two lines per step: the training, with the time left, and what alignment did for it."""
        get = metrics.get
        self._durations.append(get("timing/step_s", 0.0))
        left = (num_steps - step) * statistics.median(self._durations)
        self.console.print(
            f"[bold]step {step}/{num_steps}[/]  reward {get('train/reward_mean', 0):.3f}  "
            f"loss {get('train/loss', 0):+.4f}  "
            f"{get('timing/step_s', 0):.1f} s"
            + (f", {duration(left)} left" if step < num_steps else "")
            + (f"  [green]{accuracy_line(metrics)}[/]" if "eval/accuracy" in metrics else ""),
            highlight=False,
        )
        if get("alignment/rows"):
            self.console.print(f"  {alignment_line(metrics)}", style="dim", highlight=False)

    def close(self) -> None:
        """Write out what is still held."""
        self._files.close()


def _turn_record(step: int, sample: TurnSample) -> dict[str, Any]:
    report = sample.report
    return {
        "step": step,
        "row_id": report.row_id,
        "turn": report.turn,
        "rollouts": sample.rollouts,
        "neutral": report.neutral,
        "reasons": sorted({reason.value for reason in report.reasons()}),
        "detail": report.detail,
        "num_expected": sum(report.expected),
        "num_found": sum(report.found),
        "repair_ms": round(sample.repair_ms, 3),
        "num_bytes": sample.num_bytes,
        "num_media": len(report.media),
        "media": [_media_record(item) for item in report.media[:MAX_MEDIA]],
    }


def _media_record(item: MediaReport) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "source": item.source,
        "size": list(item.size),
        "verdict": item.verdict.value,
        "expected": list(item.expected[:MAX_RUNS]),
        "found": list(item.found[:MAX_RUNS]),
        "static_grid": None if item.static_grid is None else list(item.static_grid),
        "grid": None if item.grid is None else list(item.grid),
        "grid_source": None if item.grid_source is None else item.grid_source.value,
        "content_proven": item.content_proven,
        "evidence": item.evidence,
        "reason": None if item.reason is None else item.reason.value,
        "num_frames": item.num_frames,
    }


def duration(seconds: float) -> str:
    """`40 s`, `5 min`, `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def accuracy_line(metrics: Mapping[str, float]) -> str:
    """Held-out accuracy, over all rows and by what they bring."""
    prefix = "eval/accuracy_"
    parts = [
        f"{key.removeprefix(prefix)} {value:.3f}" for key, value in metrics.items() if key.startswith(prefix)
    ]
    return f"held-out accuracy {metrics['eval/accuracy']:.3f}" + (f" ({', '.join(parts)})" if parts else "")


def _verdicts(kind: str, metrics: Mapping[str, float]) -> str:
    """How many media of a kind came out how; empty where there were none."""
    counts = {verdict.value: metrics.get(f"alignment/{kind}_{verdict.value}", 0.0) for verdict in Verdict}
    return ", ".join(f"{count:.0f} {verdict}" for verdict, count in counts.items() if count)


def alignment_line(metrics: Mapping[str, float]) -> str:
    """What alignment did in one step, in one line."""

    def get(name: str) -> float:
        return metrics.get(f"alignment/{name}", 0.0)

    def reasons(wanted: Callable[[Reason], bool]) -> str:
        found = [
            reason
            for reason in sorted(Reason, key=lambda reason: reason.value)
            if wanted(reason) and get(f"reason/{reason.value}")
        ]
        return ", ".join(f"{reason.value} {get(f'reason/{reason.value}'):.0f}" for reason in found)

    masked = f"{get('rows_masked'):.0f} of {counted(round(get('rows')), 'row')} masked"
    if why := reasons(lambda reason: not reason.trains):
        masked += f" ({why})"
    if why := reasons(lambda reason: reason.trains and reason is not Reason.CONTEXT_OUTGROWN):
        masked += f"; made again and trained: {why}"
    if why := reasons(lambda reason: reason is Reason.CONTEXT_OUTGROWN):
        masked += f"; ended early: {why}"
    kinds = [f"{kind}s {_verdicts(kind, metrics)}" for kind in ("image", "video") if _verdicts(kind, metrics)]
    gaps = [
        f"{kind} {metrics[f'alignment/logprob_gap_{kind}_mean']:.4f}/{metrics[f'alignment/logprob_gap_{kind}_max']:.4f}"
        for kind in ("matched", "repaired", "video")
        if f"alignment/logprob_gap_{kind}_mean" in metrics
    ]
    return (
        f"media of {counted(round(get('turns')), 'turn')}: {_verdicts('media', metrics) or 'none'}"
        f"{' (' + '; '.join(kinds) + ')' if kinds else ''}; {masked}; {get('token_delta'):.0f} tokens apart; "
        f"{get('repair_ms'):.0f} ms, {get('bytes_shipped') / 2**20:.1f} MiB; log-prob gap {', '.join(gaps) or '-'}"
    )
