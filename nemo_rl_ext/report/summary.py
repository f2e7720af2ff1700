# SPDX-License-Identifier: Apache-2.0
"""A run in a few numbers and sentences, and its rows by what happened to them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_ext.report.run_files import Record, RunFiles
from nemo_rl_ext.report.wording import REFUSED

VERDICTS = ("matched", "repaired", "ambiguous", "unalignable")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Sums over all steps of a run, counted in media items, rows (rollouts) and context tokens."""

    num_steps: int
    media: dict[str, int]
    rows: int
    rows_masked: int
    token_delta: int
    reasons: dict[str, int]
    repair_ms: float
    step_s: float
    reward_first: float | None
    reward_last: float | None
    accuracy_first: float | None
    accuracy_last: float | None
    steps_with_repairs: int

    @property
    def num_media(self) -> int:
        return sum(self.media.values())

    @property
    def repair_share(self) -> float:
        """Aligner time against step time; aligners work beside the step, so this is an upper bound of its cost."""
        return self.repair_ms / 1e3 / self.step_s if self.step_s else 0.0


def summarize(run: RunFiles) -> Summary:
    """Add up a run's steps."""
    steps = [step for step in run.steps if "train/reward_mean" in step]
    accuracies = [step["eval/accuracy"] for step in run.steps if "eval/accuracy" in step]

    def total(name: str) -> float:
        return float(sum(value for step in steps if math.isfinite(value := step.get(name, 0.0))))

    reasons: Counter[str] = Counter()
    for step in steps:
        for name, value in step.items():
            if name.startswith("alignment/reason/") and math.isfinite(value):
                reasons[name.removeprefix("alignment/reason/")] += int(value)
    tenth = max(1, len(steps) // 10)
    return Summary(
        num_steps=len(steps),
        media={verdict: int(total(f"alignment/media_{verdict}")) for verdict in VERDICTS},
        rows=int(total("alignment/rows")),
        rows_masked=int(total("alignment/rows_masked")),
        token_delta=int(total("alignment/token_delta")),
        reasons=dict(reasons.most_common()),
        repair_ms=total("alignment/repair_ms"),
        step_s=total("timing/step_s"),
        reward_first=_mean(step["train/reward_mean"] for step in steps[:tenth]),
        reward_last=_mean(step["train/reward_mean"] for step in steps[-tenth:]),
        accuracy_first=accuracies[0] if accuracies else None,
        accuracy_last=accuracies[-1] if accuracies else None,
        steps_with_repairs=sum(step.get("alignment/media_repaired", 0) > 0 for step in steps),
    )


def _mean(values: Iterable[float]) -> float | None:
    values = [value for value in values if math.isfinite(value)]
    return sum(values) / len(values) if values else None


@dataclass(kw_only=True)
class RowStory:
    """One outcome of one turn of a row, over all steps that it was seen in."""

    row_id: str
    turn: int
    outcome: str
    reasons: tuple[str, ...]
    detail: str
    media: Sequence[Record]
    num_media: int
    num_expected: int
    num_found: int
    rollouts: int = 0
    steps: list[int] = field(default_factory=list)
    repair_ms: float = 0.0


def row_stories(turns: Iterable[Record]) -> list[RowStory]:
    """Turns by row and outcome: masked ones first, then repaired ones by how many rollouts they touched."""
    stories: dict[Any, RowStory] = {}
    for turn in turns:
        media = turn.get("media") or []
        grids = tuple((str(item.get("source")), str(item.get("grid"))) for item in media)
        key = (turn.get("row_id"), turn.get("turn"), tuple(turn.get("reasons") or ()), grids)
        story = stories.setdefault(
            key,
            RowStory(
                row_id=str(turn.get("row_id")),
                turn=int(turn.get("turn") or 0),
                outcome=outcome(turn),
                reasons=tuple(map(str, turn.get("reasons") or ())),
                detail=str(turn.get("detail") or ""),
                media=media,
                num_media=int(turn.get("num_media") or len(media)),
                num_expected=int(turn.get("num_expected") or 0),
                num_found=int(turn.get("num_found") or 0),
            ),
        )
        story.rollouts += int(turn.get("rollouts") or 1)
        story.steps.append(int(turn.get("step") or 0))
        story.repair_ms = max(story.repair_ms, float(turn.get("repair_ms") or 0.0))
    order = ("masked", "refused", "repaired", "matched")
    return sorted(
        stories.values(), key=lambda story: (order.index(story.outcome), -story.rollouts, story.row_id)
    )


def outcome(turn: Record) -> str:
    """`masked`, `refused` (by the engine), `repaired` or `matched`."""
    if turn.get("neutral"):
        return "refused" if list(turn.get("reasons") or ()) == [REFUSED] else "masked"
    verdicts = {item.get("verdict") for item in turn.get("media") or ()}
    return "repaired" if "repaired" in verdicts or turn.get("reasons") else "matched"
