# SPDX-License-Identifier: Apache-2.0
"""From whatever a policy wrote to tracks, in bounded time and memory, without raising.

The answer is one JSON object after the reasoning, with or without a code fence:

    {"tracks": [{"id": "1", "frames": [{"frame": 0, "box": [10, 20, 200, 300]}, {"frame": 1, "visible": false}]}]}

`box` is `[x1, y1, x2, y2]` and `point` is `[x, y]`, integers from 0 to 1000. An entry that breaks a rule counts
as not given, and `Answer.dropped` says which rule. A frame that one track lists twice counts as not given either:
otherwise a policy could hedge. For the same reason a key that one object repeats has no value there.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from resources_servers.sav_tracks.regions import GRID

MAX_DEPTH = 32
_MAX_ATTEMPTS = 3
_MAX_DIGITS = 9
# an object whose `tracks` is its first key or follows plain values
_OPENING = re.compile(r'\{[^{}\[\]]*?"tracks"\s*:')
_STRING = re.compile(r'"(?:[^"\\]+|\\.)*(?:"|\\?\Z)', re.DOTALL)
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


class Fault(StrEnum):
    """Why a track or an entry was dropped."""

    NO_TRACK = "track_without_a_list_of_frames"
    REPEATED_KEY = "repeated_key"
    NO_ENTRY = "entry_is_not_an_object"
    OTHER_FRAME = "frame_that_was_not_asked_for"
    FRAME_TWICE = "frame_listed_twice"
    NO_PLACE = "neither_a_place_nor_an_absence"


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
    """All tracks that were read, in order; `num_tracks` also counts the unreadable ones, `dropped` what was dropped."""

    tracks: tuple[Track, ...] = ()
    num_tracks: int = 0
    dropped: Mapping[Fault, int] = field(default_factory=dict)
    problem: Problem | None = None


_REPEATED = object()
"""In place of the value of a key that one object has twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        found[key] = _REPEATED if key in found else value
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
    listed = found["tracks"]
    if listed is _REPEATED:
        return Answer(problem=Problem.DUPLICATE_KEY)
    if not isinstance(listed, list):
        return Answer(problem=Problem.NOT_A_LIST)
    dropped: Counter[Fault] = Counter()
    read = [_read_track(item, shape, num_frames, dropped) for item in listed[: 4 * num_objects]]
    tracks = tuple(track for track in read if track is not None)
    return Answer(tracks=tracks, num_tracks=len(listed), dropped=dropped)


def max_characters(num_frames: int, num_objects: int) -> int:
    """How much of the answer's end is read: a generously spaced complete answer twice over, at least 16 KiB."""
    return min(16_384 + 256 * num_frames * num_objects, 262_144)


def _find_object(text: str) -> dict[str, Any] | Problem:
    starts = [match.start() for match in _OPENING.finditer(text)][: -_MAX_ATTEMPTS - 1 : -1]
    problem = Problem.NO_JSON
    # the last complete object is the answer, drafts before it are reasoning; the first brace may open what the pattern
    # does not know
    for start in [*starts, text.find("{")]:
        if start < 0:
            continue
        if _depth(text[start:]) > MAX_DEPTH:
            problem = Problem.TOO_DEEP
            continue
        try:
            found, _ = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and "tracks" in found:
            return found
    return problem


def _depth(text: str) -> int:
    """Nesting of the object at the text's start, in linear time; the decoder itself recurses once per level."""
    codes = np.frombuffer(_STRING.sub("", text).encode("utf-8", "replace"), dtype=np.uint8)
    levels = np.cumsum(_STEP[codes], dtype=np.int64)
    ends = np.flatnonzero(levels == 0)  # the first character opens the object
    return int(levels[: ends[0] if ends.size else None].max(initial=0))


def _read_track(item: Any, shape: Shape, num_frames: int, dropped: Counter[Fault]) -> Track | None:
    if not isinstance(item, dict) or not isinstance(item.get("frames"), list) or item.get("id") is _REPEATED:
        repeated = isinstance(item, dict) and _REPEATED in (item.get("frames"), item.get("id"))
        dropped[Fault.REPEATED_KEY if repeated else Fault.NO_TRACK] += 1
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
            dropped[_fault_of_a_stray(entry, frame)] += 1
            continue
        if frame in seen:
            num_extra += 1
            visible[frame] = absent[frame] = False
            dropped[Fault.FRAME_TWICE] += 1
            continue
        seen.add(frame)
        place, said = entry.get(shape), entry.get("visible", True)
        # null and [] are how a model writes that there is no place
        if said is False and (place is None or place == []):
            absent[frame] = True
        elif said is True and _is_place(place, shape):
            visible[frame] = True
            coordinates[frame] = place
        else:
            dropped[Fault.REPEATED_KEY if _REPEATED in (place, said) else Fault.NO_PLACE] += 1
    coordinates[~visible] = 0
    return Track(
        id=_identifier(item.get("id")),
        visible=visible,
        absent=absent,
        coordinates=coordinates,
        num_extra_entries=num_extra,
    )


def _fault_of_a_stray(entry: Any, frame: Any) -> Fault:
    if not isinstance(entry, dict):
        return Fault.NO_ENTRY
    return Fault.REPEATED_KEY if frame is _REPEATED else Fault.OTHER_FRAME


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
