# SPDX-License-Identifier: Apache-2.0
"""SA-V annotation files (`{id}_manual.json`, `{id}_auto.json`) and the rows' ground truth made from them.

SA-V annotates every fourth frame of a 24 fps video: entry k of `masklet` describes frame 4k and holds one COCO RLE
per object, all background where the object is absent. https://ai.meta.com/datasets/segment-anything-video/
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from resources_servers.sav_tracks.regions import GRID
from resources_servers.sav_tracks.rle import Mask, MaskError, decode, encode

FRAMES_PER_ENTRY = 4
VIDEO_FPS = 24.0
_MAX_SOURCE_PIXELS = 1 << 24


class AnnotationError(ValueError):
    """A SA-V annotation that cannot be converted; names the file and the field."""


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """One video's masklets; `masklet[k][j]` is the RLE of object `object_ids[j]` in frame `4 * k`."""

    video_id: str
    object_ids: tuple[str, ...]
    masklet: list[list[Any]]
    path: Path

    @property
    def num_entries(self) -> int:
        """Annotated frames."""
        return len(self.masklet)

    def mask(self, entry: int, index: int) -> Mask:
        """One object's region at one annotated frame; raises `AnnotationError`."""
        try:
            return decode(self.masklet[entry][index], max_pixels=_MAX_SOURCE_PIXELS)
        except MaskError as error:
            raise AnnotationError(f"{self.path}: masklet[{entry}][{index}]: {error}") from None


def read_annotation(path: Path) -> Annotation:
    """Read one SA-V annotation file; raises `AnnotationError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AnnotationError(f"{path}: not readable as JSON: {error}") from None
    masklet = content.get("masklet") if isinstance(content, dict) else None
    if not isinstance(masklet, list) or not masklet or not all(isinstance(entry, list) for entry in masklet):
        raise AnnotationError(f"{path}: expected 'masklet', a list over frames of lists over objects")
    num_objects = {len(entry) for entry in masklet}
    if len(num_objects) != 1 or 0 in num_objects:
        raise AnnotationError(
            f"{path}: every frame must list the same objects, got {sorted(num_objects)} per frame"
        )
    ids = content.get("masklet_id", list(range(num_objects.pop())))
    if not isinstance(ids, list) or len(ids) != len(masklet[0]) or len(set(map(str, ids))) != len(ids):
        raise AnnotationError(f"{path}: expected 'masklet_id', one unique id per object ({len(masklet[0])})")
    return Annotation(
        video_id=str(content.get("video_id", path.name.rpartition("_")[0] or path.stem)),
        object_ids=tuple(map(str, ids)),
        masklet=masklet,
        path=path,
    )


def sample_entries(num_entries: int, num_frames: int) -> list[int]:
    """Annotated frames of one row: evenly spread over the video, first and last included, all of them if fewer."""
    return sorted(
        set(np.linspace(0, num_entries - 1, min(num_frames, num_entries)).round().astype(int).tolist())
    )


def true_objects(
    annotation: Annotation,
    entries: list[int],
    *,
    names: dict[str, str],
    introduce_by_box: bool,
    max_objects: int,
    mask_side: int,
) -> list[dict[str, Any]]:
    """Ground-truth objects of one row, the largest first, at most `max_objects`.

    `mask_side` bounds the longer side of the masks that the row carries; 0 leaves the masks out. Boxes come from the
    full-size masks. With `introduce_by_box` an object without a name gets a `prompt_frame`. Objects that no scored
    frame shows are left out.
    """
    found = []
    for index, identifier in enumerate(annotation.object_ids):
        masks = [annotation.mask(entry, index) for entry in entries]
        boxes = [grid_box(mask) for mask in masks]
        shown = [frame for frame, box in enumerate(boxes) if box is not None]
        item: dict[str, Any] = {"id": identifier, "boxes": boxes}
        name = names.get(identifier)
        if name is not None:
            item["name"] = name
        elif introduce_by_box and shown:
            item["prompt_frame"] = shown[0]
            shown = shown[1:]
        if not shown:
            continue
        if mask_side:
            item["masks"] = [encode(shrink(mask, mask_side)) if mask.area else None for mask in masks]
        found.append((sum(mask.area / (mask.height * mask.width) for mask in masks), item))
    found.sort(key=lambda pair: -pair[0])
    return [item for _, item in found[:max_objects]]


def grid_box(mask: Mask) -> list[int] | None:
    """The mask's tight box in integers on the 0-1000 grid, never empty; None for an empty mask."""
    bounds = mask.bounds()
    if bounds is None:
        return None
    left, top, right, bottom = bounds
    x1, x2 = _round_span(left, right, mask.width)
    y1, y2 = _round_span(top, bottom, mask.height)
    return [x1, y1, x2, y2]


def _round_span(low: int, high: int, length: int) -> tuple[int, int]:
    start = min(round(low * GRID / length), GRID - 1)
    return start, max(round(high * GRID / length), start + 1)


def shrink(mask: Mask, side: int) -> np.ndarray:
    """Boolean mask whose longer side is at most `side`; a pixel is set where most of its source area is.

    An object too thin to fill half of any pixel keeps the pixel that it fills most.
    """
    dense = mask.dense()
    scale = side / max(mask.height, mask.width)
    if scale >= 1:
        return dense
    height, width = max(1, round(mask.height * scale)), max(1, round(mask.width * scale))
    rows = np.linspace(0, mask.height, height + 1).round().astype(int)
    columns = np.linspace(0, mask.width, width + 1).round().astype(int)
    counts = np.add.reduceat(np.add.reduceat(dense.astype(np.int64), rows[:-1], axis=0), columns[:-1], axis=1)
    share = counts / (np.diff(rows)[:, None] * np.diff(columns)[None])
    small = share >= 0.5
    if not small.any():
        small.flat[int(share.argmax())] = True
    return small
