# SPDX-License-Identifier: Apache-2.0
"""What an engine will make of a row: its runs, its length, and which pictures it will re-size.

A forecast helps to choose a context length; it never replaces reading the runs of the rollout itself, because the
engine's choice also depends on its cache and its version.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.align.families.registry import default_family, family_of
from nemo_rl_ext.align.grids import Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.sizer import Sizer
from nemo_rl_ext.manifest.chat import chat_messages, chat_tools, render_chat
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.sampling import sample_frames

_TOKENS_PER_MESSAGE = 8
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """The parts of an engine, and of the trainer beside it, that decide about lengths."""

    family: MediaFamily = field(default_factory=default_family)
    """The checkpoint's family, as the trainer has it."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own `mm_processor_kwargs`."""
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

    def __post_init__(self) -> None:
        """Raises `ValueError` for an engine's argument whose effect is not known."""
        assert self.served

    @property
    def served(self) -> MediaFamily:
        """The family as the engine has it."""
        return self.family.served_with(self.arguments) if self.arguments else self.family

    @property
    def sizer(self) -> Sizer:
        """How the engine sizes images."""
        return self.served.sizer

    @property
    def limits(self) -> str:
        """The context and the images' limit, in words."""
        sizer, trainer = self.sizer, self.family.sizer
        other = f" ({trainer.limit} of the trainer)" if trainer.limit != sizer.limit else ""
        return f"max_model_len {self.max_model_len} and {sizer.limit_name} {sizer.limit}{other}"


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
    served = engine.served
    sizer, trainer = (family.sizer.of_row(row.image_max_num_tiles) for family in (served, engine.family))
    budget = engine.max_model_len - sizer.reserved_tokens
    images = [item for item in media if item.kind == "image"]
    static = [trainer.static_grid(image.size) for image in images]
    video_runs, clips = _videos(row, media, engine, served)
    first_grids: dict[int, Grid] = {}
    resized: set[int] = set()
    changing: set[int] = set()
    fits, length = True, 0
    grids: tuple[Grid, ...] = ()
    for turn in range(row.num_turns):
        shown = [image for image in images if image.turn <= turn]
        joint = sizer.joint_grids([image.size for image in shown], budget)
        fits, grids = fits and joint is not None, joint or ()
        for index, grid in enumerate(grids):
            if grid != static[index]:
                resized.add(index)
            if first_grids.setdefault(index, grid) != grid:
                changing.add(index)
        context = sum(map(sizer.num_tokens, grids)) + sum(
            sum(clip.runs) for clip in clips if clip.turn <= turn
        )
        text = _text_tokens(row, turn, engine, served) + turn * engine.max_new_tokens
        text += sum(_written(_image_item(image), engine, served) for image in shown)
        text += sum(clip.text_tokens for clip in clips if clip.turn <= turn)
        length = context + text + engine.max_new_tokens
        fits = fits and length <= engine.max_model_len
    runs = tuple(map(sizer.num_tokens, grids))
    static_runs = tuple(map(trainer.num_tokens, static))
    several = [
        len(sizer.feasible_grids(image.size, run)) > 1 for image, run in zip(images, runs, strict=False)
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


@dataclass(frozen=True)
class _Clip:
    """What a clip takes of the context, from its turn on."""

    turn: int
    runs: tuple[int, ...]
    text_tokens: int


def _videos(
    row: ManifestRow, media: Sequence[Measured], engine: EngineModel, served: MediaFamily
) -> tuple[tuple[int, ...], list[_Clip]]:
    """All runs of all clips, and the clips."""
    clips = []
    for item in media:
        if item.kind != "video":
            continue
        frames: Sequence[int] = range(item.num_frames)
        if not item.is_sampled:
            frames = sample_frames(
                item.num_frames,
                row.num_frames or engine.num_frames,
                temporal_patch_size=served.frames_per_tubelet(),
                fps=item.fps,
            )
        clip = MediaItem(
            kind="video",
            size=item.size,
            source=row.where,
            frame_indices=tuple(frames),
            fps=item.fps,
            total_frames=item.num_frames,
        )
        (geometry,) = served.static([clip])
        clips.append(_Clip(item.turn, served.run_lengths(geometry, "video"), _written(clip, engine, served)))
    return tuple(run for clip in clips for run in clip.runs), clips


def _image_item(image: Measured) -> MediaItem:
    return MediaItem(size=image.size, source="")


def _written(item: MediaItem, engine: EngineModel, served: MediaFamily) -> int:
    """Tokens that the engine writes for an item beside its context tokens."""
    written = served.written(item)
    return written.num_delimiters + sum(_count(text, engine) for text in written.texts)


def _text_tokens(row: ManifestRow, last_turn: int, engine: EngineModel, served: MediaFamily) -> int:
    turns = [chat_messages(row.messages(turn)) for turn in range(last_turn + 1)]
    tools = chat_tools(row)
    if engine.tokenizer is not None:
        # Text on both sides of a placeholder is tokenized apart: special tokens will stand there.
        between = "|".join(map(re.escape, served.placeholders()))
        text = _rendered(turns, tools, engine.tokenizer)
        return sum(_count(part, engine) for part in re.split(between, text))
    total = _count(json.dumps(tools), engine) if tools else 0
    for messages in turns:
        for message in messages:
            total += _TOKENS_PER_MESSAGE + _count(_words(message), engine)
    return total + _TOKENS_PER_MESSAGE * len(turns)


def _words(message: Mapping[str, Any]) -> str:
    """All that a chat template writes of a message, in any order."""
    content, calls = message["content"], message.get("tool_calls")
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return f"{text}{message.get('reasoning_content', '')}{json.dumps(calls) if calls else ''}"


def _count(text: str, engine: EngineModel) -> int:
    if engine.tokenizer is not None:
        return len(engine.tokenizer(text, add_special_tokens=False).input_ids)
    return math.ceil(len(text.encode("utf-8", "replace")) / _BYTES_PER_TOKEN)


def engine_from_checkpoint(model_dir: str | Path, **settings: Any) -> EngineModel:
    """The engine model of a checkpoint directory; `settings` are further fields of `EngineModel`.

    Reads configuration files and the tokenizer, no weights and no code. Raises `ValueError` when it is not one, or for
    an engine argument whose effect is not known.
    """
    from transformers import AutoTokenizer

    family = family_of(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    return EngineModel(family=family, tokenizer=tokenizer, **settings)


def _rendered(
    turns: Sequence[Sequence[dict[str, Any]]], tools: Sequence[dict[str, Any]], tokenizer: Any
) -> str:
    """The prompt of the last turn without answers, as the chat template writes it."""
    chat: list[dict[str, Any]] = []
    for index, messages in enumerate(turns):
        if index:
            chat.append({"role": "assistant", "content": ""})
        chat += messages
    return render_chat(tokenizer, chat, tools)
