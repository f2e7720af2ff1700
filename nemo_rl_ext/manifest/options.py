# SPDX-License-Identifier: Apache-2.0
"""Options that commands on manifests share, and the engine that they describe."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
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
AsJson = Annotated[
    bool, typer.Option("--json", help="The whole report as JSON on stdout, and nothing else there.")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The engine that rows are judged by, and what may be read of them: a command that takes it has these options."""

    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint directory: take its tokenizer and image arithmetic, not the defaults."),
    ] = None
    max_model_len: Annotated[int, typer.Option(min=8, help="Context length of the engine, in tokens.")] = (
        32768
    )
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Room for each answer, in tokens.")] = 0
    num_frames: Annotated[int, typer.Option(min=1, help="Frames per clip where a row does not say.")] = 8
    mm_processor_kwargs: Annotated[
        str | None,
        typer.Option(
            help="What the engine alone is given, as JSON: its limits may differ from the trainer's."
        ),
    ] = None
    limit_images: Annotated[
        int | None, typer.Option(min=0, help="Images that one request may carry (limit_mm_per_prompt.image).")
    ] = None
    limit_videos: Annotated[
        int | None, typer.Option(min=0, help="Clips that one request may carry (limit_mm_per_prompt.video).")
    ] = None
    min_num_patches: Annotated[int, typer.Option(min=1, help="Least patches per image, without --model.")] = (
        1024
    )
    max_num_patches: Annotated[
        int, typer.Option(min=0, help="Most patches per image, without --model; 0 for no limit.")
    ] = 13312
    temporal_patch_size: Annotated[
        int, typer.Option(min=1, help="Frames per tubelet of a clip, without --model.")
    ] = 2
    video_num_patches: Annotated[
        int, typer.Option(min=4, help="Patches per frame of a clip, without --model.")
    ] = 1024
    video_backend: Annotated[Literal["opencv", "torchcodec"], typer.Option(help="What decodes clips.")] = (
        "opencv"
    )
    media_root: Annotated[
        list[Path] | None,
        typer.Option(help="Directory that media may lie in; repeatable. The manifest's own by default."),
    ] = None
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Fetch http(s) media.")] = False
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Largest image or frame, in pixels.")] = None

    def engine(self) -> EngineModel:
        """The engine of the checkpoint, or of these numbers without one."""
        from nemo_rl_ext.align.families.registry import default_family
        from nemo_rl_ext.align.video_grids import VideoTiler
        from nemo_rl_ext.manifest.forecast import EngineModel, engine_from_checkpoint

        names = ("max_model_len", "max_new_tokens", "num_frames", "limit_images", "limit_videos")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        settings["arguments"] = self._arguments()
        if self.model is not None:
            return engine_from_checkpoint(self.model, **settings)
        video = VideoTiler(16, 2, self.video_num_patches, True, self.temporal_patch_size)
        family = default_family(
            min_num_patches=self.min_num_patches, max_num_patches=self.max_num_patches, video=video
        )
        return EngineModel(family=family, **settings)

    def _arguments(self) -> dict[str, Any]:
        try:
            read = json.loads(self.mm_processor_kwargs or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"--mm-processor-kwargs is not valid JSON: {error}") from None
        if not isinstance(read, dict):
            raise ValueError(
                f"--mm-processor-kwargs: an object is expected, found {self.mm_processor_kwargs}"
            )
        return read

    def policy(self) -> MediaPolicy:
        """The media policy that these options describe."""
        from nemo_rl_ext.media.policy import MediaPolicy

        policy = MediaPolicy(roots=tuple(self.media_root or ()), allow_remote=self.allow_remote)
        return policy if self.max_pixels is None else dataclasses.replace(policy, max_pixels=self.max_pixels)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `shared` is `Options`, with the fields of these as options of its own."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "shared"]
    names = [field.name for field in dataclasses.fields(Options)]
    options = inspect.signature(Options, eval_str=True).parameters

    @functools.wraps(command)
    def run(**values: Any) -> None:
        shared = Options(**{name: values.pop(name) for name in names})
        command(**values, shared=shared)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    parameters += [options[name] for name in names]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
