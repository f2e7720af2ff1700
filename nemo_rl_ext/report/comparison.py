# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: reward, log-prob gap, repairs, cost, and the settings in which they differ."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_ext.report.html import render, write_whole
from nemo_rl_ext.report.run_files import Record, RunFiles, read_run
from nemo_rl_ext.report.summary import Summary, summarize


def write_comparison(run_dir: str | Path, other: str | Path, output: Path | None = None) -> Path:
    """Write the page of two runs, whole or not at all; returns its path.

    Raises:
        ValueError: when one of them is no run directory, or the page cannot be written.
    """
    runs = (read_run(run_dir), read_run(other))
    target = output or runs[0].run_dir / f"compare-{runs[1].run_dir.name}.html"
    return write_whole(Path(target), page(runs))


def page(runs: Sequence[RunFiles]) -> str:
    """The page as text."""
    names = _names(runs)

    def make_charts() -> Any:
        from nemo_rl_ext.report.charts import compared

        return compared(runs, names)

    written = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    summaries = [summarize(run) for run in runs]
    return render(
        "compare.html",
        make_charts=make_charts,
        title=f"{' and '.join(names)}: two runs",
        heading=" against ".join(names),
        about=f"written {written}",
        names=names,
        rows=[
            (label, [show(run, summary) for run, summary in zip(runs, summaries, strict=True)])
            for label, show in ROWS
        ],
        differences=list(_differences(runs)),
    )


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """The directories' names; with as many parents as it takes to tell them apart."""
    parts = [run.run_dir.parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{index}: {run.run_dir.name}" for index, run in enumerate(runs, start=1)]


def _gap(kind: str) -> Callable[[RunFiles, Summary], str]:
    def show(run: RunFiles, _: Summary) -> str:
        key = f"alignment/logprob_gap_{kind}_mean"
        values = [step[key] for step in run.steps if key in step and step[key] == step[key]]
        return f"{sum(values) / len(values):.4f}" if values else "-"

    return show


def _pair(first: float | None, last: float | None) -> str:
    return "-" if first is None or last is None else f"{first:.3f} → {last:.3f}"


ROWS: tuple[tuple[str, Callable[[RunFiles, Summary], str]], ...] = (
    ("state", lambda run, _: str(run.record.get("state", "-"))),
    ("steps", lambda _, s: f"{s.num_steps:,}"),
    ("reward, first and last tenth", lambda _, s: _pair(s.reward_first, s.reward_last)),
    ("held-out accuracy, first and last", lambda _, s: _pair(s.accuracy_first, s.accuracy_last)),
    ("log-prob gap, matched (mean)", _gap("matched")),
    ("log-prob gap, repaired (mean)", _gap("repaired")),
    ("media matched", lambda _, s: f"{s.media['matched']:,}"),
    ("media repaired", lambda _, s: f"{s.media['repaired']:,}"),
    ("rollouts masked", lambda _, s: f"{s.rows_masked:,} of {s.rows:,}"),
    ("tokens the static sizes were off by", lambda _, s: f"{s.token_delta:,}"),
    ("training time", lambda _, s: f"{s.step_s:,.0f} s"),
    ("time of a step (mean)", lambda _, s: f"{s.step_s / s.num_steps:.2f} s" if s.num_steps else "-"),
    ("time of the aligners", lambda _, s: f"{s.repair_ms / 1e3:,.1f} s ({s.repair_share:.1%})"),
)


def _differences(runs: Sequence[RunFiles]) -> Iterator[tuple[str, list[str]]]:
    flat = [dict(_flatten(run.config)) for run in runs]
    for key in sorted(set().union(*flat)):
        values = [settings.get(key, "-") for settings in flat]
        if len({repr(value) for value in values}) > 1:
            yield key, [str(value) for value in values]


def _flatten(block: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
