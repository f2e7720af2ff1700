# SPDX-License-Identifier: Apache-2.0
"""A small set in SA-V's own file format: clips with painted shapes that move, leave and come back.

    python -m resources_servers.sav_tracks.synthetic OUT --clip clip.mp4 --clip other.mp4

Without `--clip` the background is drawn too, so that nobody else's pictures are in the set.
Writes `{id}.mp4` (24 fps), `{id}_manual.json` and `names.json`. The masks are the painted pixels, so they are exact.
No SA-V data is involved.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from resources_servers.sav_tracks.annotation import FRAMES_PER_ENTRY, VIDEO_FPS
from resources_servers.sav_tracks.rle import encode

_COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 70, 230), "yellow": (240, 220, 40)}
_FORMS = ("disc", "square", "diamond")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One painted object on a straight path; it is hidden while `hidden[0] <= t < hidden[1]` (shares of the clip)."""

    name: str
    form: str
    colour: tuple[int, int, int]
    radius: float
    start: tuple[float, float]
    end: tuple[float, float]
    hidden: tuple[float, float]

    def mask(self, time: float, height: int, width: int) -> np.ndarray:
        """Boolean `[height, width]` at `time` in [0, 1]; sizes and places are shares of the frame's shorter side."""
        if self.hidden[0] <= time < self.hidden[1]:
            return np.zeros((height, width), dtype=bool)
        row = (self.start[0] + time * (self.end[0] - self.start[0])) * height
        column = (self.start[1] + time * (self.end[1] - self.start[1])) * width
        radius = self.radius * min(height, width)
        down, right = (
            np.abs(np.arange(height) + 0.5 - row)[:, None],
            np.abs(np.arange(width) + 0.5 - column)[None],
        )
        if self.form == "disc":
            return down**2 + right**2 <= radius**2
        return np.maximum(down, right) <= radius if self.form == "square" else down + right <= radius


def random_shapes(rng: np.random.Generator, num_shapes: int) -> list[Shape]:
    """Shapes of distinct colours; the first is always visible, the others are hidden for a while."""
    colours = rng.permutation(list(_COLOURS))[:num_shapes]
    shapes = []
    for index, colour in enumerate(colours.tolist()):
        form = _FORMS[int(rng.integers(len(_FORMS)))]
        start = float(rng.uniform(0.25, 0.6))
        shapes.append(
            Shape(
                name=f"{colour} {form}",
                form=form,
                colour=_COLOURS[colour],
                radius=float(rng.uniform(0.1, 0.2)),
                start=tuple(rng.uniform(0.2, 0.8, 2).tolist()),
                end=tuple(rng.uniform(0.2, 0.8, 2).tolist()),
                hidden=(start, start + float(rng.uniform(0.2, 0.35))) if index else (2.0, 2.0),
            )
        )
    return shapes


def paint_clip(frames: np.ndarray, shapes: list[Shape]) -> tuple[np.ndarray, list[list[dict[str, Any]]]]:
    """Painted frames `[frames, height, width, 3]` and SA-V's `masklet`; later shapes cover earlier ones."""
    painted, masklet = frames.copy(), []
    num_frames, height, width = frames.shape[:3]
    for index in range(num_frames):
        covered = np.zeros((height, width), dtype=bool)
        visible = []
        for shape in reversed(shapes):
            mask = shape.mask(index / num_frames, height, width) & ~covered
            painted[index][mask] = shape.colour
            covered |= mask
            visible.append(mask)
        if index % FRAMES_PER_ENTRY == 0:
            masklet.append([encode(mask) for mask in reversed(visible)])
    return painted, masklet


def drawn_background(rng: np.random.Generator, num_frames: int, height: int, width: int) -> np.ndarray:
    """Drifting waves of colour, uint8 `[num_frames, height, width, 3]`, dim enough for the shapes to stand out."""
    rows, columns = np.arange(height)[:, None, None], np.arange(width)[None, :, None]
    frequency, phase, drift = (
        rng.uniform(0.01, 0.06, (2, 3)),
        rng.uniform(0, 6.3, 3),
        rng.uniform(-0.1, 0.1, 3),
    )
    frames = [
        110 + 50 * np.sin(rows * frequency[0] + columns * frequency[1] + phase + drift * index)
        for index in range(num_frames)
    ]
    return np.stack(frames).astype(np.uint8)


def clip_background(rng: np.random.Generator, clip: Path, num_frames: int, height: int) -> np.ndarray:
    """A stretch of a real clip, scaled to `height`; the last frame is repeated where the clip is too short."""
    import cv2
    import decord

    reader = decord.VideoReader(str(clip), num_threads=1)
    start = int(rng.integers(max(1, len(reader) - num_frames)))
    frames = reader.get_batch([min(start + i, len(reader) - 1) for i in range(num_frames)]).asnumpy()
    width = round(frames.shape[2] * height / frames.shape[1] / 2) * 2
    return np.stack([cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA) for frame in frames])


def write_set(
    out: Path, clips: list[Path], *, num_videos: int, num_frames: int, num_shapes: int, height: int, seed: int
) -> None:
    """Write `num_videos` videos with annotations, taking the clips in turn; the same arguments give the same set."""
    out.mkdir(parents=True, exist_ok=True)
    names = {}
    for index in range(num_videos):
        rng = np.random.default_rng([seed, index])
        if clips:
            frames = clip_background(rng, clips[index % len(clips)], num_frames, height)
        else:
            frames = drawn_background(rng, num_frames, height, height * 16 // 9 // 2 * 2)
        shapes = random_shapes(rng, num_shapes)
        painted, masklet = paint_clip(frames, shapes)
        video_id = f"syn_{index:06d}"
        names[video_id] = {str(i): shape.name for i, shape in enumerate(shapes)}
        _write_video(out / f"{video_id}.mp4", painted)
        annotation = {
            "video_id": video_id,
            "video_frame_count": num_frames,
            "video_height": height,
            "video_width": frames.shape[2],
            "masklet_id": list(range(num_shapes)),
            "masklet_num": num_shapes,
            "masklet_first_appeared_frame": [0.0] * num_shapes,
            "masklet_type": ["manual"] * num_shapes,
            "masklet": masklet,
        }
        (out / f"{video_id}_manual.json").write_text(json.dumps(annotation), encoding="utf-8")
    (out / "names.json").write_text(json.dumps(names, indent=1), encoding="utf-8")


def _write_video(path: Path, frames: np.ndarray) -> None:
    import cv2

    writer = cv2.VideoWriter(
        str(path), cv2.VideoWriter.fourcc(*"mp4v"), VIDEO_FPS, (frames.shape[2], frames.shape[1])
    )
    if not writer.isOpened():
        raise RuntimeError(
            f"{path}: this OpenCV build cannot write MP4; install opencv-python-headless from PyPI"
        )
    for frame in frames:
        writer.write(np.ascontiguousarray(frame[..., ::-1]))
    writer.release()


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write a small synthetic set in SA-V's file format.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--clip", type=Path, action="append", default=[], help="real video; may be repeated")
    parser.add_argument("--num-videos", type=int, default=8)
    parser.add_argument("--num-frames", type=int, default=48)
    parser.add_argument("--num-shapes", type=int, default=2)
    parser.add_argument("--height", type=int, default=144)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for clip in options.clip:
        if not clip.is_file():
            parser.exit(2, f"--clip {clip}: no such file\n")
    write_set(
        options.out,
        options.clip,
        num_videos=options.num_videos,
        num_frames=options.num_frames,
        num_shapes=options.num_shapes,
        height=options.height,
        seed=options.seed,
    )
    print(f"{options.num_videos} videos written to {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
