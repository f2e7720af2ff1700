# SPDX-License-Identifier: Apache-2.0
"""Media as the engine and as the static processor saw them, small enough for a page."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.manifest.row_media import media_by_turn
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaReader, MediaSource
from nemo_rl_ext.report.run_files import Record, RunFiles

logger = logging.getLogger(__name__)

MAX_SIDE = 384
"""Longest side of a thumbnail, in pixels; both views of a medium are shrunk by the same factor."""
MAX_MANIFEST_BYTES = 2 << 30
"""Manifests over this size are not searched for media that only a row can tell (data URLs, frame lists)."""


@dataclass(frozen=True, kw_only=True)
class View:
    """One medium on one grid. `data_url` is empty when it could not be shown, and `note` says why."""

    title: str
    grid: Grid
    pixels: tuple[int, int]
    data_url: str = ""


@dataclass(frozen=True, kw_only=True)
class Thumbnails:
    """Both views of one medium, or the sentence why there are none."""

    views: tuple[View, ...] = ()
    note: str = ""


class ThumbnailMaker:
    """Decodes a run's media again, under the run's own limits and never from the network."""

    def __init__(self, run: RunFiles, wanted_rows: Iterable[str]) -> None:
        manifest = run.setting("data.train.data_path")
        self._manifest = run.locate(manifest) if manifest else None
        roots = tuple(run.locate(root) for root in run.setting("data.media_roots", []))
        limits = {
            name: run.setting(f"data.{key}")
            for name, key in (("max_pixels", "max_image_pixels"), ("max_bytes", "max_media_bytes"))
            if run.setting(f"data.{key}")
        }
        self._patch_size = _patch_size(run)
        self._reader = MediaReader(
            policy=MediaPolicy(roots=roots, allow_remote=False, **limits),
            base_dir=self._manifest.parent if self._manifest is not None else None,
            num_frames=int(run.setting("data.video.num_frames", 8)),
            frames_per_tubelet=1,
            backend=run.setting("data.video.backend", "opencv"),
        )
        self._sources = self._read_sources(set(wanted_rows))

    def _read_sources(self, wanted: set[str]) -> dict[tuple[str, str], MediaSource]:
        """(row id, source name) -> where it comes from, for the rows that are wanted."""
        path = self._manifest
        if path is None or not wanted or not path.is_file() or path.stat().st_size > MAX_MANIFEST_BYTES:
            return {}
        return {
            (row.row_id, source.name): source
            for row in _rows(path, wanted)
            for turn in media_by_turn(row)
            for source in turn
        }

    def make(self, row_id: str, item: Record) -> Thumbnails:
        """Both views of a medium; never raises on a file that is gone or broken."""
        try:
            return self._make(row_id, item)
        except Exception as error:  # a thumbnail is not worth a report, whatever a decoder raises
            logger.debug("no thumbnail of %s", item.get("source"), exc_info=True)
            return Thumbnails(note=f"not shown: {error}")

    def _make(self, row_id: str, item: Record) -> Thumbnails:
        patch_size = self._patch_size
        if patch_size is None:
            return Thumbnails(note="not shown: the run's checkpoint is not at its place any more")
        source = self._sources.get((row_id, str(item["source"])))
        source = source or MediaSource(ref=str(item["source"]), kind=item["kind"])
        _, pixels = self._reader.decode(source)
        frame = pixels if pixels.ndim == 3 else pixels[0]
        named = [("training processor", item.get("static_grid")), ("engine", item.get("grid"))]
        grids = [(title, Grid(*grid)) for title, grid in named if grid]
        longest = max(max(grid) for _, grid in grids) * patch_size
        shrink = min(1.0, MAX_SIDE / longest)
        return Thumbnails(views=tuple(_view(title, grid, frame, patch_size, shrink) for title, grid in grids))


def _view(title: str, grid: Grid, frame: np.ndarray, patch_size: int, shrink: float) -> View:
    import torch

    from nemo_rl_ext.align.pixels import resize_and_normalize

    # The same resize that makes training tensors, left in the range of a picture.
    zero, one = (0.0,) * 3, (1.0,) * 3
    (tensor,) = resize_and_normalize(
        frame[None], grid, patch_size=patch_size, mean=zero, std=one, dtype=torch.float32
    )
    array = (tensor.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    image = Image.fromarray(array)
    height, width = image.height, image.width
    if shrink < 1:
        image = image.resize((max(1, round(width * shrink)), max(1, round(height * shrink))))
    return View(title=title, grid=grid, pixels=(height, width), data_url=_data_url(image))


def _data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _patch_size(run: RunFiles) -> int | None:
    model = run.setting("policy.model_name")
    if not model:
        return None
    try:
        config = json.loads((run.locate(model) / "preprocessor_config.json").read_text(encoding="utf-8"))
        return int(config["patch_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rows(path: Path, wanted: set[str]) -> Iterator[ManifestRow]:
    """The wanted rows of a manifest; lines that cannot hold one of them are not parsed."""
    needles = [json.dumps(row_id).strip('"').encode() for row_id in wanted]
    lines = {row_id.removeprefix("line-") for row_id in wanted if row_id.startswith("line-")}
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, start=1):
            if str(number) not in lines and not any(needle in line for needle in needles):
                continue
            try:
                row = ManifestRow.from_json(json.loads(line), file=str(path), line=number)
            except ValueError:
                continue
            if row.row_id in wanted:
                yield row
