# SPDX-License-Identifier: Apache-2.0
"""From whatever a policy wrote to tracks, in bounded time and memory, without raising.

The answer is one JSON object after the reasoning, with or without a code fence:

    {"tracks": [{"id": "1", "frames": [{"frame": 0, "box": [10, 20, 200, 300]}, {"frame": 1, "visible": false}]}]}

`box` is `[x1, y1, x2, y2]` and `point` is `[x, y]`, integers from 0 to 1000. An entry that breaks a rule counts
as not given. A frame that one track lists twice counts as not given either: otherwise a policy could hedge.
"""

import json
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from resources_servers.sav_tracks.regions import GRID

MAX_DEPTH = 32
_MAX_ATTEMPTS = 3
_MAX_DIGITS = 9
_OPENING = re.compile(r'\{\s*"tracks"')
_STEP = np.zeros(256, dtype=np.int32)
_STEP[list(b"{[")] = 1
_STEP[list(b"}]")] = -1


class Problem(StrEnum):
    """Why an answer could not be read."""

    EMPTY = "no_answer_text"
    REASONING_CUT = "reasoning_not_closed"
    NO_JSON = "no_json_object_with_tracks"
    TOO_DEEP = "nested_too_deep"
    DUPLICATE_KEY = "duplicate_json_key"
    NOT_A_LIST = "tracks_is_not_a_list"


class Shape(StrEnum):
    """The coordinate a task asks for; the value is the key of an entry."""

    BOX = "box"
    POINT = "point"

    @property
    def num_coordinates(self) -> int:
        """Integers per entry."""
        return 4 if self is Shape.BOX else 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Track:
    """One object through the frames; a frame that is neither visible nor absent was not answered."""

    id: str | None
    name: str | None
    visible: np.ndarray  # [frames] bool: placed in the frame
    absent: np.ndarray  # [frames] bool: said to be absent, explicitly
    coordinates: np.ndarray  # [frames, 4 or 2] on the grid; zero where not visible
    num_extra_entries: int  # entries that repeat a frame or name none that was asked for

    @property
    def is_complete(self) -> bool:
        """Every frame answered exactly once and by the rules."""
        return self.num_extra_entries == 0 and bool(np.all(self.visible | self.absent))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All tracks that were read, in order; `num_tracks` also counts the unreadable ones."""

    tracks: tuple[Track, ...] = ()
    num_tracks: int = 0
    problem: Problem | None = field(default=None)


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _DuplicateKey
    return found


def _integer(digits: str) -> int | None:
    return int(digits) if len(digits) <= _MAX_DIGITS else None


def _nothing(_: str) -> None:
    return None


# floats, NaN and Infinity are no coordinates; reading them as null keeps a 5000-digit literal from costing anything
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_nothing, parse_constant=_nothing
)


def parse_answer(text: Any, *, shape: Shape, num_frames: int, num_objects: int) -> Answer:
    """Read the tracks from a policy's final text.

    Only the end of the text is read, in proportion to what a complete answer needs; at most four times
    `num_objects` tracks are read in detail, further ones are only counted.
    """
    if not isinstance(text, str) or not text.strip():
        return Answer(problem=Problem.EMPTY)
    _, closed, final = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return Answer(problem=Problem.REASONING_CUT)
    found = _find_object(final[-max_characters(num_frames, num_objects) :])
    if isinstance(found, Problem):
        return Answer(problem=found)
    listed = found.get("tracks")
    if not isinstance(listed, list):
        return Answer(problem=Problem.NOT_A_LIST)
    read = (_read_track(item, shape, num_frames) for item in listed[: 4 * num_objects])
    return Answer(tracks=tuple(track for track in read if track is not None), num_tracks=len(listed))


def max_characters(num_frames: int, num_objects: int) -> int:
    """How much of the answer's end is read: a generously spaced complete answer twice over, at least 16 KiB."""
    return min(16_384 + 256 * num_frames * num_objects, 262_144)


def _find_object(text: str) -> dict[str, Any] | Problem:
    starts = [match.start() for match in _OPENING.finditer(text)][-_MAX_ATTEMPTS:]
    if not starts and "{" in text:
        starts = [text.index("{")]
    problem = Problem.NO_JSON
    for start in reversed(starts):  # the last complete object is the answer; drafts before it are reasoning
        if _depth(text[start:]) > MAX_DEPTH:
            problem = Problem.TOO_DEEP
            continue
        try:
            found, _ = _DECODER.raw_decode(text, start)
        except _DuplicateKey:
            return Problem.DUPLICATE_KEY
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and "tracks" in found:
            return found
    return problem


def _depth(text: str) -> int:
    """Upper bound of the nesting, in linear time; the decoder itself recurses once per level."""
    codes = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
    return int(np.cumsum(_STEP[codes], dtype=np.int64).max(initial=0))


def _read_track(item: Any, shape: Shape, num_frames: int) -> Track | None:
    if not isinstance(item, dict) or not isinstance(item.get("frames"), list):
        return None
    visible = np.zeros(num_frames, dtype=bool)
    absent = np.zeros(num_frames, dtype=bool)
    coordinates = np.zeros((num_frames, shape.num_coordinates))
    seen: set[int] = set()
    num_extra = 0
    for entry in item["frames"]:
        frame = entry.get("frame") if isinstance(entry, dict) else None
        if not _is_integer(frame) or not 0 <= frame < num_frames:
            num_extra += 1
            continue
        if frame in seen:
            num_extra += 1
            visible[frame] = absent[frame] = False
            continue
        seen.add(frame)
        if entry.get("visible") is False and shape not in entry:
            absent[frame] = True
        elif entry.get("visible", True) is True and _is_place(entry.get(shape), shape):
            visible[frame] = True
            coordinates[frame] = entry[shape]
    coordinates[~visible] = 0
    name = item.get("name")
    return Track(
        id=_identifier(item.get("id")),
        name=name if isinstance(name, str) else None,
        visible=visible,
        absent=absent,
        coordinates=coordinates,
        num_extra_entries=num_extra,
    )


def _identifier(value: Any) -> str | None:
    if isinstance(value, str):
        return value.strip()
    return str(value) if _is_integer(value) else None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_place(value: Any, shape: Shape) -> bool:
    if not isinstance(value, list) or len(value) != shape.num_coordinates:
        return False
    if not all(_is_integer(number) and 0 <= number <= GRID for number in value):
        return False
    return shape is Shape.POINT or (value[0] < value[2] and value[1] < value[3])
