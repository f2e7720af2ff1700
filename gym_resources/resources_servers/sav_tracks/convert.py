# SPDX-License-Identifier: Apache-2.0
"""Turn SA-V videos and annotations into manifest rows.

    python -m resources_servers.sav_tracks.convert SAV_DIR --task box --media frames --out rows.jsonl

Reads every `{id}_manual.json` (or `_auto.json`, with `--source auto`) of a folder, next to its `{id}.mp4`. `--media
frames` writes the annotated frames as JPEG files and lists them as images; `inline` puts them into the row as data
URLs, which any server can read; `video` refers to the video file itself and tells the policy the frames' times.
"""

import argparse
import base64
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from resources_servers.sav_tracks.annotation import (
    FRAMES_PER_ENTRY,
    VIDEO_FPS,
    Annotation,
    AnnotationError,
    read_annotation,
    sample_entries,
    true_objects,
)
from resources_servers.sav_tracks.prompts import frame_times, instruction
from resources_servers.sav_tracks.truth import Task, read_truth

logger = logging.getLogger("nemo_rl_ext.gym.sav_tracks")

AGENT = "sav_tracks_simple_agent"


class Media(StrEnum):
    """How a row carries its frames."""

    FRAMES = "frames"
    INLINE = "inline"
    VIDEO = "video"


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """What the rows look like.

    num_frames: annotated frames per row, evenly spread over the video.
    max_objects: objects per row, the largest first.
    mask_side: longer side of the masks in the row (J&F, point-in-mask); 0 leaves them out.
    frame_side: longer side of the frames in pixels; 0 keeps their size.
    jpeg_quality: of the written frames.
    names: {"video id": {"object id": "name"}}; objects without a name are introduced by a box.
    """

    task: Task
    media: Media = Media.FRAMES
    source: str = "manual"
    num_frames: int = 8
    max_objects: int = 5
    mask_side: int = 256
    frame_side: int = 0
    jpeg_quality: int = 95
    names: dict[str, dict[str, str]] = field(default_factory=dict)


def convert_folder(folder: Path, *, frames_folder: Path, config: ConvertConfig) -> Iterator[dict[str, Any]]:
    """Rows of every annotated video in `folder`, in order of name; videos without a usable object are logged."""
    annotations = sorted(folder.glob(f"*_{config.source}.json"))
    if not annotations:
        raise AnnotationError(
            f"{folder}: no *_{config.source}.json; expected SA-V's {{id}}_{config.source}.json files"
        )
    for path in annotations:
        row = convert_video(read_annotation(path), folder, frames_folder=frames_folder, config=config)
        if row is None:
            logger.warning("%s: no object is visible in a scored frame; no row made", path)
            continue
        yield row


def convert_video(
    annotation: Annotation, folder: Path, *, frames_folder: Path, config: ConvertConfig
) -> dict[str, Any] | None:
    """One row, or None when no object qualifies. Raises `AnnotationError` when the video does not fit."""
    entries = sample_entries(annotation.num_entries, config.num_frames)
    objects = true_objects(
        annotation,
        entries,
        names=config.names.get(annotation.video_id, {}),
        introduce_by_box=config.task is not Task.REF,
        max_objects=config.max_objects,
        mask_side=config.mask_side,
    )
    if not objects:
        return None
    video = folder / f"{annotation.video_id}.mp4"
    if not video.is_file():
        raise AnnotationError(f"{annotation.path}: its video {video} does not exist")
    row_id = f"{annotation.video_id}_{config.source}_{config.task}"
    metadata = {"row_id": row_id, "task": config.task.value, "num_frames": len(entries), "objects": objects}
    read_truth(metadata)
    numbers = [entry * FRAMES_PER_ENTRY for entry in entries]
    question = instruction(config.task, num_frames=len(entries), objects=objects)
    if config.media is Media.VIDEO:
        times = frame_times([number / VIDEO_FPS for number in numbers])
        content: list[dict[str, Any]] = [
            {"type": "input_video", "video_url": str(video.resolve())},
            {"type": "input_text", "text": f"{times}\n{question}"},
        ]
    else:
        content = []
        pictures = _jpegs(video, numbers, config)
        for index, (number, picture) in enumerate(zip(numbers, pictures, strict=True)):
            content.append({"type": "input_text", "text": f"Frame {index}:"})
            url = _place_picture(
                picture, frames_folder / annotation.video_id / f"{number:05d}.jpg", config.media
            )
            content.append({"type": "input_image", "image_url": url, "detail": "auto"})
        content.append({"type": "input_text", "text": question})
    return {
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        "verifier_metadata": metadata,
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
    }


def _jpegs(video: Path, numbers: list[int], config: ConvertConfig) -> list[bytes]:
    # only this path needs a decoder; scoring and validation run without one
    import decord
    from PIL import Image

    reader = decord.VideoReader(str(video), num_threads=1)
    if numbers[-1] >= len(reader):
        raise AnnotationError(
            f"{video}: the annotation reaches frame {numbers[-1]} but the video has {len(reader)} frames"
        )
    pictures = []
    for frame in reader.get_batch(numbers).asnumpy():
        image = Image.fromarray(frame)
        if config.frame_side:
            image.thumbnail((config.frame_side, config.frame_side), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=config.jpeg_quality)
        pictures.append(buffer.getvalue())
    return pictures


def _place_picture(picture: bytes, path: Path, media: Media) -> str:
    if media is Media.INLINE:
        return "data:image/jpeg;base64," + base64.b64encode(picture).decode("ascii")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    return str(path.resolve())


def write_rows(rows: Iterator[dict[str, Any]], out: Path) -> int:
    """Write a JSONL file in one move, so that a failed run leaves none behind; returns the number of rows."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    num_rows = 0
    try:
        with part.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
                num_rows += 1
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return num_rows


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 on success, 2 with one line on standard error for bad input."""
    defaults = ConvertConfig(task=Task.BOX)
    parser = argparse.ArgumentParser(description="Turn SA-V videos and annotations into manifest rows.")
    parser.add_argument(
        "folder", type=Path, help="folder with {id}.mp4 and {id}_manual.json or {id}_auto.json"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--task", type=Task, choices=list(Task), required=True)
    parser.add_argument("--media", type=Media, choices=list(Media), default=defaults.media)
    parser.add_argument("--source", choices=["manual", "auto"], default=defaults.source)
    parser.add_argument("--num-frames", type=int, default=defaults.num_frames)
    parser.add_argument("--max-objects", type=int, default=defaults.max_objects)
    parser.add_argument("--mask-side", type=int, default=defaults.mask_side)
    parser.add_argument("--frame-side", type=int, default=defaults.frame_side)
    parser.add_argument("--jpeg-quality", type=int, default=defaults.jpeg_quality)
    parser.add_argument(
        "--names", type=Path, help='JSON {"video id": {"object id": "name"}}; SA-V has no names'
    )
    options = parser.parse_args(arguments)
    frames_folder = options.out.parent / f"{options.out.stem}_frames"
    try:
        config = ConvertConfig(
            task=options.task,
            media=options.media,
            source=options.source,
            num_frames=options.num_frames,
            max_objects=options.max_objects,
            mask_side=options.mask_side,
            frame_side=options.frame_side,
            jpeg_quality=options.jpeg_quality,
            names=json.loads(options.names.read_text(encoding="utf-8")) if options.names else {},
        )
        num_rows = write_rows(
            convert_folder(options.folder, frames_folder=frames_folder, config=config), options.out
        )
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    print(f"{num_rows} rows written to {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
