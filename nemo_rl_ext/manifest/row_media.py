# SPDX-License-Identifier: Apache-2.0
"""The media items of a row, grouped once for everybody: prompts, checks, forecasts, readers and reports."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from nemo_rl_ext.manifest.rows import ImagePart, ManifestRow, MediaRef, Message, TextPart, VideoPart
from nemo_rl_ext.media.reader import MediaSource


@dataclass(frozen=True, kw_only=True)
class RowMedia:
    """One item that a prompt has a placeholder for: an image, a clip, or the frames of a cached clip."""

    refs: tuple[MediaRef, ...]
    """One reference; all frames, in order, of a cached clip."""

    @property
    def first(self) -> MediaRef:
        """Where the item stands in the prompt."""
        return self.refs[0]

    @property
    def turn(self) -> int:
        """The turn whose messages bring it."""
        return self.first.turn

    @property
    def is_frames(self) -> bool:
        """Whether it is a clip whose frames were cached as images."""
        return self.first.kind == "frame"

    @property
    def kind(self) -> Literal["image", "video"]:
        """What the engine is given."""
        return "image" if self.first.kind == "image" else "video"


def item_starts(message: Message) -> tuple[int | None, ...]:
    """For each part of a message the index of the part that its media item begins with; None for text.

    Frames of one message that name the same `_video_source` are one clip as long as no other image or clip stands
    between them. It stands where its first frame does, and text between frames follows it: NeMo-RL reads such rows
    so (nemo_rl/environments/nemo_gym_video.py). The name groups frames and says nothing about their content.
    """
    starts: list[int | None] = []
    clip, begun = None, 0
    for index, part in enumerate(message.parts):
        if isinstance(part, TextPart):
            starts.append(None)
            continue
        source = part.video_source if isinstance(part, ImagePart) and part.is_video_frame else None
        if source is None or source != clip:
            clip, begun = source, index
        starts.append(begun)
    return tuple(starts)


def media_items(row: ManifestRow) -> tuple[RowMedia, ...]:
    """Every media item of every turn, in prompt order, grouped by `item_starts`."""

    def place(ref: MediaRef) -> tuple[int, int, int | None]:
        message = row.messages(ref.turn)[ref.message_index]
        return ref.turn, ref.message_index, item_starts(message)[ref.part_index]

    return tuple(RowMedia(refs=tuple(refs)) for _, refs in itertools.groupby(row.media_refs(), key=place))


def media_by_turn(row: ManifestRow) -> list[tuple[MediaSource, ...]]:
    """What to read for each turn's new messages, in prompt order."""
    turns: list[list[MediaSource]] = [[] for _ in range(row.num_turns)]
    for item in media_items(row):
        turns[item.turn].append(_source(row, item))
    return [tuple(media) for media in turns]


def _source(row: ManifestRow, item: RowMedia) -> MediaSource:
    first = item.first
    if not item.is_frames:
        return MediaSource(
            ref=first.ref,
            kind=item.kind,
            where=row.where,
            num_frames=row.num_frames,
            max_num_tiles=row.image_max_num_tiles,
        )
    indices = tuple(ref.frame_index for ref in item.refs if ref.frame_index is not None)
    known = len(indices) == len(item.refs) and first.fps is not None
    return MediaSource(
        ref=first.video_source or first.ref,
        kind="video",
        where=row.where,
        frame_refs=tuple(ref.ref for ref in item.refs),
        frame_indices=indices if known else None,
        fps=first.fps if known else None,
    )


def template_content(message: Message) -> str | list[dict[str, str]]:
    """A message's content in the form that chat templates take, with one part per media item."""
    if isinstance(message.content, str):
        return message.content
    parts: list[dict[str, str]] = []
    for index, (part, start) in enumerate(zip(message.parts, item_starts(message), strict=True)):
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        elif index == start:
            is_clip = isinstance(part, VideoPart) or part.is_video_frame
            parts.append({"type": "video" if is_clip else "image"})
    return parts
