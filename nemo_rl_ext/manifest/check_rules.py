# SPDX-License-Identifier: Apache-2.0
"""Rules that a row can break without being unreadable: each yields (field, problem)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel

from nemo_rl_ext.align.grids import Size
from nemo_rl_ext.manifest.census_scan import MarkerScanner
from nemo_rl_ext.manifest.keys import closest_key, known_keys
from nemo_rl_ext.manifest.row_media import media_items
from nemo_rl_ext.manifest.rows import ManifestRow, MediaRef
from nemo_rl_ext.media.sources import reference_kind

WarningKind = Literal[
    "does not fit", "too many media", "clip", "media marker in text", "unknown key", "no answer", "NeMo-RL"
]
WARNING_KINDS: dict[WarningKind, str] = {
    "does not fit": "rows that do not fit the context: the engine refuses them",
    "too many media": "rows with more media than a request may carry: the engine refuses them",
    "clip": "clips that lack frames or whose frames do not keep to their rate, used all the same",
    "media marker in text": "rows whose text holds a literal media marker",
    "unknown key": "keys that look misspelled",
    "no answer": "rows that the embedded run's own scoring can only give 0",
    "NeMo-RL": "rows that NeMo-RL refuses, and this package's own run takes",
}
"""Every kind of warning with its heading, in the order in which they matter."""

Problems = Iterator[tuple[str, str]]


def frame_list_faults(row: ManifestRow, sizes: Mapping[MediaRef, Size]) -> Problems:
    """What keeps the frames of a cached list from being one video; `sizes` holds what could be measured."""
    seen: set[tuple[int, str | None]] = set()
    for item in media_items(row):
        first = item.first
        if not item.is_frames:
            continue
        key = (first.turn, first.video_source)
        if key in seen:
            yield first.field, f"the frames of {first.video_source!r} do not stand next to one another"
        seen.add(key)
        known = {sizes[frame] for frame in item.refs if frame in sizes}
        if len(known) > 1:
            yield first.field, f"frames of one video differ in size: {sorted(known)} (height, width)"
        rates = {frame.fps for frame in item.refs}
        if len(rates) > 1:
            yield first.field, f"frames of one video differ in _video_fps: {sorted(map(str, rates))}"
        indices = [frame.frame_index for frame in item.refs]
        listed = [index for index in indices if index is not None]
        if listed and len(listed) < len(indices) or (None in indices) != (None in rates):
            yield (
                first.field,
                "some frames lack _video_frame_index or _video_fps; give both for all or for none",
            )
        elif listed != sorted(listed):
            yield first.field, f"frame indices go backwards: {indices}"


def nemo_rl_refusals(row: ManifestRow) -> Problems:
    """Rules of NeMo-RL's video rows (nemo_rl/environments/nemo_gym_video.py) that this package does not share."""
    items = media_items(row)
    videos = [item.first for item in items if item.kind == "video"]
    if not videos:
        return
    if len(videos) > 1:
        yield videos[1].field, f"NeMo-RL takes one video per row, found {len(videos)}"
    if len({media.kind for media in videos}) > 1:
        yield videos[0].field, "NeMo-RL does not mix video files and cached frames in one row"
    if len(items) > len(videos):
        yield videos[0].field, "NeMo-RL does not mix still images and video in one row"
    for media in videos:
        if media.kind == "video" and reference_kind(media.ref) != "local":
            yield media.field, "NeMo-RL reads videos from local paths only"
        elif media.kind == "video" and not media.ref.startswith(("/", "file://")):
            yield media.field, "NeMo-RL wants absolute video paths"


def too_many_media(row: ManifestRow, limits: Mapping[str, int | None]) -> Problems:
    """Items of a kind beyond the engine's limit per request, which holds all turns; a limit of None is none."""
    items = media_items(row)
    for kind, limit in limits.items():
        found = [item for item in items if item.kind == kind]
        if limit is not None and len(found) > limit:
            yield (
                found[limit].first.field,
                f"{len(found)} {kind}s in one request, of which the engine takes {limit}; raise "
                f"limit_mm_per_prompt.{kind} or split the row",
            )


def markers_in_text(row: ManifestRow, scanner: MarkerScanner) -> Problems:
    """Literal media markers in what the policy reads. With a tokenizer, only those that it makes placeholders of."""
    request = row.responses_create_params
    value = {
        "responses_create_params": {
            "input": [_plain(message) for message in request.input],
            "tools": [tool.model_dump() for tool in request.tools],
        },
        "turns": [[_plain(message) for message in turn] for turn in row.turns],
    }
    for found in scanner.findings(value, file="", line=row.line):
        place = found.path.replace("[", ".").replace("]", "")
        if found.phantom_tokens == 0 or place.endswith(("_url", ".url")):
            continue
        times = "" if found.count == 1 else f" {found.count} times"
        yield (
            place,
            f"text holds {found.marker!r}{times}, of which a tokenizer makes a placeholder; the embedded run keeps it "
            "text, others may not (`nemo-rl-ext census` lists every place)",
        )


def _plain(message: BaseModel) -> dict[str, Any]:
    return message.model_dump(by_alias=True, exclude={"output"})  # a tool's output is its `content` already


def misspelled_keys(row: ManifestRow) -> Problems:
    """Keys that are not known here, which Gym may carry, but that nearly are one that is."""
    yield from _misspelled(row, "")
    yield from _misspelled(row.responses_create_params, "responses_create_params.")
    for turn in range(row.num_turns):
        start = "responses_create_params.input" if turn == 0 else f"turns.{turn - 1}"
        for index, message in enumerate(row.messages(turn)):
            yield from _misspelled(message, f"{start}.{index}.")
            if not isinstance(message.content, str):
                for number, part in enumerate(message.content):
                    yield from _misspelled(part, f"{start}.{index}.content.{number}.")


def _misspelled(model: BaseModel, prefix: str) -> Problems:
    if not model.model_extra:
        return
    known = known_keys(type(model))
    for key in model.model_extra:
        if close := closest_key(key, known - model.model_fields_set):
            yield f"{prefix}{key}", f"unknown key, which nothing here reads; did you mean {close!r}?"
