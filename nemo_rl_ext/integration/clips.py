# SPDX-License-Identifier: Apache-2.0
"""Clips inside NeMo-RL: which a row holds, the settings they are sampled and sized by, and reading them.

NeMo-RL's own functions decode (`models/generation/vllm/video_utils.py`), so that engine, trainer and aligners share one
loader and its `NEMO_RL_VIDEO_MEDIA_ROOT`.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np

from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.video_grids import VideoTiler
from nemo_rl_ext.integration.settings import pick
from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.gym_conversation import VIDEO_TYPES

CACHED_FRAMES = "data:video/x-nemo-rl-cached-frames;base64,"
"""How NeMo-RL names a list of frame files and their times in one reference."""

MAX_CLIP_BYTES = 512 << 20
"""Largest clip that is repaired: 32 frames of 1,024 patches are 96 MiB."""


@dataclass(frozen=True, kw_only=True)
class ClipSettings:
    """How a recipe samples and sizes clips, after NeMo-RL made one contract of it for engine and trainer."""

    num_frames: int
    temporal_patch_size: int
    sampling_style: str
    target_num_patches: int
    maintain_aspect_ratio: bool

    @classmethod
    def of(cls, config: Any) -> ClipSettings | None:
        """The settings of a materialised recipe; None where it has none, or lacks one of them."""
        values = {
            "num_frames": pick(config, "policy.generation.vllm_cfg.video.num_frames"),
            "temporal_patch_size": pick(config, "policy.generation.vllm_cfg.video.temporal_patch_size"),
            "sampling_style": pick(config, "policy.generation.vllm_cfg.video.sampling_style"),
            "target_num_patches": _data_key(config, "video_target_num_patches"),
            "maintain_aspect_ratio": _data_key(config, "video_maintain_aspect_ratio"),
        }
        return None if None in values.values() else cls(**values)

    def tiler_of(self, family: Any) -> VideoTiler:
        """How these settings size the frames of a clip for a family."""
        return VideoTiler(
            patch_size=family.tiler.patch_size,
            merge_size=family.merge_size,
            target_num_patches=self.target_num_patches,
            maintain_aspect_ratio=self.maintain_aspect_ratio,
            temporal_patch_size=self.temporal_patch_size,
        )


def with_video(family: Any, tiler: VideoTiler) -> MediaFamily:
    """The family with a recipe's video settings in place of its checkpoint's."""
    sized: MediaFamily = dataclasses.replace(family, video=tiler)
    return sized


def _data_key(config: Any, name: str) -> Any:
    own = pick(config, f"data.train.{name}")
    return own if own is not None else pick(config, f"data.default.{name}")


def clip_references(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The videos of a Gym row's request, in prompt order."""
    found = []
    messages = row.get("responses_create_params", {}).get("input")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in VIDEO_TYPES:
                source = part.get("video_url") or part.get("video") or part.get("url")
                if isinstance(source, Mapping):
                    source = source.get("url") or source.get("path")
                found.append(str(source or ""))
    return tuple(found)


def can_decode_files() -> bool:
    """Whether the decoder that NeMo-RL uses for video files is here; lists of cached frames need none."""
    return importlib.util.find_spec("torchcodec") is not None


def can_read(reference: str) -> bool:
    """Whether a clip can be read here as NeMo-RL reads it."""
    return reference.startswith(CACHED_FRAMES) or can_decode_files()


class ClipReader:
    """Reads clips through NeMo-RL's own functions."""

    def __init__(self, settings: ClipSettings, patch_size: int) -> None:
        self.settings, self.patch_size = settings, patch_size

    def require_size(self, item: MediaItem, grid: Grid) -> None:
        """Refuse a repair that is too large to travel with a rollout.

        Raises:
            ValueError: with its frames, their grid and bytes.
        """
        num_bytes = item.num_frames * 3 * grid.height * grid.width * self.patch_size**2 * 4
        if num_bytes > MAX_CLIP_BYTES:
            raise ValueError(
                f"{item.source}: {item.num_frames} frames of {grid} patches are {num_bytes >> 20} MiB in float32, more "
                f"than the {MAX_CLIP_BYTES >> 20} MiB that a repaired clip may send with a rollout; sample fewer "
                "frames, or lower video_target_num_patches"
            )

    def measure(self, source: MediaSource) -> MediaItem:
        """A clip with the frames that the trainer's side samples; one that cannot be read says so in `error`."""
        try:
            frames, metadata = self._load(source.ref)
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            return MediaItem(kind="video", size=(1, 1), source=source.name, error=f"{source.where}: {error}")
        indices = tuple(int(index) for index in metadata["frames_indices"])

        def load(wanted: Sequence[int]) -> np.ndarray[Any, Any]:
            if tuple(wanted) == indices:
                return frames
            return self._load_frames(source.ref, wanted, frames, indices)

        return MediaItem(
            kind="video",
            size=(frames.shape[1], frames.shape[2]),
            source=source.name,
            content_hash=pixel_digest(frames),
            load=load,
            frame_indices=indices,
            fps=float(metadata["fps"]),
            total_frames=int(metadata["total_num_frames"]),
        )

    def _load(self, reference: str) -> tuple[np.ndarray[Any, Any], Mapping[str, Any]]:
        from nemo_rl.models.generation.vllm import video_utils

        if reference.startswith(CACHED_FRAMES):
            listed = base64.b64decode(reference.removeprefix(CACHED_FRAMES))
            loaded = video_utils._load_cached_video_frame_manifest(listed, num_frames=-1)
            if loaded is None:
                raise ValueError("the reference holds no list of cached frames")
            frames, metadata = loaded
            return frames, metadata
        frames, metadata = video_utils.load_video_frames_with_metadata(
            _local_path(reference),
            num_frames=self.settings.num_frames,
            temporal_patch_size=self.settings.temporal_patch_size,
            sampling_style=self.settings.sampling_style,
        )
        return frames, metadata

    def _load_frames(
        self,
        reference: str,
        wanted: Sequence[int],
        frames: np.ndarray[Any, Any],
        indices: Sequence[int],
    ) -> np.ndarray[Any, Any]:
        missing = sorted(set(wanted) - set(indices))
        if not missing:
            return frames[[indices.index(index) for index in wanted]]
        if reference.startswith(CACHED_FRAMES):
            raise ValueError(f"the engine used frames {missing[:4]}, which the cached list does not hold")
        from torchcodec.decoders import VideoDecoder

        # As NeMo-RL opens it.
        decoder = VideoDecoder(
            _local_path(reference),
            dimension_order="NHWC",
            num_ffmpeg_threads=0,
            device="cpu",
            seek_mode="exact",
        )
        data: np.ndarray[Any, Any] = decoder.get_frames_at(indices=list(wanted)).data.cpu().numpy()
        return data


def _local_path(reference: str) -> str:
    parsed = urlparse(reference)
    return unquote(parsed.path) if parsed.scheme == "file" else reference
