# SPDX-License-Identifier: Apache-2.0
"""What `check` prints for a reader: faults, warnings by kind, then what the engine will do."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.manifest.advice import Advice
from nemo_rl_ext.manifest.check import CheckReport
from nemo_rl_ext.manifest.check_rules import WARNING_KINDS
from nemo_rl_ext.manifest.forecast import EngineModel


def print_report(
    console: Console, found: CheckReport, engine: EngineModel, show: int, *, estimated: bool
) -> None:
    """Print a report, at most `show` lines of each kind."""

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def more(count: int, name: str, style: str) -> None:
        if count > show:
            say(f"... {count - show} more {name}; --output FILE keeps them", style)

    for fault in found.faults[:show]:
        say(f"fault: {fault}", "red")
    more(len(found.faults), "faults", "red")
    for kind, warnings in found.warnings_by_kind().items():
        say(f"{counted(len(warnings), 'warning')}: {WARNING_KINDS[kind]}", "bold yellow")
        for warning in warnings[:show]:
            say(f"  {warning}", "yellow")
        more(len(warnings), "of this kind", "yellow")
    if found.forecasts:
        console.print(_forecast_table(found, engine))
    for line in _advice(found.advice, engine):
        say(line)
    if estimated:
        say("text lengths are estimated from bytes; --model DIR counts them")
    worst = sorted(found.forecasts, key=lambda row: row.pressure, reverse=True)
    for row in [row for row in worst if row.num_resized][: min(show, 5)]:
        runs, static = (list(values) for values in (row.image_runs, row.static_runs))
        say(f"{found.path}:{row.line}: {row.row_id}: images {static} tokens alone, {runs} in the engine")
    verdict = "unusable" if found.failed else "usable"
    say(
        f"{found.path}: {verdict}: {counted(len(found.faults), 'fault')}, "
        f"{counted(len(found.warnings), 'warning')}"
    )


def _advice(advice: Advice | None, engine: EngineModel) -> Iterator[str]:
    """Sentences on how to keep the engine from re-sizing."""
    if advice is None:
        return
    rows = counted(advice.num_rows, "row") + " with images"
    if not advice.is_needed:
        yield f"at {engine.limits} the engine re-sizes no image of {rows}, whatever its cache and version"
        return
    bad = [f"may re-size images in {advice.num_resized}"] if advice.num_resized else []
    bad += [f"refuses {advice.num_too_long}"] if advice.num_too_long else []
    yield f"at {engine.limits} the engine {' and '.join(bad)} of {rows}; prevent it with one of"
    if advice.num_hopeless:
        yield f"  (not in {advice.num_hopeless} of them, whose text leaves no room for the smallest grids)"
    name = advice.limit_name
    if advice.limit is not None and advice.resolution:
        alone = " and no mm_processor_kwargs for the engine" if engine.arguments else ""
        yield f"  {name} {advice.limit} (`nemo-rl-ext pin`){alone}, the largest for these images"
        for kind, cost in advice.resolution.items():
            yield f"    {kind}: {cost.mean:.0%} of the linear resolution on average, {cost.worst:.0%} at worst"
    if advice.any_limit is not None:
        yield (
            f"  {name} {advice.any_limit} for any {counted(advice.max_images, 'image')} per request "
            f"with at most {advice.max_text_tokens} tokens of text"
        )
    if advice.max_model_len is not None:
        longer = advice.fitting_model_len > advice.max_model_len
        fits = f", {advice.fitting_model_len} to fit every row" if longer else ""
        yield f"  max_model_len {advice.max_model_len}, the smallest for the present limit{fits}"
    elif advice.num_too_long:
        yield f"  max_model_len {advice.fitting_model_len}, the smallest that holds every row"
    yield "  `nemo-rl-ext fit`, which re-sizes each row's images once, to its own share"


def _forecast_table(found: CheckReport, engine: EngineModel) -> Table:
    total = found.summary()
    table = Table("", "", box=None, show_header=False, title=f"at max_model_len {engine.max_model_len}")
    rows, images, videos = (int(total[name]) for name in ("rows", "images", "videos"))
    lengths = [int(total[f"sequence_tokens_{name}"]) for name in ("median", "p95", "max")]
    pressures = [total[f"budget_pressure_{name}"] for name in ("median", "max")]
    table.add_row("rows, images, videos", f"{rows}, {images}, {videos}")
    table.add_row("sequence tokens, median / p95 / max", " / ".join(map(str, lengths)))
    table.add_row("image budget in use, median / max", " / ".join(f"{value:.0%}" for value in pressures))
    table.add_row("rows with re-sized images", f"{total['share_rows_resized']:.1%}")
    table.add_row("rows whose runs fit several grids", f"{total['share_rows_ambiguous']:.1%}")
    table.add_row("rows re-sized by a later turn", f"{total['share_rows_changing']:.1%}")
    table.add_row("rows that do not fit", f"{total['share_rows_too_long']:.1%}")
    return table
