# SPDX-License-Identifier: Apache-2.0
"""The `fit` command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nemo_rl_ext.manifest import options


@options.with_options
def fit(
    manifest: options.Manifest,
    out: Annotated[
        Path, typer.Argument(help="Directory to write: the new manifest, and media/. Must not exist.")
    ],
    shared: options.Options,
    text_tokens: Annotated[
        int, typer.Option(min=0, help="Text to reserve in every row, for rows that are forecast with less.")
    ] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Re-size every image of a manifest once, to its share of the context, so that no engine does.

    Clips, cached frames and text pass through. Exits with 1, and writes nothing, when a row cannot be read.
    """
    from nemo_rl_ext.align.wording import counted
    from nemo_rl_ext.manifest.fit import fit_manifest
    from nemo_rl_ext.manifest.measuring import CheckConfig

    engine = shared.engine()
    config = CheckConfig(
        policy=shared.policy(), engine=engine, decode=False, video_backend=shared.video_backend
    )
    report = fit_manifest(manifest, out, config, text_tokens=text_tokens)
    if as_json:
        import json

        typer.echo(json.dumps(asdict(report), default=str, indent=1))
    elif report.faults:
        for fault in report.faults:
            typer.echo(f"fault: {fault}")
        typer.echo(f"{manifest}: {counted(len(report.faults), 'fault')}, nothing was written")
    else:
        for fault in report.resized_anyway:
            typer.echo(f"warning: {fault}")
        typer.echo(
            f"{report.manifest}: {counted(report.num_rows, 'row')}, {counted(report.num_images, 'image')}, "
            f"{report.num_changed} of them re-sized, in {counted(report.num_files, 'file')}; {report.mean:.0%} of the "
            f"linear resolution on average, {report.worst:.0%} at worst"
        )
        if report.advice is not None:
            context = report.advice.max_model_len or report.advice.fitting_model_len
            typer.echo(
                f"no engine re-sizes them at max_model_len {context} or more, with the limits of {engine.limits}; a "
                "shorter context would re-size or refuse them, and so would images that an agent adds"
            )
        if shared.model is None:
            typer.echo(
                "text lengths are estimated from bytes; --model DIR counts them, --text-tokens N reserves more"
            )
    if report.faults:
        raise typer.Exit(1)
