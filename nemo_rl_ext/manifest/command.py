# SPDX-License-Identifier: Apache-2.0
"""The `check` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemo_rl_ext.manifest import options


@options.with_options
def check(
    ctx: typer.Context,
    manifest: options.Manifest,
    shared: options.Options,
    decode: Annotated[bool, typer.Option(help="Decode media whole, or read their headers only.")] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as faults.")] = False,
    as_json: options.AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", "--report", help="Write the whole report to this file as JSON."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; one per core by default.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Faults, warnings of each kind and rows to print.")] = 20,
) -> None:
    """Validate a manifest, predict runs, lengths and re-sized images, and advise settings at which none is.

    Exits with 1 when the manifest has faults.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    from nemo_rl_ext.manifest.check import check_manifest
    from nemo_rl_ext.manifest.check_output import print_report
    from nemo_rl_ext.manifest.measuring import CheckConfig

    engine = shared.engine()
    config = CheckConfig(
        policy=shared.policy(),
        engine=engine,
        decode=decode,
        num_workers=workers,
        video_backend=shared.video_backend,
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    quiet = as_json or bool(getattr(ctx.obj, "quiet", False))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("checking")
        found = check_manifest(
            manifest, config, on_row=lambda line: bar.update(task, description=f"checked {line} rows")
        )
    if output is not None:
        output.write_text(found.to_json() + "\n", encoding="utf-8")
    if as_json:
        typer.echo(found.to_json())
    else:
        print_report(Console(), found, engine, show, estimated=shared.model is None)
    if found.failed or (strict and found.warnings):
        raise typer.Exit(1)
