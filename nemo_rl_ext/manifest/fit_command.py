# SPDX-License-Identifier: Apache-2.0
"""The `fit` command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nemo_rl_ext.manifest import options


def fit(
    manifest: options.Manifest,
    out: Annotated[
        Path, typer.Argument(help="Directory to write: the new manifest, and media/. Must not exist.")
    ],
    model: options.Model = None,
    max_model_len: options.MaxModelLen = 32768,
    max_new_tokens: options.MaxNewTokens = 0,
    text_tokens: Annotated[
        int, typer.Option(min=0, help="Text to reserve in every row, for rows that are forecast with less.")
    ] = 0,
    num_frames: options.NumFrames = 8,
    min_num_patches: options.MinNumPatches = 1024,
    max_num_patches: options.MaxNumPatches = 13312,
    temporal_patch_size: options.TemporalPatchSize = 2,
    video_num_patches: options.VideoNumPatches = 1024,
    video_backend: options.VideoBackend = "opencv",
    media_root: options.MediaRoot = None,
    allow_remote: options.AllowRemote = False,
    max_pixels: options.MaxPixels = None,
    as_json: options.AsJson = False,
) -> None:
    """Re-size every image of a manifest once, to its share of the context, so that no engine does.

    Clips, cached frames and text pass through. Exits with 1, and writes nothing, when a row cannot be read.
    """
    from nemo_rl_ext.align.wording import counted
    from nemo_rl_ext.manifest.fit import fit_manifest
    from nemo_rl_ext.manifest.measuring import CheckConfig

    engine = options.engine_of(
        model,
        min_num_patches=min_num_patches,
        max_num_patches=max_num_patches,
        temporal_patch_size=temporal_patch_size,
        video_num_patches=video_num_patches,
        max_model_len=max_model_len,
        max_new_tokens=max_new_tokens,
        num_frames=num_frames,
    )
    policy = options.policy_of(media_root, allow_remote, max_pixels)
    config = CheckConfig(policy=policy, engine=engine, decode=False, video_backend=video_backend)
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
            typer.echo(
                f"no engine re-sizes them at max_model_len {report.advice.max_model_len} or more, with limits of "
                f"{engine.tiler.min_num_patches} to {engine.tiler.max_num_patches} patches; a shorter context would, "
                "and so would images that an agent adds"
            )
        if model is None:
            typer.echo(
                "text lengths are estimated from bytes; --model DIR counts them, --text-tokens N reserves more"
            )
    if report.faults:
        raise typer.Exit(1)
