# SPDX-License-Identifier: Apache-2.0
"""Which frames of a clip are used.

Sampling is NeMo-RL's `nemotron_vl` style (nemo_rl/models/generation/vllm/video_utils.py) or vLLM's own uniform one
(`VideoBackend.compute_frames_index_to_sample`, vllm/multimodal/video.py).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np

SamplingStyle = Literal["nemotron_vl", "uniform"]

MAX_FPS = 1000
"""The engine counts whole milliseconds per frame: a faster clip has none."""


def num_sampled_frames(num_frames: int, total_num_frames: int, temporal_patch_size: int = 1) -> int:
    """How many frames `nemotron_vl` takes: rounded up to whole tubelets where the clip and the request allow it.

    A clip shorter than one tubelet still gives one: its frames are then repeated.
    """
    num = min(max(1, num_frames), total_num_frames)
    rest = num % temporal_patch_size
    if not rest:
        return num
    rounded_up = num - rest + temporal_patch_size
    if rounded_up <= min(total_num_frames, num_frames):
        return rounded_up
    return max(temporal_patch_size, num - rest)


def sample_frames(
    total_num_frames: int,
    num_frames: int,
    *,
    temporal_patch_size: int = 1,
    fps: float = 1.0,
    style: SamplingStyle = "nemotron_vl",
) -> tuple[int, ...]:
    """Indices of the sampled frames, ascending, within `[0, total_num_frames)`.

    `nemotron_vl` spaces them evenly from the first to the last timestamp and rounds to the nearest frame, halves
    to even; `fps`, frames per second, only decides where that is a tie. `uniform` takes exactly
    `min(num_frames, total_num_frames)` and rounds down. Raises `ValueError` for a clip without frames or an
    unknown style.
    """
    if total_num_frames < 1 or num_frames < 1 or temporal_patch_size < 1:
        raise ValueError(
            "sampling needs at least one frame, one requested frame and a temporal patch size of one, got "
            f"{total_num_frames}, {num_frames} and {temporal_patch_size}"
        )
    if style == "uniform":
        num = min(num_frames, total_num_frames)
        return tuple(np.linspace(0, total_num_frames - 1, num, dtype=int).tolist())
    if style != "nemotron_vl":
        raise ValueError(
            f"unknown sampling style {style!r}, expected one of {', '.join(get_args(SamplingStyle))}"
        )
    num = num_sampled_frames(num_frames, total_num_frames, temporal_patch_size)
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"expected a positive frame rate, got {fps}")
    # NeMo-RL goes through the duration and back; ties fall as its rounding errors have it.
    rate = total_num_frames / (total_num_frames / fps)
    times = np.linspace(0.0, (total_num_frames - 1) / rate, num)
    return tuple(max(0, min(round(float(time) * rate), total_num_frames - 1)) for time in times)
