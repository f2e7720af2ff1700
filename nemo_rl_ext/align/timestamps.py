# SPDX-License-Identifier: Apache-2.0
"""Which frames a tubelet holds: the text that the engine writes before its run, and how it is read.

The form is `get_video_repl`'s (vllm/transformers_utils/processors/nano_nemotron_vl.py):
`Frame 1 sampled at 0.00 seconds and frame 2 sampled at 0.50 seconds: <img>...</img>`, tubelets joined by newlines,
times being `index * int(1000 / fps) / 1000` with two decimals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

_FRAME = r"rame (\d{1,9}) sampled at (\d{1,9}\.\d\d) seconds"
_LABEL = re.compile(rf"F{_FRAME}(?: and f{_FRAME})*: \Z")
_ONE = re.compile(rf"[Ff]{_FRAME}")
_LAST = re.compile(rf"{_FRAME}: \Z")
LONGEST_LABEL = 4096
"""Characters before a run in which its label is looked for."""


@dataclass(frozen=True)
class TubeletLabel:
    """What the text before a run says: frame numbers from 1, and their times as written."""

    numbers: tuple[int, ...]
    times: tuple[str, ...]
    whole: bool = True
    """False where only the end of a label was left."""


def read_label(text: str) -> TubeletLabel | None:
    """The label at the end of the text before a run, or None where the run is a still image's.

    Of a label whose beginning is damaged the last frame is returned, not `whole`: its run is no still image's.
    """
    end = text[-LONGEST_LABEL:]
    match = _LABEL.search(end)
    frames = _ONE.findall(match.group()) if match else _LAST.findall(end)
    if not frames:
        return None
    numbers, times = zip(*frames, strict=True)
    return TubeletLabel(tuple(map(int, numbers)), times, whole=match is not None)


def names_frames(text: str) -> bool:
    """Whether a text says of any frame when it was sampled."""
    return _ONE.search(text) is not None


def frame_indices(times: Sequence[str], fps: float, *, hint: Sequence[int] = ()) -> tuple[int, ...] | None:
    """Indices of the frames that have these times in a clip of `fps`, or None where a time fits no frame.

    Above 100 frames per second several frames share a written time; `hint` (the sampler's own indices) is then
    followed where it fits, and None is returned where it does not.
    """
    duration_ms = int(1000 / fps) if fps > 0 else 0
    if duration_ms < 1:
        return None
    out: list[int] = []
    for place, time in enumerate(times):
        guess = round(float(time) * 1000 / duration_ms)
        reach = 1 + 10 // duration_ms
        fits = [
            index
            for index in range(max(0, guess - reach), guess + reach + 1)
            if f"{index * duration_ms / 1000:.2f}" == time
        ]
        if len(fits) > 1 and place < len(hint) and hint[place] in fits:
            fits = [hint[place]]
        if len(fits) != 1:
            return None
        out.append(fits[0])
    return tuple(out)


def frame_duration_ms(fps: float) -> int:
    """The engine's whole milliseconds per frame. Raises `ValueError` for a rate that leaves none."""
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"expected a positive frame rate, got {fps}")
    duration = int(1000.0 / fps)
    if duration < 1:
        raise ValueError(f"a frame rate of {fps} leaves no whole millisecond per frame")
    return duration


def timestamps(frame_indices: Sequence[int], fps: float) -> tuple[float, ...]:
    """Seconds of each frame, as the engine counts them: index x whole milliseconds per frame."""
    duration = frame_duration_ms(fps)
    return tuple(int(index) * duration / 1000.0 for index in frame_indices)


def tubelet_texts(frame_indices: Sequence[int], fps: float, temporal_patch_size: int) -> tuple[str, ...]:
    """The text that stands before the run of each tubelet, the newline between tubelets included."""
    times = timestamps(frame_indices, fps)
    texts = []
    for start in range(0, len(times), temporal_patch_size):
        frames = [
            f"{'frame' if offset else 'Frame'} {start + offset + 1} sampled at {time:.2f} seconds"
            for offset, time in enumerate(times[start : start + temporal_patch_size])
        ]
        texts.append(("\n" if start else "") + " and ".join(frames) + ": ")
    return tuple(texts)
