# SPDX-License-Identifier: Apache-2.0
"""Ground truth of one row: read from `verifier_metadata`, checked, and cached by content."""

import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from resources_servers.sav_tracks.answer import Shape
from resources_servers.sav_tracks.boxes import TrueRegions
from resources_servers.sav_tracks.regions import GRID
from resources_servers.sav_tracks.rle import Mask, MaskError, decode

MAX_FRAMES = 512
MAX_OBJECTS = 64
MAX_PLACES = 4096
MAX_MASK_PIXELS = 512 * 512
_BYTES_PER_PLACE = 256


class Task(StrEnum):
    """What the policy is asked for."""

    BOX = "box"
    PT = "pt"
    REF = "ref"

    @property
    def shape(self) -> Shape:
        """The coordinate that answers this task."""
        return Shape.POINT if self is Task.PT else Shape.BOX


class GroundTruthError(ValueError):
    """A row's ground truth that cannot be scored; says which field, what was expected and what came."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrueObject:
    """One object; frames that are not `scored` (the one that the prompt shows) count neither way."""

    id: str
    name: str | None
    visible: np.ndarray  # [frames] bool
    scored: np.ndarray  # [frames] bool
    boxes: np.ndarray  # [frames, 4] on the 0-1000 grid; zero where absent
    masks: tuple[Mask | None, ...] | None  # per frame; None where the row carries no masks


@dataclass(frozen=True, kw_only=True, eq=False)
class GroundTruth:
    """A row's checked ground truth."""

    task: Task
    num_frames: int
    objects: tuple[TrueObject, ...]

    @cached_property
    def regions(self) -> tuple[TrueRegions, np.ndarray] | None:
        """The masks as J and F need them, prepared on first use, and `[objects, frames]`: each mask's number or -1."""
        numbers = np.full((len(self.objects), self.num_frames), -1)
        masks = []
        for index, item in enumerate(self.objects):
            for frame, mask in enumerate(item.masks or ()):
                if mask is not None:
                    numbers[index, frame] = len(masks)
                    masks.append(mask)
        return (TrueRegions.of(masks), numbers) if masks else None

    @cached_property
    def num_bytes(self) -> int:
        """Estimate of the memory held, regions included whether or not they were prepared."""
        total = _BYTES_PER_PLACE * self.num_frames * len(self.objects)
        for mask in (mask for item in self.objects for mask in item.masks or () if mask is not None):
            total += 2 * mask.ends.nbytes + mask.height * math.ceil(mask.width / 8) + 32 * mask.ends.size
        return total


def read_truth(metadata: Any) -> GroundTruth:
    """Check a row's `verifier_metadata` and build its ground truth.

    Fields: `task` (box, pt, ref), `num_frames`, `objects`, a list of `{"id", "name", "boxes", "masks",
    "prompt_frame"}`. `boxes[t]` is `[x1, y1, x2, y2]` in integers on the 0-1000 grid or null for an absent
    object; `masks[t]`, a COCO RLE or null, is required for `pt` and optional otherwise; `prompt_frame`, optional,
    is the frame whose box the prompt gives away. Raises `GroundTruthError`.
    """
    if not isinstance(metadata, dict):
        raise GroundTruthError(f"verifier_metadata: expected an object, got {type(metadata).__name__}")
    name = metadata.get("task")
    if not isinstance(name, str) or name not in set(Task):
        raise GroundTruthError(f"task: expected one of {', '.join(Task)}, got {_describe(name)}")
    task = Task(name)
    num_frames = metadata.get("num_frames")
    if not _is_count(num_frames, MAX_FRAMES):
        raise GroundTruthError(f"num_frames: expected 1 to {MAX_FRAMES}, got {_describe(num_frames)}")
    listed = metadata.get("objects")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_OBJECTS:
        raise GroundTruthError(f"objects: expected a list of 1 to {MAX_OBJECTS}, got {_describe(listed)}")
    if num_frames * len(listed) > MAX_PLACES:
        raise GroundTruthError(
            f"objects: {len(listed)} objects in {num_frames} frames are more than {MAX_PLACES} places; split the row"
        )
    objects = tuple(_read_object(item, f"objects[{i}]", task, num_frames) for i, item in enumerate(listed))
    sizes = {(mask.height, mask.width) for item in objects for mask in item.masks or () if mask is not None}
    if len(sizes) > 1:
        raise GroundTruthError(f"objects: all masks of a row must have one size, got {sorted(sizes)}")
    ids = [item.id for item in objects]
    if len(set(ids)) != len(ids):
        raise GroundTruthError(f"objects: ids must be unique, got {ids}")
    return GroundTruth(task=task, num_frames=num_frames, objects=objects)


def _read_object(item: Any, where: str, task: Task, num_frames: int) -> TrueObject:
    if not isinstance(item, dict):
        raise GroundTruthError(f"{where}: expected an object, got {type(item).__name__}")
    identifier, name = item.get("id"), item.get("name")
    if not isinstance(identifier, str) or not identifier.strip():
        raise GroundTruthError(f"{where}.id: expected a non-empty string, got {_describe(identifier)}")
    if name is not None and not isinstance(name, str):
        raise GroundTruthError(f"{where}.name: expected a string, got {_describe(name)}")
    boxes = _frames_of(item, "boxes", where, num_frames)
    coordinates = np.zeros((num_frames, 4))
    for frame, box in enumerate(boxes):
        if box is None:
            continue
        if not isinstance(box, list) or len(box) != 4 or not all(_is_on_grid(number) for number in box):
            raise GroundTruthError(
                f"{where}.boxes[{frame}]: expected four integers from 0 to {GRID} or null, got {_describe(box)}"
            )
        if box[0] >= box[2] or box[1] >= box[3]:
            raise GroundTruthError(f"{where}.boxes[{frame}]: expected x1 < x2 and y1 < y2, got {box}")
        coordinates[frame] = box
    visible = np.array([box is not None for box in boxes])
    masks = _read_masks(item, where, num_frames, visible)
    if task is Task.PT and masks is None:
        raise GroundTruthError(f"{where}.masks: task pt needs one mask per frame, got none")
    scored = np.ones(num_frames, dtype=bool)
    shown = item.get("prompt_frame")
    if shown is not None:
        if not _is_count(shown, num_frames - 1, least=0):
            raise GroundTruthError(
                f"{where}.prompt_frame: expected 0 to {num_frames - 1}, got {_describe(shown)}"
            )
        scored[shown] = False
    if not np.any(visible & scored):
        raise GroundTruthError(
            f"{where}: visible in no scored frame; an object that never appears would reward claiming absence"
        )
    return TrueObject(
        id=identifier.strip(), name=name, visible=visible, scored=scored, boxes=coordinates, masks=masks
    )


def _read_masks(
    item: dict[str, Any], where: str, num_frames: int, visible: np.ndarray
) -> tuple[Mask | None, ...] | None:
    if item.get("masks") is None:
        return None
    masks: list[Mask | None] = []
    for frame, rle in enumerate(_frames_of(item, "masks", where, num_frames)):
        try:
            mask = None if rle is None else decode(rle, max_pixels=MAX_MASK_PIXELS)
        except MaskError as error:
            raise GroundTruthError(f"{where}.masks[{frame}]: {error}") from None
        present = mask is not None and mask.area > 0
        if present != visible[frame]:
            raise GroundTruthError(
                f"{where}.masks[{frame}]: the mask is {'not empty' if present else 'empty'}, "
                f"but boxes[{frame}] says {'visible' if visible[frame] else 'absent'}"
            )
        masks.append(mask if present else None)
    return tuple(masks)


def _frames_of(item: dict[str, Any], key: str, where: str, num_frames: int) -> list[Any]:
    values = item.get(key)
    if not isinstance(values, list) or len(values) != num_frames:
        raise GroundTruthError(f"{where}.{key}: expected a list of {num_frames}, got {_describe(values)}")
    return values


def _describe(value: Any) -> str:
    """Short and safe for any JSON value: a deeply nested one cannot be printed, a long number must not be."""
    if value is None or isinstance(value, (str, float, bool)):
        return repr(value)[:60]
    if isinstance(value, int):
        return str(value) if abs(value) < 10**12 else "an integer of more than twelve digits"
    if isinstance(value, list):
        short = len(value) <= 4 and all(isinstance(item, (int, float)) for item in value)
        return f"[{', '.join(map(_describe, value))}]" if short else f"a list of {len(value)}"
    return f"a {type(value).__name__}"


def _is_count(value: Any, most: int, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_on_grid(value: Any) -> bool:
    return _is_count(value, GRID, least=0)


class TruthCache:
    """Least recently used ground truths, keyed by their content, within `max_bytes`.

    All generations of one prompt carry the same metadata, so each row is decoded once. Keys are content hashes, not
    row ids: two data sets may use one id. Not for use from several threads at once.
    """

    def __init__(self, *, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._rows: OrderedDict[bytes, GroundTruth] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, metadata: Any) -> GroundTruth:
        """The checked ground truth; raises `GroundTruthError` like `read_truth`."""
        try:
            content = json.dumps(metadata, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise GroundTruthError(f"verifier_metadata: not JSON ({type(error).__name__})") from None
        key = blake2b(content.encode(), digest_size=16).digest()
        known = self._rows.get(key)
        if known is not None:
            self.num_hits += 1
            self._rows.move_to_end(key)
            return known
        self.num_misses += 1
        truth = read_truth(metadata)
        self._rows[key] = truth
        self.num_bytes += truth.num_bytes
        while self.num_bytes > self.max_bytes and self._rows:
            _, dropped = self._rows.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
        return truth
