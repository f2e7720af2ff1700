# SPDX-License-Identifier: Apache-2.0
"""The `census` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def census(
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
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    try:
        with bar:
            total = sum(path.stat().st_size for path in paths if path.is_file())
            task = bar.add_task("census", total=total)
            found = take_census(paths, config, on_progress=lambda size: bar.advance(task, size))
    except ValueError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    if report is not None:
        report.write_text(found.to_json() + "\n", encoding="utf-8")
    _print(console, found, show)
    if fail and found.failed:
        raise typer.Exit(1)


def _print(console, found, show: int) -> None:
    say = lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    for item in found.findings[:show]:
        phantom = "" if item.phantom_tokens is None else f", {item.phantom_tokens} phantom token(s)"
        say(
            f"{item.file}:{item.line}: {item.path}: {item.marker!r} x{item.count}{phantom}"
            f" (id {item.example_id})"
        )
    if found.num_findings > show:
        say(f"... {found.num_findings - show} more; --report FILE keeps them")
    for line in found.broken[:show]:
        say(f"{line.file}:{line.line}: skipped, not JSON: {line.error}")
    rate = found.num_rows / found.seconds if found.seconds else 0.0
    phantoms = (
        "" if found.num_phantom_tokens is None else f", {found.num_phantom_tokens} phantom tokens"
    )  # fmt: skip
    say(
        f"{found.num_rows} rows in {found.num_files} file(s), {found.num_broken} broken line(s): "
        f"{sum(found.by_marker.values())} marker(s) in {found.num_rows_with_markers} row(s){phantoms}; "
        f"{rate:,.0f} rows/s"
    )
