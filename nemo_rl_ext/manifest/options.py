# SPDX-License-Identifier: Apache-2.0
"""Options that commands on manifests share, and the engine that they describe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from nemo_rl_ext.manifest.forecast import EngineModel
    from nemo_rl_ext.media.policy import MediaPolicy

Manifest = Annotated[
    Path,
    typer.Argument(
        help="Manifest of image, video and text rows: JSON lines, plain or compressed; - reads stdin."
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(help="Checkpoint directory: take its tokenizer and image arithmetic, not the defaults."),
]
MaxModelLen = Annotated[int, typer.Option(min=8, help="Context length of the engine, in tokens.")]
MaxNewTokens = Annotated[int, typer.Option(min=0, help="Room for each answer, in tokens.")]
NumFrames = Annotated[int, typer.Option(min=1, help="Frames per clip where a row does not say.")]
MinNumPatches = Annotated[int, typer.Option(min=1, help="Least patches per image, without --model.")]
MaxNumPatches = Annotated[
    int, typer.Option(min=0, help="Most patches per image, without --model; 0 for no limit.")
]
TemporalPatchSize = Annotated[int, typer.Option(min=1, help="Frames per tubelet of a clip, without --model.")]
VideoNumPatches = Annotated[int, typer.Option(min=4, help="Patches per frame of a clip, without --model.")]
VideoBackend = Annotated[Literal["opencv", "torchcodec"], typer.Option(help="What decodes clips.")]
MediaRoot = Annotated[
    list[Path] | None,
    typer.Option(help="Directory that media may lie in; repeatable. The manifest's own by default."),
]
AllowRemote = Annotated[bool, typer.Option("--allow-remote", help="Fetch http(s) media.")]
MaxPixels = Annotated[int | None, typer.Option(min=1, help="Largest image or frame, in pixels.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="The whole report as JSON on stdout, and nothing else there.")
]


def engine_of(
    model: Path | None,
    *,
    min_num_patches: int,
    max_num_patches: int,
    temporal_patch_size: int,
    video_num_patches: int,
    **settings: Any,
) -> EngineModel:
    """The engine of a checkpoint, or of these numbers without one; `settings` are fields of `EngineModel`."""
    from nemo_rl_ext.align.grids import DynamicTiler
    from nemo_rl_ext.manifest.forecast import EngineModel, VideoShape, engine_from_checkpoint

    if model is not None:
        return engine_from_checkpoint(model, **settings)
    tiler = DynamicTiler(16, 2, min_num_patches, max_num_patches)
    video = VideoShape(temporal_patch_size=temporal_patch_size, target_num_patches=video_num_patches)
    return EngineModel(tiler=tiler, video=video, **settings)


def policy_of(media_root: list[Path] | None, allow_remote: bool, max_pixels: int | None) -> MediaPolicy:
    """The media policy that these options describe."""
    from nemo_rl_ext.media.policy import MediaPolicy

    policy = MediaPolicy(roots=tuple(media_root or ()), allow_remote=allow_remote)
    return policy if max_pixels is None else dataclasses.replace(policy, max_pixels=max_pixels)
