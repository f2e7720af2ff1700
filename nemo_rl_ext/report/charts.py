# SPDX-License-Identifier: Apache-2.0
"""The charts of a report as Bokeh figures; what depends on the page's theme is left to the page's own script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.models import BasicTickFormatter, ColumnDataSource, DataRange1d, HoverTool
from bokeh.models.annotations.legends import Legend
from bokeh.plotting import figure

from nemo_rl_ext.report.run_files import Record, RunFiles
from nemo_rl_ext.report.summary import VERDICTS

MAX_POINTS = 4000
"""Points of the scatter of media; more say nothing more and make the page slow."""

# Bokeh takes no CSS variables: page.js puts those of the page in the place of these three colours.
TEXT, LINE, CARD = "#010203", "#010204", "#010205"
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
"""Colours that are distinct on a light and on a dark page."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure: `note` says in a sentence what to see in it."""

    name: str
    title: str
    note: str
    figure: figure


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric as a line over steps."""

    key: str
    label: str
    color: str
    scale: float = 1.0
    dash: str = "solid"
    run: int = 0
    """Which of the runs it belongs to."""


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
    return [chart for chart in made if chart is not None]


def compared(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Chart]:
    """Reward, gap, repairs and cost of several runs, one curve each, the later ones dashed."""
    wanted = (
        ("reward", "Reward", "train/reward_mean", "reward", 1.0, False),
        ("accuracy", "Held-out accuracy", "eval/accuracy", "accuracy", 1.0, False),
        ("gap", "Log-prob gap, repaired", "alignment/logprob_gap_repaired_mean", "nats", 1.0, True),
        ("repairs", "Media repaired", "alignment/media_repaired", "media items per step", 1.0, False),
        ("masked", "Rollouts masked", "alignment/rows_masked", "rollouts per step", 1.0, False),
        ("step", "Time of a step", "timing/step_s", "seconds", 1.0, False),
        ("aligners", "Time of the aligners", "alignment/repair_ms", "seconds per step", 1e-3, False),
    )
    made = [
        _over_steps(
            [run.steps for run in runs],
            name=name,
            title=title,
            note="",
            unit=unit,
            log=log,
            curves=[
                Curve(key=key, label=label, color=color, dash=dash, scale=scale, run=index)
                for index, (label, color, dash) in enumerate(
                    zip(names, ("reward", "repaired"), ("solid", "dashed"), strict=True)
                )
            ],
        )
        for name, title, key, unit, scale, log in wanted
    ]
    return [chart for chart in made if chart is not None]


def _plot(unit: str, *, x: str = "step", from_zero: bool = False, **options: Any) -> figure:
    if from_zero:
        options["y_range"] = DataRange1d(start=0)
    made = figure(
        height=300,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        x_axis_label=x,
        y_axis_label=unit,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        **options,
    )
    for axis in made.axis:
        axis.axis_label_text_color = axis.major_label_text_color = TEXT
        axis.axis_label_text_font_style = "normal"
        axis.axis_line_color = axis.major_tick_line_color = LINE
        axis.minor_tick_line_color = None
    made.grid.grid_line_color = LINE
    legend = Legend(
        orientation="horizontal",
        background_fill_alpha=0,
        border_line_color=None,
        label_text_color=TEXT,
        location="left",
        ncols=2,
    )
    made.add_layout(legend, "above")
    return made


def _points(steps: Sequence[Record], curve: Curve, *, log: bool) -> tuple[list[int], list[float]]:
    found = [(step["step"], curve.scale * step[curve.key]) for step in steps if curve.key in step]
    # A logarithm has no place for zero, nor has any axis for NaN.
    kept = [(x, y) for x, y in found if y == y and abs(y) != float("inf") and (y > 0 or not log)]
    return [x for x, _ in kept], [y for _, y in kept]


def _over_steps(
    runs: Sequence[Sequence[Record]],
    *,
    name: str,
    title: str,
    note: str,
    unit: str,
    curves: Sequence[Curve],
    log: bool = False,
    plot: figure | None = None,
) -> Chart | None:
    """Lines over steps, each with its values on hovering; None where no run has any of them."""
    drawn = [(curve, *_points(runs[curve.run], curve, log=log)) for curve in curves]
    drawn = [(curve, x, y) for curve, x, y in drawn if x]
    if not drawn and plot is None:
        return None
    from_zero = not log and all(min(y) >= 0 for _, _, y in drawn)
    made = plot or _plot(unit, y_axis_type="log" if log else "linear", from_zero=from_zero)
    for curve, x, y in drawn:
        source = ColumnDataSource({"x": x, "y": y})
        style: dict[str, Any] = {"color": COLORS[curve.color], "source": source}
        line = made.line("x", "y", line_width=2, line_dash=curve.dash, legend_label=curve.label, **style)
        if len(x) < 40:
            made.scatter("x", "y", size=5, **style)
        tooltip = f"step @x: {curve.label} @y{{0,0.[0000]}}"
        made.add_tools(HoverTool(renderers=[line], tooltips=tooltip, mode="vline"))
    return Chart(name=name, title=title, note=note, figure=made)


def _rewards(steps: Sequence[Record]) -> Chart | None:
    return _over_steps(
        [steps],
        name="rewards",
        title="Reward",
        note="Mean reward of the sampled answers, and accuracy on held-out rows. Masked rows do not count.",
        unit="reward",
        curves=[
            Curve(key="train/reward_mean", label="reward", color="reward"),
            Curve(key="eval/accuracy", label="held-out accuracy", color="accuracy"),
        ],
    )


def _verdicts(steps: Sequence[Record]) -> Chart | None:
    present = [name for name in VERDICTS if any(step.get(f"alignment/media_{name}") for step in steps)]
    if not present:
        return None
    plot = _plot("media items", from_zero=True)
    columns = {name: [step.get(f"alignment/media_{name}", 0.0) for step in steps] for name in present}
    source = ColumnDataSource({"x": [step["step"] for step in steps], **columns})
    bars = plot.vbar_stack(
        present,
        x="x",
        width=0.9,
        source=source,
        color=[COLORS[name] for name in present],
        line_color=None,
        legend_label=present,
    )
    for bar in bars:
        plot.add_tools(HoverTool(renderers=[bar], tooltips="step @x: $name @$name{0,0}"))
    return _over_steps(
        [steps],
        name="verdicts",
        title="Verdicts",
        note="Every image and video of every rollout, by what alignment concluded. Blue ones would have been trained "
        "on other pixels, or would have ended the run.",
        unit="media items",
        plot=plot,
        curves=[Curve(key="alignment/rows_masked", label="rows masked", color="masked", dash="dotted")],
    )


def _gaps(steps: Sequence[Record]) -> Chart | None:
    return _over_steps(
        [steps],
        name="gaps",
        title="Log-prob gap",
        note="How far the engine's log-probs are from the trainer's on the same weights. Repaired turns should lie "
        "where matched ones do: then the trainer sees what the engine saw.",
        unit="nats",
        log=True,
        curves=[
            Curve(
                key=f"alignment/logprob_gap_{kind}_{statistic}",
                label=f"{kind}, {statistic}",
                color=kind,
                dash="solid" if statistic == "mean" else "dotted",
            )
            for kind in ("matched", "repaired")
            for statistic in ("mean", "max")
        ],
    )


def _reasons(steps: Sequence[Record]) -> Chart | None:
    names = sorted({name for step in steps for name in step if name.startswith("alignment/reason/")})
    totals = {
        name.removeprefix("alignment/reason/"): sum(step.get(name, 0) for step in steps) for name in names
    }
    if not totals:
        return None
    ordered = sorted(totals, key=lambda name: totals[name])
    plot = _plot("", x="count", y_range=ordered, x_range=DataRange1d(start=0))
    source = ColumnDataSource({"y": ordered, "x": [totals[name] for name in ordered]})
    bars = plot.hbar(y="y", right="x", height=0.7, source=source, color=COLORS["repaired"])
    plot.add_tools(HoverTool(renderers=[bars], tooltips="@y: @x{0,0}"))
    return Chart(
        name="reasons",
        title="Repairs and masks by reason",
        note="How often each reason came up over the whole run, per media item or per row.",
        figure=plot,
    )


def _token_delta(steps: Sequence[Record]) -> Chart | None:
    return _over_steps(
        [steps],
        name="delta",
        title="Tokens apart",
        note="Context tokens that the training processor's own sizes would have had too many or too few in a step. "
        "Zero means that the forward's count check would have passed without any repair.",
        unit="tokens per step",
        curves=[Curve(key="alignment/token_delta", label="tokens apart", color="repaired")],
    )


def _sizes(turns: Iterable[Record]) -> Chart | None:
    seen: dict[tuple[tuple[int, ...], ...], object] = {}
    for turn in turns:
        for item in turn.get("media") or ():
            if item.get("grid") and item.get("static_grid"):
                key = (tuple(item["size"]), tuple(item["grid"]), tuple(item["static_grid"]))
                seen.setdefault(key, turn.get("row_id"))
    points = list(seen.items())[:MAX_POINTS]
    if not points:
        return None
    plot = _plot("patches", x="megapixels", x_axis_type="log", from_zero=True)
    plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    for name, color, which, filled in (
        ("training processor", "static", 2, False),
        ("engine", "repaired", 1, True),
    ):
        source = ColumnDataSource(
            {
                "x": [key[0][0] * key[0][1] / 1e6 for key, _ in points],
                "y": [key[which][0] * key[which][1] for key, _ in points],
                "text": [
                    f"{row}: {size[1]} x {size[0]} px, training {static[0]}x{static[1]}, engine {grid[0]}x{grid[1]}"
                    for (size, grid, static), row in points
                ],
            }
        )
        dots = plot.scatter(
            "x",
            "y",
            source=source,
            size=8,
            line_color=COLORS[color],
            line_width=1.5,
            fill_color=COLORS[color] if filled else None,
            legend_label=name,
        )
        plot.add_tools(HoverTool(renderers=[dots], tooltips=[("", "@text"), ("patches", "@y")]))
    return Chart(
        name="sizes",
        title="Media sizes against patch grids",
        note="Each medium's size in pixels and how many patches it was cut into: grey rings by the training "
        "processor on its own, blue dots by the engine. Where the two part, the tensors were made again.",
        figure=plot,
    )


def _time(steps: Sequence[Record]) -> Chart | None:
    return _over_steps(
        [steps],
        name="time",
        title="Time",
        note="Seconds per step, and how long the aligners worked for it. They work beside the step, in processes of "
        "their own.",
        unit="seconds",
        curves=[
            Curve(key="timing/step_s", label="step", color="time"),
            Curve(key="timing/wait_for_rollouts_s", label="of which waiting for rollouts", color="reward"),
            Curve(key="alignment/repair_ms", label="repairs (aligners)", color="repaired", scale=1e-3),
        ],
    )
