# SPDX-License-Identifier: Apache-2.0
"""Clips, and lists of cached frames, as the frames that engine and trainer both use.

The embedded engine is handed these frames with `DecodedVideo.engine_metadata()`, and the aligners decode the same
way: one decode rule for both sides. Every index gives the frame that vLLM's own loader gives it
(vllm/multimodal/video.py), or the clip is refused, so that a rollout from an engine that decodes for itself aligns as
well, given its frame indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nemo_rl_ext.align.timestamps import timestamps
from nemo_rl_ext.media.containers import HEAD_BYTES, container_problem
from nemo_rl_ext.media.decoding import DecoderFailure, DecoderMissing, decoder
from nemo_rl_ext.media.errors import MediaDecodeError, describe
from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.sampling import MAX_FPS, SamplingStyle
from nemo_rl_ext.media.sources import open_media

Backend = Literal["opencv", "torchcodec"]


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """What a clip's container says about it."""

    num_frames: int
    """Declared; a damaged file holds fewer."""
    fps: float
    size: tuple[int, int]
    """`(height, width)` in pixels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodedVideo:
    """The sampled frames of one clip."""

    frames: np.ndarray
    """uint8 `[frames, height, width, 3]`, RGB, C-contiguous."""
    frame_indices: tuple[int, ...]
    """Index within the clip of each frame; equal neighbours where a short clip repeats its frames."""
    fps: float
    """Average frames per second of the clip."""
    total_num_frames: int
    """Decodable frames of the clip."""
    declared_num_frames: int
    """Frames that its container declares; more than `total_num_frames` in a damaged file."""
    source: str
    """The reference that it was read from."""
    backend: str
    time_error_s: float = 0.0
    """How far a frame's own time is from index / fps at most, in seconds; large where the rate varies."""

    @cached_property
    def content_hash(self) -> str:
        """`identity.pixel_digest` of the frames, made when it is first asked for."""
        return pixel_digest(self.frames)

    @property
    def size(self) -> tuple[int, int]:
        """`(height, width)` of every frame in pixels."""
        return self.frames.shape[1], self.frames.shape[2]

    @property
    def timestamps(self) -> tuple[float, ...]:
        """Seconds of each frame as the engine's prompt text has them (`sampling.timestamps`)."""
        return timestamps(self.frame_indices, self.fps)

    def remarks(self) -> tuple[str, ...]:
        """What a user should know of a clip that is used all the same: frames that are missing, and false times."""
        found = []
        if self.total_num_frames < self.declared_num_frames:
            found.append(
                f"only {self.total_num_frames} of the {self.declared_num_frames} frames that it declares can be "
                "decoded, and frames are sampled from those"
            )
        if self.time_error_s > 1.5 / self.fps:
            found.append(
                f"its frames do not keep to its average rate of {self.fps:.4g} per second: the times that the prompt "
                f"names are up to {self.time_error_s:.2f} s from those that the frames have"
            )
        return tuple(found)

    def engine_metadata(self) -> dict[str, Any]:
        """The metadata that vLLM wants beside the frames, saying that they are sampled already."""
        return {
            "total_num_frames": self.total_num_frames,
            "fps": self.fps,
            "duration": self.total_num_frames / self.fps,
            "video_backend": self.backend,
            "frames_indices": list(self.frame_indices),
            "do_sample_frames": False,
        }


def load_video(
    ref: str,
    policy: MediaPolicy,
    *,
    num_frames: int = 8,
    temporal_patch_size: int = 1,
    style: SamplingStyle = "nemotron_vl",
    frame_indices: Sequence[int] | None = None,
    backend: Backend = "opencv",
    timeout_s: float | None = None,
    base_dir: Path | None = None,
    where: str = "",
) -> DecodedVideo:
    """Decode sampled frames of a clip in a child process.

    `frame_indices` takes exactly these frames instead of sampling, to re-make what an engine used. Where the
    container promises more frames than it holds, sampling is repeated over those that decode. Raises
    `MediaDecodeError` for a clip that cannot be used, a hang beyond `timeout_s` (the policy's by default) or a
    crash of the decoder included; `ImportError` when the chosen decoder is not installed.
    """
    if frame_indices is not None and (not len(frame_indices) or min(frame_indices) < 0):
        raise ValueError(f"frame_indices must be one or more non-negative indices, got {list(frame_indices)}")
    reply, frames = _ask(
        ref,
        policy,
        backend=backend,
        timeout_s=timeout_s,
        base_dir=base_dir,
        where=where,
        probe=False,
        num_frames=int(num_frames),
        temporal_patch_size=int(temporal_patch_size),
        style=style,
        frame_indices=None if frame_indices is None else [int(index) for index in frame_indices],
    )
    assert frames is not None, "a decoder that was asked for frames sends some or an error"
    return DecodedVideo(
        frames=frames,
        frame_indices=tuple(reply["frame_indices"]),
        fps=reply["fps"],
        total_num_frames=reply["total_num_frames"],
        declared_num_frames=reply["declared_num_frames"],
        source=ref,
        backend=backend,
        time_error_s=reply["time_error_s"],
    )


def probe_video(
    ref: str,
    policy: MediaPolicy,
    *,
    backend: Backend = "opencv",
    timeout_s: float | None = None,
    base_dir: Path | None = None,
    where: str = "",
) -> VideoInfo:
    """Frame count, rate and size of a clip; proves that it opens, not that all of it decodes."""
    reply, _ = _ask(
        ref, policy, backend=backend, timeout_s=timeout_s, base_dir=base_dir, where=where, probe=True
    )
    return VideoInfo(num_frames=reply["declared_num_frames"], fps=reply["fps"], size=tuple(reply["size"]))


def load_frame_list(
    refs: Sequence[str],
    policy: MediaPolicy,
    *,
    frame_indices: Sequence[int] | None = None,
    fps: float | None = None,
    source: str = "",
    base_dir: Path | None = None,
    where: str = "",
) -> DecodedVideo:
    """A video whose frames were cached as images, in order.

    Without `frame_indices` and `fps` the frames count one per second from 0, as NeMo-RL has it
    (`build_cached_video_frame_metadata`). Raises `MediaDecodeError` for an unusable frame, or one of another size
    than the first.
    """
    source = source or (refs[0] if refs else "")

    def refuse(problem: str, advice: str) -> MediaDecodeError:
        return MediaDecodeError(describe("frame list", source, where, problem, advice))

    if not refs:
        raise refuse("it lists no frames", "list at least one")
    if (frame_indices is None) != (fps is None):
        raise refuse("frame indices and frame rate must be given together", "give both or neither")
    indices = (
        tuple(range(len(refs))) if frame_indices is None else tuple(int(index) for index in frame_indices)
    )
    if len(indices) != len(refs):
        raise refuse(f"{len(refs)} frames, but {len(indices)} frame indices", "give one index per frame")
    if any(later < earlier for earlier, later in zip(indices, indices[1:], strict=False)):
        raise refuse(f"frame indices go backwards: {list(indices)}", "list the frames in order")
    if fps is not None and not 0 < fps <= MAX_FPS:
        raise refuse(
            f"{fps:g} frames per second, expected more than 0 and at most {MAX_FPS}", "give its real rate"
        )
    images = [load_image(ref, policy, base_dir=base_dir, where=where) for ref in refs]
    for position, image in enumerate(images):
        if image.size != images[0].size:
            problem = f"frame {position} is {image.size} and the first {images[0].size} (height, width)"
            raise refuse(problem, "give all frames of a video one size")
    frames = np.stack([image.pixels for image in images])
    return DecodedVideo(
        frames=frames,
        frame_indices=indices,
        fps=1.0 if fps is None else float(fps),
        total_num_frames=indices[-1] + 1,
        declared_num_frames=indices[-1] + 1,
        source=source,
        backend="frame_list",
    )


def _ask(
    ref: str,
    policy: MediaPolicy,
    *,
    backend: str,
    timeout_s: float | None,
    base_dir: Path | None,
    where: str,
    **request: Any,
) -> tuple[dict[str, Any], np.ndarray | None]:
    def refuse(problem: str, advice: str = "replace or re-encode the file") -> MediaDecodeError:
        return MediaDecodeError(describe("video", ref, where, problem, advice))

    with open_media(ref, policy, base_dir, where=where) as clip:
        if problem := container_problem(clip.read(HEAD_BYTES)):
            raise refuse(f"expected a video, {problem}")
        message = {"backend": backend, "max_pixels": policy.max_pixels, **request}
        try:
            reply, frames = decoder().request(message, clip, timeout_s or policy.timeout_s)
        except DecoderMissing as error:
            raise ImportError(f"{error}; install it or choose another video backend") from None
        except DecoderFailure as error:
            raise refuse(f"expected a video, decoding failed: {error}") from None
    if not 0 < reply["fps"] <= MAX_FPS:
        problem = (
            f"it declares {reply['fps']:g} frames per second, expected more than 0 and at most {MAX_FPS}"
        )
        raise refuse(problem, "re-encode it with its real frame rate")
    return reply, frames
