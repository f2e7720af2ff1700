# SPDX-License-Identifier: Apache-2.0
"""The `census` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_rl_ext.align.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from nemo_rl_ext.manifest.census import CensusReport


def census(
    ctx: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="JSON lines (plain, .gz, .zst, .bz2, .xz), Parquet, Arrow or Feather files; - reads standard input. "
            "Leave patterns such as data/*.jsonl without quotes, so that the shell expands them."
        ),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer directory: say which markers survive as phantom tokens."),
    ] = None,
    marker: Annotated[
        list[str] | None, typer.Option(help="Look for this marker instead of the known ones; repeatable.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", "--report", help="Write the whole report to this file as JSON."),
    ] = None,
    fail: Annotated[
        bool,
        typer.Option(
            "--fail",
            help="Exit with 1 when a marker (with --tokenizer: a phantom) was found, or anything was not read.",
        ),
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
        total = sum(path.stat().st_size for path in paths if path.is_file()) or None
        task = bar.add_task("census", total=total)
        found = take_census(paths, config, on_progress=lambda size: bar.advance(task, size))
    if output is not None:
        output.write_text(found.to_json() + "\n", encoding="utf-8")
    _print(console, found, show)
    if fail and found.failed:
        raise typer.Exit(1)


def _print(console: Console, found: CensusReport, show: int) -> None:
    lines = []
    for item in found.findings[:show]:
        phantom = "" if item.phantom_tokens is None else f", {counted(item.phantom_tokens, 'phantom token')}"
        place = f"{item.file}:{item.line}: {item.path}"
        lines.append(f"{place}: {item.marker!r} x{item.count}{phantom} (id {item.example_id})")
    lines += _more(found.num_findings, show, "findings")
    lines += [f"{b.file}:{b.line}: skipped, not JSON: {b.error}" for b in found.broken[:show]]
    lines += _more(found.num_broken, show, "broken lines")
    for unread in found.unread:
        rows = f" ({counted(unread.num_rows, 'row')} before it)" if unread.num_rows else ""
        lines.append(f"{unread.file}: not read whole: {unread.error}{rows}")
    rate = found.num_rows / found.seconds if found.seconds else 0.0
    markers = (
        f"{counted(sum(found.by_marker.values()), 'marker')} in {counted(found.num_rows_with_markers, 'row')}"
    )
    if found.num_phantom_tokens is not None:
        markers += f", {counted(found.num_phantom_tokens, 'phantom token')}"
    lines.append(
        f"{counted(found.num_rows, 'row')} in {counted(found.num_files, 'file')}, "
        f"{counted(found.num_broken, 'broken line')}, {counted(len(found.unread), 'file')} not read whole: "
        f"{markers}; {rate:,.0f} rows/s"
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _more(count: int, show: int, name: str) -> list[str]:
    return [f"... {count - show} more {name}; --output FILE keeps them"] if count > show else []
