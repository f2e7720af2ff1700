# SPDX-License-Identifier: Apache-2.0
"""From manifest rows to token-id prompts, turn by turn, without ever re-tokenising what was sampled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_rl_ext.guards.chat import mark_messages
from nemo_rl_ext.guards.encode import SafeEncoder
from nemo_rl_ext.manifest.rows import ImagePart, ManifestRow, MediaRef, Message, VideoPart
from nemo_rl_ext.media.reader import MediaSource

_ANSWER = "\u241eanswer\u241e"
"""Stands for an assistant answer while a later turn is rendered; removed before tokenising."""


class PromptRenderer:
    """Renders rows with a checkpoint's own chat template. Ids are unexpanded: one context token per image.

    A manifest's text is content and never becomes a control token: `<image>` typed by a user is seven characters.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; a chat checkpoint is expected")
        self.tokenizer = tokenizer
        self._encoder = SafeEncoder(tokenizer)

    def first(self, row: ManifestRow) -> np.ndarray:
        """Ids int32 [tokens] of the prompt of a row's first turn."""
        return self.chat(_chat(row.messages(0)))

    def chat(self, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        """Ids int32 [tokens] of messages in the form that chat templates take, ready for an answer."""
        return self._ids(self._text(messages))

    def following(self, row: ManifestRow, turn: int, prompt: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Ids of turn `turn`'s prompt: the last prompt, what was sampled on it, and the new messages.

        The text between is what the template puts after an answer; its end-of-turn token is left out where the
        policy sampled it itself.
        """
        chat: list[dict[str, Any]] = []
        for earlier in range(turn):
            chat += [*_chat(row.messages(earlier)), {"role": "assistant", "content": _ANSWER}]
        text = self._text([*chat, *_chat(row.messages(turn))])
        suffix = self._ids(text.rpartition(_ANSWER)[2])
        if len(sampled) and len(suffix) and sampled[-1] == suffix[0] == self.tokenizer.eos_token_id:
            suffix = suffix[1:]
        return np.concatenate((prompt, np.asarray(sampled, np.int32), suffix))

    def _text(self, chat: Sequence[dict[str, Any]]) -> str:
        """The template's text over marked content; only `_ids` may read it."""
        marked = mark_messages(self._encoder, chat)
        return self.tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)

    def _ids(self, marked: str) -> np.ndarray:
        return np.array(self._encoder.encode_marked(marked).ids, dtype=np.int32)


def _chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form that chat templates take."""
    return [{"role": message.role, "content": _content(message)} for message in messages]


def _content(message: Message) -> str | list[dict[str, str]]:
    if isinstance(message.content, str):
        return message.content
    parts: list[dict[str, str]] = []
    in_video = None
    for part in message.parts:
        video = part.video_source if isinstance(part, ImagePart) and part.is_video_frame else None
        if video is not None and video == in_video:
            continue  # the frames of one cached video are one item of the prompt
        in_video = video
        if isinstance(part, VideoPart) or video is not None:
            parts.append({"type": "video"})
        elif isinstance(part, ImagePart):
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


def media_by_turn(row: ManifestRow) -> list[tuple[MediaSource, ...]]:
    """The media of each turn's new messages, in prompt order; neighbouring frames of one source are one video."""
    turns: list[list[MediaSource]] = [[] for _ in range(row.num_turns)]
    for (turn, *_), refs in itertools.groupby(row.media_refs(), key=_item_key):
        group = list(refs)
        turns[turn].append(_source(row, group))
    return [tuple(media) for media in turns]


def _item_key(ref: MediaRef) -> tuple:
    """Equal for the frames of one cached video, different for everything else."""
    if ref.kind == "frame":
        return ref.turn, ref.message_index, ref.video_source
    return ref.turn, ref.message_index, ref.part_index


def _source(row: ManifestRow, group: list[MediaRef]) -> MediaSource:
    first = group[0]
    if first.kind != "frame":
        return MediaSource(
            ref=first.ref,
            kind=first.kind,
            where=row.where,
            num_frames=row.num_frames,
            max_num_tiles=row.image_max_num_tiles,
        )
    indices = tuple(ref.frame_index for ref in group)
    known = None not in indices and first.fps is not None
    return MediaSource(
        ref=first.video_source or first.ref,
        kind="video",
        where=row.where,
        frame_refs=tuple(ref.ref for ref in group),
        frame_indices=indices if known else None,
        fps=first.fps if known else None,
    )
