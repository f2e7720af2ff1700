# SPDX-License-Identifier: Apache-2.0
"""What an engine will make of a row: its runs, its length, and which pictures it will re-size.

A forecast helps to choose a context length; it never replaces reading the runs of the rollout itself, because the
engine's choice also depends on its cache and its version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_ext.align.grids import RESERVED_TOKENS, DynamicTiler, Grid, Size
from nemo_rl_ext.align.video_grids import VideoTiler
from nemo_rl_ext.manifest.row_media import template_content
from nemo_rl_ext.manifest.rows import ManifestRow, Message
from nemo_rl_ext.media.sampling import num_sampled_frames, sample_frames, tubelet_texts

_WRAPPER_TOKENS = 2
_TOKENS_PER_MESSAGE = 8
_BYTES_PER_TOKEN = 4

# The released Nemotron VL checkpoints.
DEFAULT_TILER = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=1024, max_num_patches=13312)


@dataclass(frozen=True, kw_only=True)
class VideoShape:
    """How the engine sizes the frames of a clip; they do not share the images' budget."""

    temporal_patch_size: int = 2
    target_num_patches: int | None = 1024
    """Patches per frame; None: frames become squares of `image_size`."""
    maintain_aspect_ratio: bool = True
    image_size: int = 512
    """Side in pixels where no number of patches is set."""

    def grid(self, size: Size, tiler: DynamicTiler) -> Grid:
        """Patch grid of every frame (`get_video_target_size_and_feature_size`, vLLM's nano_nemotron_vl.py)."""
        side = self.image_size // tiler.patch_size
        squares = self.target_num_patches is None
        return VideoTiler(
            patch_size=tiler.patch_size,
            merge_size=tiler.merge_size,
            target_num_patches=side**2 if self.target_num_patches is None else self.target_num_patches,
            maintain_aspect_ratio=self.maintain_aspect_ratio and not squares,
            temporal_patch_size=self.temporal_patch_size,
        ).grid(size)


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """The parts of an engine that decide about lengths."""

    tiler: DynamicTiler = DEFAULT_TILER
    video: VideoShape = VideoShape()
    tokenizer: Any = None
    """A transformers tokenizer with a chat template, to count text; None estimates from the bytes."""
    max_model_len: int = 32_768
    max_new_tokens: int = 0
    """Room that every answer needs."""
    num_frames: int = 8
    """Frames per clip where a row does not say."""
    limit_images: int | None = None
    """Images that one request may carry (`limit_mm_per_prompt.image`); None for no limit."""
    limit_videos: int | None = None
    """The same for clips."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One media item of a row after decoding or probing; a frame list counts as one video."""

    kind: str
    """`image` or `video`."""
    turn: int
    size: Size
    num_frames: int = 1
    """Of a video: frames that it has, or, for a frame list, that it lists."""
    fps: float = 1.0
    is_sampled: bool = False
    """True for a frame list: all of its frames are used."""
    remarks: tuple[str, ...] = ()
    """What a user should know of a clip that is used all the same."""


@dataclass(frozen=True, kw_only=True)
class RowForecast:
    """One row at its last turn, when the request is longest."""

    line: int
    row_id: str
    num_images: int
    num_videos: int
    image_runs: tuple[int, ...]
    """Context tokens of each image, as images share the context; empty when the engine refuses the request."""
    static_runs: tuple[int, ...]
    """Context tokens of each image when it has the whole budget to itself."""
    video_runs: tuple[int, ...]
    """Context tokens of each tubelet of all clips."""
    text_tokens: int
    """Text, wrappers of runs and timestamps of clips included."""
    num_resized: int
    """Images whose grid in some turn is not the static one."""
    num_ambiguous: int
    """Images of the last turn whose run length fits several grids."""
    num_changing: int
    """Images that a later turn gives another grid than the turn that brought them."""
    sequence_tokens: int
    """Length of the last request, with room for its answer."""
    fits: bool
    """Whether every request with its answer is within the context."""
    pressure: float
    """Static tokens of all images as a share of what the engine lets them have; above 1 they are re-sized."""


def forecast(row: ManifestRow, media: Sequence[Measured], engine: EngineModel) -> RowForecast:
    """Predict the runs of a row whose media are `media`, in prompt order."""
    tiler = engine.tiler
    budget = engine.max_model_len - RESERVED_TOKENS
    images = [item for item in media if item.kind == "image"]
    static = [tiler.static_grid(image.size) for image in images]
    video_runs, timestamp_tokens, frame_runs_by_turn = _videos(row, media, engine)
    first_grids: dict[int, Grid] = {}
    resized: set[int] = set()
    changing: set[int] = set()
    fits, length = True, 0
    grids: tuple[Grid, ...] = ()
    for turn in range(row.num_turns):
        shown = [image for image in images if image.turn <= turn]
        joint = tiler.joint_grids([image.size for image in shown], budget)
        fits, grids = fits and joint is not None, joint or ()
        for index, grid in enumerate(grids):
            if grid != static[index]:
                resized.add(index)
            if first_grids.setdefault(index, grid) != grid:
                changing.add(index)
        context = sum(grid.num_tokens(tiler.merge_size) for grid in grids)
        context += sum(sum(runs) for place, runs in frame_runs_by_turn if place <= turn)
        text = _text_tokens(row, turn, engine) + _WRAPPER_TOKENS * len(shown)
        text += (
            sum(tokens for place, tokens in timestamp_tokens if place <= turn) + turn * engine.max_new_tokens
        )
        length = context + text + engine.max_new_tokens
        fits = fits and length <= engine.max_model_len
    runs = tuple(grid.num_tokens(tiler.merge_size) for grid in grids)
    static_runs = tuple(grid.num_tokens(tiler.merge_size) for grid in static)
    several = [
        len(tiler.feasible_grids(image.size, run)) > 1 for image, run in zip(images, runs, strict=False)
    ]
    return RowForecast(
        line=row.line,
        row_id=row.row_id,
        num_images=len(images),
        num_videos=len(media) - len(images),
        image_runs=runs,
        static_runs=static_runs,
        video_runs=video_runs,
        text_tokens=length - engine.max_new_tokens - sum(runs) - sum(video_runs),
        num_resized=len(resized),
        num_ambiguous=sum(several),
        num_changing=len(changing),
        sequence_tokens=length,
        fits=fits,
        pressure=sum(static_runs) / budget if budget > 0 else math.inf,
    )


def _videos(
    row: ManifestRow, media: Sequence[Measured], engine: EngineModel
) -> tuple[tuple[int, ...], list[tuple[int, int]], list[tuple[int, list[int]]]]:
    """All tubelet runs, and per clip its turn with the tokens of its timestamps and with its runs."""
    all_runs: list[int] = []
    timestamp_tokens, runs_by_turn = [], []
    patch = engine.video.temporal_patch_size
    for item in media:
        if item.kind != "video":
            continue
        num = item.num_frames
        if not item.is_sampled:
            num = num_sampled_frames(row.num_frames or engine.num_frames, item.num_frames, patch)
        grid = engine.video.grid(item.size, engine.tiler)
        runs = [grid.num_tokens(engine.tiler.merge_size)] * math.ceil(num / patch)
        frames = range(num) if item.is_sampled else sample_frames(item.num_frames, num, fps=item.fps)
        tokens = sum(_count(text, engine) for text in tubelet_texts(frames, item.fps, patch))
        timestamp_tokens.append((item.turn, tokens + _WRAPPER_TOKENS * len(runs)))
        runs_by_turn.append((item.turn, runs))
        all_runs += runs
    return tuple(all_runs), timestamp_tokens, runs_by_turn


def _text_tokens(row: ManifestRow, last_turn: int, engine: EngineModel) -> int:
    turns = [row.messages(turn) for turn in range(last_turn + 1)]
    if engine.tokenizer is not None:
        return _count(_rendered(turns, engine.tokenizer), engine)
    total = 0
    for messages in turns:
        for message in messages:
            text = "".join(getattr(part, "text", "") for part in message.parts)
            total += _TOKENS_PER_MESSAGE + _count(text, engine)
    return total + _TOKENS_PER_MESSAGE * len(turns)


def _count(text: str, engine: EngineModel) -> int:
    if engine.tokenizer is not None:
        return len(engine.tokenizer(text, add_special_tokens=False).input_ids)
    return math.ceil(len(text.encode("utf-8", "replace")) / _BYTES_PER_TOKEN)


def engine_from_checkpoint(model_dir: str | Path, **settings: Any) -> EngineModel:
    """The engine model of a Nemotron VL checkpoint directory; `settings` are further fields of `EngineModel`.

    Reads configuration files and the tokenizer, no weights and no code. Raises `ValueError` when it is not one.
    """
    from transformers import AutoTokenizer

    from nemo_rl_ext.align.families.registry import family_of

    tiler = getattr(family_of(model_dir), "tiler", None)
    if not isinstance(tiler, DynamicTiler):
        raise ValueError(f"{model_dir}: runs are forecast for families whose images share the context alone")
    config = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
    vision = config.get("vision_config") or {}
    target, side = vision.get("video_target_num_patches"), vision.get("video_target_img_size")
    if target is None and side is not None:
        target = math.ceil(side / tiler.patch_size) ** 2
    video = VideoShape(
        temporal_patch_size=int(vision.get("video_temporal_patch_size") or 1),
        target_num_patches=target,
        maintain_aspect_ratio=bool(vision.get("video_maintain_aspect_ratio", False)),
        image_size=int(config.get("force_image_size") or 512),
    )
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    return EngineModel(tiler=tiler, video=video, tokenizer=tokenizer, **settings)


def _rendered(turns: Sequence[Sequence[Message]], tokenizer: Any) -> str:
    """The prompt of the last turn without what stands for media, which the runs count, and without answers."""
    chat: list[dict[str, Any]] = []
    for index, messages in enumerate(turns):
        if index:
            chat.append({"role": "assistant", "content": ""})
        chat += [{"role": message.role, "content": template_content(message)} for message in messages]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    return text.replace("<image>", "").replace("<video>", "")
