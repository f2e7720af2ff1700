# SPDX-License-Identifier: Apache-2.0
"""Sizes of the media of a manifest, measured in parallel, each reference once."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_ext.manifest.forecast import EngineModel, Measured
from nemo_rl_ext.manifest.rows import ManifestRow, MediaRef
from nemo_rl_ext.media.images import image_size, load_image
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.video import Backend, load_video, probe_video


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What to check, and against which engine."""

    policy: MediaPolicy = MediaPolicy()
    engine: EngineModel = EngineModel()
    decode: bool = True
    """Decode images whole and the sampled frames of clips; False reads headers only."""
    num_workers: int | None = None
    """Threads; one per core by default. Pillow decodes outside the interpreter lock."""
    video_backend: Backend = "opencv"


class Measurements:
    """Sizes of media, each reference measured once however many rows show it."""

    def __init__(self, config: CheckConfig, base_dir: Path) -> None:
        self._config, self._base_dir = config, base_dir
        self._futures: dict[tuple[str, ...], Future[Measured]] = {}

    def start(self, row: ManifestRow, threads: ThreadPoolExecutor) -> None:
        """Begin to measure the media of a row."""
        for media in row.media_refs():
            key = self._key(row, media)
            if key not in self._futures:
                self._futures[key] = threads.submit(self._measure, media, row.where, self._num_frames(row))

    def now(self, row: ManifestRow, media: MediaRef) -> Measured:
        """Measured in the calling thread; raises as `result` does."""
        key = self._key(row, media)
        if key not in self._futures:
            future: Future[Measured] = Future()
            self._futures[key] = future
            try:
                future.set_result(self._measure(media, row.where, self._num_frames(row)))
            except Exception as error:
                future.set_exception(error)
        return self._futures[key].result()

    def result(self, row: ManifestRow, media: MediaRef) -> Measured:
        """Raises `MediaDecodeError`, or `ImportError` without a video decoder."""
        return self._futures[self._key(row, media)].result()

    def _num_frames(self, row: ManifestRow) -> int:
        return row.num_frames or self._config.engine.num_frames

    def _key(self, row: ManifestRow, media: MediaRef) -> tuple[str, ...]:
        return (media.ref, str(self._num_frames(row))) if media.kind == "video" else (media.ref,)

    def _measure(self, media: MediaRef, where: str, num_frames: int) -> Measured:
        ref, policy, base_dir = media.ref, self._config.policy, self._base_dir
        if media.kind != "video":
            if self._config.decode:
                size = load_image(ref, policy, base_dir=base_dir, where=where).size
            else:
                size = image_size(ref, policy, base_dir=base_dir, where=where)
            return Measured(kind="image", turn=0, size=size)
        backend = self._config.video_backend
        if self._config.decode:
            clip = load_video(
                ref,
                policy,
                num_frames=num_frames,
                temporal_patch_size=self._config.engine.family.frames_per_tubelet(),
                backend=backend,
                base_dir=base_dir,
                where=where,
            )
            return Measured(
                kind="video",
                turn=0,
                size=clip.size,
                num_frames=clip.total_num_frames,
                fps=clip.fps,
                remarks=clip.remarks(),
            )
        info = probe_video(ref, policy, backend=backend, base_dir=base_dir, where=where)
        return Measured(kind="video", turn=0, size=info.size, num_frames=info.num_frames, fps=info.fps)
