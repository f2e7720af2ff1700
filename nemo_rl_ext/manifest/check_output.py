# SPDX-License-Identifier: Apache-2.0
"""What `check` prints for a reader: faults, warnings by kind, then what the engine will do."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

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


def counted(count: int, name: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
