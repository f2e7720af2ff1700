# SPDX-License-Identifier: Apache-2.0
"""The `check` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def check(
    ctx: typer.Context,
    manifest: Annotated[
        Path,
        typer.Argument(
            help="Manifest of image, video and text rows: JSON lines, plain or compressed; - reads stdin."
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint directory: take its tokenizer and image arithmetic, not the defaults."),
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(min=8, help="Context length of the engine, in tokens.")
    ] = 32768,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Room for each answer, in tokens.")] = 0,
    num_frames: Annotated[int, typer.Option(min=1, help="Frames per clip where a row does not say.")] = 8,
    limit_images: Annotated[
        int | None, typer.Option(min=0, help="Images that one request may carry (limit_mm_per_prompt.image).")
    ] = None,
    limit_videos: Annotated[
        int | None, typer.Option(min=0, help="Clips that one request may carry (limit_mm_per_prompt.video).")
    ] = None,
    min_num_patches: Annotated[
        int, typer.Option(min=1, help="Least patches per image, without --model.")
    ] = 1024,
    max_num_patches: Annotated[
        int, typer.Option(min=0, help="Most patches per image, without --model; 0 for no limit.")
    ] = 13312,
    temporal_patch_size: Annotated[
        int, typer.Option(min=1, help="Frames per tubelet of a clip, without --model.")
    ] = 2,
    video_num_patches: Annotated[
        int, typer.Option(min=4, help="Patches per frame of a clip, without --model.")
    ] = 1024,
    video_backend: Annotated[
        Literal["decord", "torchcodec"], typer.Option(help="What decodes clips.")
    ] = "decord",
    media_root: Annotated[
        list[Path] | None,
        typer.Option(help="Directory that media may lie in; repeatable. The manifest's own by default."),
    ] = None,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Fetch http(s) media.")] = False,
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Largest image or frame, in pixels.")] = None,
    decode: Annotated[bool, typer.Option(help="Decode media whole, or read their headers only.")] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as faults.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The whole report as JSON on stdout, and nothing else there.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", "--report", help="Write the whole report to this file as JSON."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; one per core by default.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Faults, warnings of each kind and rows to print.")] = 20,
) -> None:
    """Validate a manifest and predict runs, lengths and re-sized images; exits with 1 when it has faults."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    from nemo_rl_ext.align.grids import DynamicTiler
    from nemo_rl_ext.manifest.check import CheckConfig, check_manifest
    from nemo_rl_ext.manifest.check_output import print_report
    from nemo_rl_ext.manifest.forecast import EngineModel, VideoShape, engine_from_checkpoint
    from nemo_rl_ext.media.policy import MediaPolicy

    limits = {} if max_pixels is None else {"max_pixels": max_pixels}
    policy = MediaPolicy(roots=tuple(media_root or ()), allow_remote=allow_remote, **limits)
    settings = {
        "max_model_len": max_model_len,
        "max_new_tokens": max_new_tokens,
        "num_frames": num_frames,
        "limit_images": limit_images,
        "limit_videos": limit_videos,
    }
    if model is not None:
        engine = engine_from_checkpoint(model, **settings)
    else:
        tiler = DynamicTiler(16, 2, min_num_patches, max_num_patches)
        video = VideoShape(temporal_patch_size=temporal_patch_size, target_num_patches=video_num_patches)
        engine = EngineModel(tiler=tiler, video=video, **settings)
    config = CheckConfig(
        policy=policy, engine=engine, decode=decode, num_workers=workers, video_backend=video_backend
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
        print_report(Console(), found, engine, show, estimated=model is None)
    if found.failed or (strict and found.warnings):
        raise typer.Exit(1)
