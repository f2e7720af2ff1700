# SPDX-License-Identifier: Apache-2.0
"""Checking a manifest before a cluster does: every row, every media item, and what the engine will do to them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from pathlib import Path

from nemo_rl_ext.manifest.forecast import EngineModel, Measured, RowForecast, forecast
from nemo_rl_ext.manifest.loading import RowFault, scan_manifest
from nemo_rl_ext.manifest.rows import ManifestRow, MediaRef
from nemo_rl_ext.media.errors import MediaDecodeError
from nemo_rl_ext.media.images import image_size, load_image
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.sources import reference_kind
from nemo_rl_ext.media.video import load_video, probe_video

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What to check, and against which engine."""

    policy: MediaPolicy = MediaPolicy()
    engine: EngineModel = EngineModel()
    decode: bool = True
    """Decode images whole and the sampled frames of clips; False reads headers only."""
    num_workers: int | None = None
    """Threads; one per core by default. Pillow decodes outside the interpreter lock."""
    video_backend: str = "decord"


@dataclass(kw_only=True)
class CheckReport:
    """The outcome over all rows."""

    path: str
    num_rows: int = 0
    """Lines that hold a valid row with usable media."""
    faults: list[RowFault] = field(default_factory=list)
    """What stops a run."""
    warnings: list[RowFault] = field(default_factory=list)
    """What NeMo-RL refuses, or what does not fit the context."""
    forecasts: list[RowForecast] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """True when a run on this manifest would stop."""
        return bool(self.faults) or not self.num_rows

    def summary(self) -> dict[str, float]:
        """Counts, shares of rows, and lengths in tokens."""
        rows = self.forecasts
        count = len(rows) or 1
        lengths = sorted(row.sequence_tokens for row in rows) or [0]
        pressures = sorted(row.pressure for row in rows) or [0.0]
        return {
            "rows": len(rows),
            "rows_with_images": sum(row.num_images > 0 for row in rows),
            "rows_with_videos": sum(row.num_videos > 0 for row in rows),
            "images": sum(row.num_images for row in rows),
            "videos": sum(row.num_videos for row in rows),
            "images_resized": sum(row.num_resized for row in rows),
            "share_rows_resized": sum(row.num_resized > 0 for row in rows) / count,
            "share_rows_ambiguous": sum(row.num_ambiguous > 0 for row in rows) / count,
            "share_rows_changing": sum(row.num_changing > 0 for row in rows) / count,
            "share_rows_too_long": sum(not row.fits for row in rows) / count,
            "sequence_tokens_median": lengths[len(lengths) // 2],
            "sequence_tokens_p95": lengths[int(0.95 * (len(lengths) - 1))],
            "sequence_tokens_max": lengths[-1],
            "budget_pressure_median": pressures[len(pressures) // 2],
            "budget_pressure_max": pressures[-1],
        }

    def to_json(self) -> str:
        """The whole report."""
        value = {
            "path": self.path,
            "summary": self.summary(),
            "faults": [asdict(fault) for fault in self.faults],
            "warnings": [asdict(fault) for fault in self.warnings],
            "rows": [asdict(row) for row in self.forecasts],
        }
        return json.dumps(value, indent=1)


def check_manifest(
    path: str | Path, config: CheckConfig | None = None, *, on_row: Callable[[int], None] | None = None
) -> CheckReport:
    """Check every line of a manifest; `on_row` is told the number of each line that is done.

    Never stops at a bad row. Raises `ManifestError` when the file itself cannot be read.
    """
    config = config or CheckConfig()
    path = Path(path)
    report = CheckReport(path=str(path))
    measure = _Measure(config, path.parent)
    items = scan_manifest(path, policy=config.policy, check_media=False)
    with ThreadPoolExecutor(config.num_workers or os.cpu_count() or 1) as threads:
        while batch := list(islice(items, _ROWS_AT_ONCE)):
            for item in batch:
                if isinstance(item, ManifestRow):
                    measure.start(item, threads)
            for item in batch:
                if isinstance(item, RowFault):
                    report.faults.append(item)
                else:
                    _check_row(item, measure, config, report)
                if on_row is not None:
                    on_row(item.line)
    if not report.num_rows and not report.faults:
        problem = "expected one JSON object per line, found an empty file"
        report.faults.append(RowFault(file=str(path), line=0, field="", problem=problem))
    return report


def _check_row(row: ManifestRow, measure: _Measure, config: CheckConfig, report: CheckReport) -> None:
    def note(target: list[RowFault], place: str, problem: str) -> None:
        target.append(RowFault(file=report.path, line=row.line, field=place, problem=problem))

    sizes: dict[str, Measured] = {}
    num_faults = len(report.faults)
    for media in row.media_refs():
        try:
            sizes[media.ref] = measure.result(row, media)
        except (MediaDecodeError, ImportError) as error:
            note(report.faults, media.field, str(error))
    for place, problem in _frame_list_faults(row, sizes):
        note(report.faults, place, problem)
    for place, problem in _nemo_rl_refusals(row):
        note(report.warnings, place, problem)
    if len(report.faults) > num_faults:
        return
    report.num_rows += 1
    predicted = forecast(row, _items(row, sizes), config.engine)
    report.forecasts.append(predicted)
    if not predicted.fits:
        problem = (
            f"needs {predicted.sequence_tokens} tokens of a context of {config.engine.max_model_len}; "
            "shorten it or raise max_model_len"
        )
        note(report.warnings, "", problem)


class _Measure:
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

    def result(self, row: ManifestRow, media: MediaRef) -> Measured:
        """Raises `MediaDecodeError`, or `ImportError` without a video decoder."""
        return self._futures[self._key(row, media)].result()

    def _num_frames(self, row: ManifestRow) -> int:
        return row.num_frames or self._config.engine.num_frames

    def _key(self, row: ManifestRow, media: MediaRef) -> tuple[str, ...]:
        return (media.ref, str(self._num_frames(row))) if media.kind == "video" else (media.ref,)

    def _measure(self, media: MediaRef, where: str, num_frames: int) -> Measured:
        options = {"base_dir": self._base_dir, "where": where}
        policy = self._config.policy
        if media.kind != "video":
            measure = (lambda *a, **k: load_image(*a, **k).size) if self._config.decode else image_size
            return Measured(kind="image", turn=0, size=measure(media.ref, policy, **options))
        options["backend"] = self._config.video_backend
        if self._config.decode:
            patch = self._config.engine.video.temporal_patch_size
            clip = load_video(media.ref, policy, num_frames=num_frames, temporal_patch_size=patch, **options)
            return Measured(
                kind="video", turn=0, size=clip.size, num_frames=clip.total_num_frames, fps=clip.fps
            )
        info = probe_video(media.ref, policy, **options)
        return Measured(kind="video", turn=0, size=info.size, num_frames=info.num_frames, fps=info.fps)


def _grouped(row: ManifestRow) -> Iterator[list[MediaRef]]:
    """Images and clips alone, the frames of one cached video together."""

    def group(media: MediaRef) -> tuple:
        if media.kind == "frame":
            return ("frame", media.turn, media.message_index, media.video_source)
        return (media.kind, media.turn, media.message_index, media.part_index)

    for _, members in groupby(row.media_refs(), key=group):
        yield list(members)


def _items(row: ManifestRow, sizes: dict[str, Measured]) -> list[Measured]:
    items = []
    for group in _grouped(row):
        first, size = group[0], sizes[group[0].ref]
        is_frames = first.kind == "frame"
        items.append(
            Measured(
                kind="image" if first.kind == "image" else "video",
                turn=first.turn,
                size=size.size,
                num_frames=len(group) if is_frames else size.num_frames,
                fps=(first.fps or 1.0) if is_frames else size.fps,
                is_sampled=is_frames,
            )
        )
    return items


def _frame_list_faults(row: ManifestRow, sizes: dict[str, Measured]) -> Iterator[tuple[str, str]]:
    """What keeps the frames of a cached list from being one video."""
    seen: set[tuple[int, str | None]] = set()
    for group in _grouped(row):
        first = group[0]
        if first.kind != "frame":
            continue
        key = (first.turn, first.video_source)
        if key in seen:
            yield first.field, f"the frames of {first.video_source!r} do not stand next to one another"
        seen.add(key)
        known = {sizes[frame.ref].size for frame in group if frame.ref in sizes}
        if len(known) > 1:
            yield first.field, f"frames of one video differ in size: {sorted(known)} (height, width)"
        rates = {frame.fps for frame in group}
        if len(rates) > 1:
            yield first.field, f"frames of one video differ in _video_fps: {sorted(map(str, rates))}"
        indices = [frame.frame_index for frame in group]
        if None in indices and set(indices) != {None} or (None in indices) != (None in rates):
            yield (
                first.field,
                "some frames lack _video_frame_index or _video_fps; give both for all or for none",
            )
        elif None not in indices and indices != sorted(indices):
            yield first.field, f"frame indices go backwards: {indices}"


def _nemo_rl_refusals(row: ManifestRow) -> Iterator[tuple[str, str]]:
    """Rules of NeMo-RL's video rows (nemo_rl/environments/nemo_gym_video.py) that this package does not share."""
    groups = list(_grouped(row))
    videos = [group[0] for group in groups if group[0].kind != "image"]
    if not videos:
        return
    if len(videos) > 1:
        yield videos[1].field, f"NeMo-RL takes one video per row, found {len(videos)}"
    if len({media.kind for media in videos}) > 1:
        yield videos[0].field, "NeMo-RL does not mix video files and cached frames in one row"
    if len(groups) > len(videos):
        yield videos[0].field, "NeMo-RL does not mix still images and video in one row"
    for media in videos:
        if media.kind == "video" and reference_kind(media.ref) != "local":
            yield media.field, "NeMo-RL reads videos from local paths only"
        elif media.kind == "video" and not media.ref.startswith(("/", "file://")):
            yield media.field, "NeMo-RL wants absolute video paths"
