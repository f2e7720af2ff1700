# SPDX-License-Identifier: Apache-2.0
"""The report of a run: what alignment did, to which rows and why, and what ended the run."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_ext.report.html import render, write_whole
from nemo_rl_ext.report.run_files import Record, RunFiles, read_run
from nemo_rl_ext.report.summary import Summary, row_stories, summarize
from nemo_rl_ext.report.thumbnails import ThumbnailMaker
from nemo_rl_ext.report.wording import REFUSED, REPAIRS

REPORT_FILE = "report.html"
FIRST_ROWS, MAX_ROWS, MAX_SLOWEST, MAX_OCCURRENCES, MAX_THUMBNAILS = 8, 300, 10, 40, 6


def write_report(run_dir: str | Path, output: Path | None = None) -> Path:
    """Write the report of a finished, failed or running run, whole or not at all; returns its path.

    Raises:
        ValueError: when `run_dir` is no run directory, its metrics are garbage, or the page cannot be written.
    """
    run = read_run(run_dir)
    target = Path(output) if output is not None else run.run_dir / REPORT_FILE
    return write_whole(target, page(run))


def page(run: RunFiles) -> str:
    """The page as text."""

    def make_charts() -> Any:
        from nemo_rl_ext.report.charts import charts

        return charts(run)

    summary = summarize(run)
    stories = row_stories(run.turns)
    model = run.setting("policy.model_name", "")
    written = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return render(
        "report.html",
        make_charts=make_charts,
        title=f"{run.run_dir.name}: run report",
        heading=run.run_dir.name,
        about=f"{summary.num_steps} steps" + (f", model {model}" if model else "") + f", written {written}",
        failure=_failure(run.record),
        lead=_lead(summary),
        tiles=_tiles(summary),
        has_turns=bool(stories),
        changed=[story for story in stories if story.outcome != "matched"],
        first_rows=FIRST_ROWS,
        max_rows=MAX_ROWS,
        occurrences=_occurrences(run),
        slowest=_slowest(run.turns),
        versions=run.record.get("versions") or {},
        config=yaml.safe_dump(run.config, sort_keys=False) if run.config else "",
    )


def _failure(record: Record) -> dict[str, str] | None:
    """What ended a run that did not finish."""
    state, step, error = record.get("state"), record.get("step", 0), record.get("error") or {}
    if state == "failed":
        return {
            "headline": f"The run failed after step {step}: {error.get('type', 'unknown error')}",
            "message": str(error.get("message", "")),
            "traceback": str(error.get("traceback", "")),
        }
    if state == "interrupted":
        return {"headline": f"The run was interrupted at step {step}; continue it with --resume"}
    return None


def _tiles(summary: Summary) -> list[tuple[str, str]]:
    tiles = [
        (f"{summary.media['matched']:,}", "media matched"),
        (f"{summary.media['repaired']:,}", "media repaired"),
        (f"{summary.rows_masked:,} of {summary.rows:,}", "rollouts masked"),
        (f"{summary.token_delta:,}", "tokens the static sizes were off by"),
    ]
    if summary.reward_first is not None and summary.reward_last is not None:
        tiles.append(
            (f"{summary.reward_first:.2f} → {summary.reward_last:.2f}", "reward, first and last tenth")
        )
    if summary.accuracy_first is not None and summary.accuracy_last is not None:
        tiles.append((f"{summary.accuracy_first:.2f} → {summary.accuracy_last:.2f}", "held-out accuracy"))
    return tiles


def _lead(summary: Summary) -> list[str]:
    """What happened, in the sentences that a newcomer needs first."""
    if not summary.num_steps:
        return ["The run wrote no training step yet."]
    if not summary.num_media:
        return ["No media were aligned in this run: alignment was off, or its rows carry none."]
    repaired = summary.media["repaired"]
    sentences = [
        f"Of {summary.num_media:,} images and videos that the policy saw while it generated, "
        f"{repaired:,} ({repaired / summary.num_media:.0%}) were of another size than the training side would have "
        f"made them, in {summary.steps_with_repairs} of {summary.num_steps} steps."
    ]
    if repaired:
        sentences.append("Their tensors were made again on the engine's own grid.")
    refused = min(summary.reasons.get(REFUSED, 0), summary.rows_masked)
    unproven = summary.rows_masked - refused
    if refused:
        sentences.append(
            f"{refused:,} of {summary.rows:,} rollouts were refused by the engine: nothing was sampled for them, and "
            "they were kept with zero loss."
        )
    if unproven:
        masking = ", ".join(
            f"{name} {count:,}"
            for name, count in summary.reasons.items()
            if name not in REPAIRS and name != REFUSED
        )
        sentences.append(
            f"{unproven:,} of {summary.rows:,} rollouts could not be proven and were kept with zero loss"
            + (f" ({masking})." if masking else ".")
        )
    if not summary.rows_masked:
        sentences.append(f"All {summary.rows:,} rollouts were trained on; none had to be masked.")
    sentences.append(
        f"The aligners worked {summary.repair_ms / 1e3:.1f} s for {summary.step_s:,.0f} s of training "
        f"({summary.repair_share:.1%})."
    )
    return sentences


def _occurrences(run: RunFiles) -> list[dict[str, Any]]:
    """The first time that each reason came up, with pictures of its media."""
    records = run.occurrences[:MAX_OCCURRENCES]
    maker = ThumbnailMaker(run, {str(record["row_id"]) for record in records if "row_id" in record})
    entries = []
    for record in records:
        media = record.get("media") or []
        shown = [(item, maker.make(str(record.get("row_id", "")), item)) for item in media[:MAX_THUMBNAILS]]
        entries.append(
            {
                "reason": str(record.get("reason")),
                "record": record,
                "media": shown,
                "more": max(0, len(media) - MAX_THUMBNAILS),
            }
        )
    return entries


def _slowest(turns: Iterable[Record]) -> list[Record]:
    timed = sorted(turns, key=lambda turn: -float(turn.get("repair_ms") or 0))[:MAX_SLOWEST]
    return [turn for turn in timed if turn.get("repair_ms")]
