# SPDX-License-Identifier: Apache-2.0
"""The `check` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def check(
    manifest: Annotated[Path, typer.Argument(help="JSONL manifest of mixed image, video and text rows.")],
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint directory: take its tokenizer and image arithmetic, not the defaults."),
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(min=8, help="Context length of the engine, in tokens.")
    ] = 32768,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Room for each answer, in tokens.")] = 0,
    num_frames: Annotated[int, typer.Option(min=1, help="Frames per clip where a row does not say.")] = 8,
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
    report: Annotated[Path | None, typer.Option(help="Write the whole report here as JSON.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; one per core by default.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Faults, warnings and rows to print of each.")] = 20,
) -> None:
    """Validate a manifest and predict runs, lengths and re-sized images; exits with 1 when it has faults."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    from nemo_rl_ext.align.grids import DynamicTiler
    from nemo_rl_ext.manifest.check import CheckConfig, check_manifest
    from nemo_rl_ext.manifest.forecast import EngineModel, VideoShape, engine_from_checkpoint
    from nemo_rl_ext.media.policy import MediaPolicy

    limits = {} if max_pixels is None else {"max_pixels": max_pixels}
    policy = MediaPolicy(roots=tuple(media_root or ()), allow_remote=allow_remote, **limits)
    settings = {"max_model_len": max_model_len, "max_new_tokens": max_new_tokens, "num_frames": num_frames}
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking")
        found = check_manifest(
            manifest, config, on_row=lambda line: bar.update(task, description=f"checked {line} rows")
        )
    if report is not None:
        report.write_text(found.to_json() + "\n", encoding="utf-8")
    _print(Console(), found, engine, show, estimated=model is None)
    if found.failed or (strict and found.warnings):
        raise typer.Exit(1)


def _print(console, found, engine, show: int, *, estimated: bool) -> None:
    from rich.table import Table

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    for name, faults, style in (("fault", found.faults, "red"), ("warning", found.warnings, "yellow")):
        for fault in faults[:show]:
            say(f"{name}: {fault}", style)
        if len(faults) > show:
            say(f"... {len(faults) - show} more {name}s; --report FILE keeps them", style)
    total = found.summary()
    if found.forecasts:
        table = Table("", "", box=None, show_header=False, title=f"at max_model_len {engine.max_model_len}")
        rows, images, videos = (int(total[name]) for name in ("rows", "images", "videos"))
        lengths = [int(total[f"sequence_tokens_{name}"]) for name in ("median", "p95", "max")]
        table.add_row("rows, images, videos", f"{rows}, {images}, {videos}")
        table.add_row("sequence tokens, median / p95 / max", " / ".join(map(str, lengths)))
        table.add_row(
            "image budget in use, median / max", _two(total, "budget_pressure_median", "budget_pressure_max")
        )
        table.add_row("rows with re-sized images", f"{total['share_rows_resized']:.1%}")
        table.add_row("rows whose runs fit several grids", f"{total['share_rows_ambiguous']:.1%}")
        table.add_row("rows re-sized by a later turn", f"{total['share_rows_changing']:.1%}")
        table.add_row("rows that do not fit", f"{total['share_rows_too_long']:.1%}")
        console.print(table)
    if estimated:
        say("text lengths are estimated from bytes; --model DIR counts them")
    worst = sorted(found.forecasts, key=lambda row: row.pressure, reverse=True)
    for row in [row for row in worst if row.num_resized][: min(show, 5)]:
        runs, static = (list(values) for values in (row.image_runs, row.static_runs))
        say(f"{found.path}:{row.line}: {row.row_id}: images {static} tokens alone, {runs} in the engine")
    verdict = "unusable" if found.failed else "usable"
    say(f"{found.path}: {verdict}: {len(found.faults)} fault(s), {len(found.warnings)} warning(s)")


def _two(total: dict[str, float], *names: str) -> str:
    return " / ".join(f"{total[name]:.0%}" for name in names)
