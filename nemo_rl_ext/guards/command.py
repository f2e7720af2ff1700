# SPDX-License-Identifier: Apache-2.0
"""The `census` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from nemo_rl_ext.manifest.census import CensusReport


def census(
    ctx: typer.Context,
    paths: Annotated[list[Path], typer.Argument(help="JSONL (plain, .gz, .zst) or Parquet files.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer directory: say which markers survive as phantom tokens."),
    ] = None,
    marker: Annotated[
        list[str] | None, typer.Option(help="Look for this marker instead of the known ones; repeatable.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the whole report here as JSON.")] = None,
    fail: Annotated[
        bool,
        typer.Option("--fail", help="Exit with 1 when a marker (with --tokenizer: a phantom) was found."),
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Findings to print.")] = 20,
) -> None:
    """Find literal media markers such as <image> in every string of every row of data files."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from nemo_rl_ext.manifest.census import CensusConfig, take_census

    console = Console()
    config = CensusConfig(
        markers=tuple(marker or ()),
        tokenizer=None if tokenizer is None else str(tokenizer),
        num_workers=workers,
    )
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    quiet = bool(getattr(ctx.obj, "quiet", False))
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)
    with bar:
        total = sum(path.stat().st_size for path in paths if path.is_file())
        task = bar.add_task("census", total=total)
        found = take_census(paths, config, on_progress=lambda size: bar.advance(task, size))
    if report is not None:
        report.write_text(found.to_json() + "\n", encoding="utf-8")
    _print(console, found, show)
    if fail and found.failed:
        raise typer.Exit(1)


def _print(console: Console, found: CensusReport, show: int) -> None:
    lines = []
    for item in found.findings[:show]:
        phantom = "" if item.phantom_tokens is None else f", {item.phantom_tokens} phantom token(s)"
        place = f"{item.file}:{item.line}: {item.path}"
        lines.append(f"{place}: {item.marker!r} x{item.count}{phantom} (id {item.example_id})")
    if found.num_findings > show:
        lines.append(f"... {found.num_findings - show} more; --report FILE keeps them")
    lines += [f"{b.file}:{b.line}: skipped, not JSON: {b.error}" for b in found.broken[:show]]
    rate = found.num_rows / found.seconds if found.seconds else 0.0
    phantoms = "" if found.num_phantom_tokens is None else f", {found.num_phantom_tokens} phantom tokens"
    lines.append(
        f"{found.num_rows} rows in {found.num_files} file(s), {found.num_broken} broken line(s): "
        f"{sum(found.by_marker.values())} marker(s) in {found.num_rows_with_markers} row(s){phantoms}; "
        f"{rate:,.0f} rows/s"
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
