# SPDX-License-Identifier: Apache-2.0
"""The charts of a report, as plain Plotly figures (traces and layout); colours and theme are the page's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_ext.report.run_files import Record, RunFiles
from nemo_rl_ext.report.summary import VERDICTS

Trace = dict[str, Any]
MAX_POINTS = 4000
"""Points of the scatter of media; more say nothing more and make the page slow."""

COLORS = {
    "matched": "#3b9a76",
    "repaired": "#3f7fd0",
    "ambiguous": "#b07ad0",
    "unalignable": "#d4553f",
    "masked": "#d4553f",
    "static": "#9a9a9a",
    "reward": "#e08a1e",
    "accuracy": "#3b9a76",
    "time": "#7f8ea3",
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure: `note` says in a sentence what to see in it."""

    name: str
    title: str
    note: str
    traces: Sequence[Trace]
    layout: dict[str, Any]


def charts(run: RunFiles) -> list[Chart]:
    """Every chart that this run has data for."""
    steps = [step for step in run.steps if "train/reward_mean" in step]
    made = [
        _rewards(run.steps),
        _verdicts(steps),
        _gaps(steps),
        _reasons(steps),
        _token_delta(steps),
        _sizes(run.turns),
        _time(steps),
    ]
    return [chart for chart in made if any(trace["x"] for trace in chart.traces)]


def _line(
    steps: Sequence[Record], key: str, name: str, color: str, scale: float = 1.0, **extra: Any
) -> Trace:
    points = [(step["step"], step[key] * scale) for step in steps if key in step]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) < 40 else "lines",
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": COLORS[color], **extra.pop("line", {})},
        **extra,
    }


def _rewards(steps: Sequence[Record]) -> Chart:
    return Chart(
        name="rewards",
        title="Reward",
        note="Mean reward of the sampled answers, and accuracy on held-out rows. Masked rows do not count.",
        traces=[
            _line(steps, "train/reward_mean", "reward", "reward"),
            {**_line(steps, "eval/accuracy", "held-out accuracy", "accuracy"), "mode": "lines+markers"},
        ],
        layout={"yaxis": {"title": {"text": "reward"}, "rangemode": "tozero"}},
    )


def _verdicts(steps: Sequence[Record]) -> Chart:
    traces = [
        {
            "type": "bar",
            "name": verdict,
            "x": [step["step"] for step in steps],
            "y": [step.get(f"alignment/media_{verdict}", 0.0) for step in steps],
            "marker": {"color": COLORS[verdict], "line": {"width": 0}},
        }
        for verdict in VERDICTS
        if any(step.get(f"alignment/media_{verdict}") for step in steps)
    ]
    traces.append({**_line(steps, "alignment/rows_masked", "rows masked", "masked", line={"dash": "dot"})})
    return Chart(
        name="verdicts",
        title="Verdicts",
        note="Every image and video of every rollout, by what alignment concluded. Blue ones would have been trained "
        "on other pixels, or would have ended the run.",
        traces=traces,
        layout={"barmode": "stack", "bargap": 0.05, "yaxis": {"title": {"text": "media items"}}},
    )


def _gaps(steps: Sequence[Record]) -> Chart:
    traces = [
        _line(
            steps,
            f"alignment/logprob_gap_{kind}_{statistic}",
            f"{kind}, {statistic}",
            kind,
            line={
                "dash": "solid" if statistic == "mean" else "dot",
                "width": 2 if statistic == "mean" else 1,
            },
        )
        for kind in ("matched", "repaired")
        for statistic in ("mean", "max")
    ]
    return Chart(
        name="gaps",
        title="Log-prob gap",
        note="How far the engine's log-probs are from the trainer's on the same weights. Repaired turns should lie "
        "where matched ones do: then the trainer sees what the engine saw.",
        traces=[trace for trace in traces if trace["x"]] or traces,
        layout={"yaxis": {"title": {"text": "nats"}, "type": "log", "exponentformat": "power"}},
    )


def _reasons(steps: Sequence[Record]) -> Chart:
    names = sorted({name for step in steps for name in step if name.startswith("alignment/reason/")})
    totals = {
        name.removeprefix("alignment/reason/"): sum(step.get(name, 0) for step in steps) for name in names
    }
    ordered = sorted(totals.items(), key=lambda pair: pair[1])
    return Chart(
        name="reasons",
        title="Repairs and masks by reason",
        note="How often each reason came up over the whole run, per media item or per row.",
        traces=[
            {
                "type": "bar",
                "orientation": "h",
                "name": "count",
                "x": [value for _, value in ordered],
                "y": [name for name, _ in ordered],
                "text": [f"{value:,.0f}" for _, value in ordered],
                "marker": {"color": COLORS["repaired"]},
            }
        ],
        layout={"showlegend": False, "yaxis": {"automargin": True}, "xaxis": {"title": {"text": "count"}}},
    )


def _token_delta(steps: Sequence[Record]) -> Chart:
    return Chart(
        name="delta",
        title="Tokens apart",
        note="Context tokens that the training processor's own sizes would have had too many or too few in a step. "
        "Zero means that the forward's count check would have passed without any repair.",
        traces=[_line(steps, "alignment/token_delta", "tokens apart", "repaired", fill="tozeroy")],
        layout={"showlegend": False, "yaxis": {"title": {"text": "tokens per step"}}},
    )


def _sizes(turns: Iterable[Record]) -> Chart:
    seen: dict[tuple[tuple[int, ...], ...], tuple[str | None, Record]] = {}
    for turn in turns:
        for item in turn.get("media") or ():
            if item.get("grid") and item.get("static_grid"):
                key = (tuple(item["size"]), tuple(item["grid"]), tuple(item["static_grid"]))
                seen.setdefault(key, (turn.get("row_id"), item))
    points = list(seen.items())[:MAX_POINTS]

    def trace(name: str, color: str, which: int, symbol: str) -> Trace:
        return {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [size[0] * size[1] / 1e6 for (size, *_), _ in points],
            "y": [key[which][0] * key[which][1] for key, _ in points],
            "text": [
                f"{row}: {size[1]} x {size[0]} px, training {static[0]}x{static[1]}, engine {grid[0]}x{grid[1]}"
                for (size, grid, static), (row, _) in points
            ],
            "hovertemplate": "%{text}<br>%{y} patches<extra></extra>",
            "marker": {"color": COLORS[color], "symbol": symbol, "size": 8, "line": {"width": 1.5}},
        }

    return Chart(
        name="sizes",
        title="Media sizes against patch grids",
        note="Each medium's size in pixels and how many patches it was cut into: grey rings by the training "
        "processor on its own, blue dots by the engine. Where the two part, the tensors were made again.",
        traces=[
            trace("training processor", "static", 2, "circle-open"),
            trace("engine", "repaired", 1, "circle"),
        ],
        layout={
            "xaxis": {"title": {"text": "megapixels"}, "type": "log"},
            "yaxis": {"title": {"text": "patches"}, "rangemode": "tozero"},
            "hovermode": "closest",
        },
    )


def _time(steps: Sequence[Record]) -> Chart:
    return Chart(
        name="time",
        title="Time",
        note="Seconds per step, and how long the aligners worked for it. They work beside the step, in processes of "
        "their own.",
        traces=[
            _line(steps, "timing/step_s", "step", "time"),
            _line(steps, "timing/wait_for_rollouts_s", "of which waiting for rollouts", "reward"),
            _line(steps, "alignment/repair_ms", "repairs (aligners)", "repaired", scale=1e-3),
        ],
        layout={"yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"}},
    )
