# SPDX-License-Identifier: Apache-2.0
"""A manifest whose images no engine re-sizes: every image re-sized once, to a grid that both sides keep as it is.

Each family knows which grids are fixed points of its engine's and its trainer's arithmetic (`Sizer.fixed_grid`). The
shares of a row add up to what its images have together with all text deducted: the row fits, and siblings, turns and
caches change nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from nemo_rl_ext.align.grids import Grid, Size
from nemo_rl_ext.align.sizer import Sizer
from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.manifest.advice import Advice, RowImages, advise, row_images
from nemo_rl_ext.manifest.check import measured_items
from nemo_rl_ext.manifest.forecast import forecast
from nemo_rl_ext.manifest.loading import RowFault, scan_manifest
from nemo_rl_ext.manifest.measuring import CheckConfig, Measurements
from nemo_rl_ext.manifest.rows import ManifestRow, MediaRef
from nemo_rl_ext.manifest.streams import STDIN, text_lines
from nemo_rl_ext.media.errors import MediaDecodeError, shorten
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.sources import open_local, reference_kind

_URL_KEYS = ("image_url", "video_url", "video", "path", "url")


@dataclass(frozen=True, kw_only=True)
class FittedImage:
    """One image of the new manifest."""

    ref: str
    """Where it lies, relative to the new manifest."""
    size: Size
    """(height, width) in pixels: its patch grid times the patch size."""
    grid: Grid
    """(height, width) in patches, equal for engine and trainer."""
    sha256: str
    """Of the PNG file."""
    source: str
    """The reference that it was made from, shortened where that is the data itself."""
    source_size: Size


@dataclass(kw_only=True)
class FitReport:
    """What was written, or why nothing was."""

    manifest: Path
    num_rows: int = 0
    num_images: int = 0
    num_changed: int = 0
    """Images of another size than before."""
    num_files: int = 0
    """Distinct pictures written."""
    worst: float = 1.0
    """Least share of the linear resolution that an image has alone in the engine today."""
    mean: float = 1.0
    faults: list[RowFault] = field(default_factory=list)
    """Rows that cannot be read; with one of them nothing is written."""
    resized_anyway: list[RowFault] = field(default_factory=list)
    """Rows that the context does not hold even at the smallest grids: their images keep what they have alone."""
    advice: Advice | None = None
    """Of the fitted rows: the smallest context at which they stay as they are."""


def fit_manifest(
    path: str | Path, out: str | Path, config: CheckConfig, *, text_tokens: int = 0
) -> FitReport:
    """Write `out/NAME.jsonl` and `out/media/` with every image of a manifest re-sized to its share of the context.

    `text_tokens` are reserved in every row that is forecast with fewer. Clips, cached frames and text rows pass
    through; clips and frames with relative paths are linked, or copied, beside the new manifest. `out` appears whole
    or not at all.

    Raises:
        ValueError: when `out` exists, or the manifest cannot be read.
    """
    path, out = Path(path), Path(out)
    if os.path.lexists(out):
        raise ValueError(f"{out} exists already; fit writes a new directory, so name another one")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    (partial / "media").mkdir(parents=True)
    try:
        report = _Fitter(path, partial, config, text_tokens).run()
        if not report.faults:
            partial.rename(out)
            report.manifest = out / report.manifest.name
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


class _Fitter:
    def __init__(self, path: Path, out: Path, config: CheckConfig, text_tokens: int) -> None:
        self._path, self._out, self._config, self._text_tokens = path, out, config, text_tokens
        self._measure = Measurements(config, path.parent)
        self._sizer = config.engine.sizer.meet(config.engine.family.sizer)
        name = "rows.jsonl" if str(path) == STDIN else path.name
        for suffix in (".gz", ".zst", ".bz2", ".xz"):
            name = name.removesuffix(suffix)
        self._report = FitReport(manifest=out / name)
        self._files: dict[tuple[str, Grid], FittedImage] = {}
        self._passed: dict[tuple[int, int], str] = {}
        self._kept: list[float] = []
        self._rows: list[RowImages] = []

    def run(self) -> FitReport:
        report = self._report
        with report.manifest.open("w", encoding="utf-8") as manifest:
            for line, item in _with_lines(self._path, self._config):
                if isinstance(item, RowFault):
                    report.faults.append(item)
                    continue
                try:
                    fitted = self._row(item, json.loads(line))
                except (MediaDecodeError, ImportError, ValueError, ArithmeticError, OSError) as error:
                    report.faults.append(
                        RowFault(file=str(self._path), line=item.line, field="", problem=str(error))
                    )
                else:
                    manifest.write(json.dumps(fitted, ensure_ascii=False) + "\n")
                    report.num_rows += 1
        if not report.num_rows and not report.faults:
            problem = "expected one JSON object per line, found an empty file"
            report.faults.append(RowFault(file=str(self._path), line=0, field="", problem=problem))
        report.num_files = len({image.ref for image in self._files.values()})
        if self._kept:
            report.worst, report.mean = min(self._kept), sum(self._kept) / len(self._kept)
            engine = self._config.engine
            report.advice = advise(
                self._rows, engine.sizer, engine.max_model_len, trainer=engine.family.sizer
            )
        return report

    def _row(self, row: ManifestRow, raw: dict[str, Any]) -> dict[str, Any]:
        engine, sizer = self._config.engine, self._sizer
        sizes = {media: self._measure.now(row, media) for media in row.media_refs()}
        items = measured_items(row, sizes)
        predicted = forecast(row, items, engine)
        needs = row_images(items, predicted, engine.max_new_tokens)
        text = max(needs.text_tokens, self._text_tokens)
        images = [media for media in row.media_refs() if media.kind == "image"]
        taken = max(needs.other_tokens, sizer.reserved_tokens) + text
        shared = sizer.merge_size**2 * max(engine.max_model_len - taken, 0)
        grids = fitted_grids(needs.sizes, shared, sizer)
        if grids is None:
            problem = (
                f"its {counted(len(images), 'image')} do not fit at their smallest: {text} tokens of text leave "
                f"{shared} patches for them. The engine re-sizes its images all the same, or refuses it; raise "
                "max_model_len or split the row"
            )
            self._report.resized_anyway.append(
                RowFault(file=str(self._path), line=row.line, field="", problem=problem)
            )
            grids = tuple(self._alone(size) for size in needs.sizes)
        made = []
        for media, grid in zip(images, grids, strict=True):
            image = self._image(row, media, grid)
            made.append({"field": media.field, **asdict(image)})
            _replace(raw, media, image.ref)
        for media in row.media_refs():
            if media.kind != "image" and (moved := self._pass_through(row, media)):
                _replace(raw, media, moved)
        if made:
            raw["fitted_media"] = made
        if made and sum(map(sizer.num_tokens, grids)) * sizer.merge_size**2 <= shared:
            patch = sizer.patch_size
            pixels = tuple((grid.height * patch, grid.width * patch) for grid in grids)
            self._rows.append(
                RowImages(kind=needs.kind, sizes=pixels, text_tokens=text, other_tokens=needs.other_tokens)
            )
        return raw

    def _alone(self, size: Size) -> Grid:
        static = self._sizer.static_grid(size)
        cost = self._sizer.num_tokens(static) * self._sizer.merge_size**2
        return self._sizer.fixed_grid(size, max(cost, self._sizer.limit)) or static

    def _image(self, row: ManifestRow, media: MediaRef, grid: Grid) -> FittedImage:
        image = load_image(media.ref, self._config.policy, base_dir=self._path.parent, where=row.where)
        sizer, report = self._sizer, self._report
        size = (grid.height * sizer.patch_size, grid.width * sizer.patch_size)
        report.num_images += 1
        report.num_changed += image.size != size
        self._kept.append(math.sqrt(grid.num_patches / sizer.static_grid(image.size).num_patches))
        key = (image.content_hash, grid)
        if key not in self._files:
            picture = Image.fromarray(image.pixels)
            if picture.size != size[::-1]:
                picture = picture.resize(size[::-1], Image.Resampling.BICUBIC)
            encoded = io.BytesIO()
            picture.save(encoded, "PNG")
            digest = hashlib.sha256(encoded.getvalue()).hexdigest()
            ref = f"media/{digest[:32]}.png"
            (self._out / ref).write_bytes(encoded.getvalue())
            self._files[key] = FittedImage(
                ref=ref,
                size=size,
                grid=grid,
                sha256=digest,
                source=shorten(media.ref),
                source_size=image.size,
            )
        # Equal pictures are one file; each keeps its own reference.
        return replace(self._files[key], source=shorten(media.ref))

    def _pass_through(self, row: ManifestRow, media: MediaRef) -> str | None:
        """The new reference of a clip or frame whose path is relative to the old manifest; None for any other."""
        if reference_kind(media.ref) != "local" or media.ref.startswith(("/", "file:")):
            return None
        with open_local(media.ref, self._config.policy, self._path.parent, where=row.where) as file:
            status = os.fstat(file.fileno())
            inode = (status.st_dev, status.st_ino)
            if inode not in self._passed:
                ref = f"media/{len(self._passed)}-{Path(media.ref).name}"
                _link_or_copy(file, self._out / ref)
                self._passed[inode] = ref
        return self._passed[inode]


def _link_or_copy(file: BinaryIO, target: Path) -> None:
    """Put an open file in another place: the file itself, not whatever has its name by now."""
    try:
        # Naming a descriptor for the directory, which an absolute path ignores, is what makes Python follow the link.
        os.link(f"/proc/self/fd/{file.fileno()}", target, src_dir_fd=file.fileno(), follow_symlinks=True)
    except OSError:
        with target.open("wb") as copy:
            shutil.copyfileobj(file, copy)


def fitted_grids(sizes: Sequence[Size], shared: int, sizer: Sizer) -> tuple[Grid, ...] | None:
    """A fixed grid per image of a row, together no more than `shared` patches; None where not even the smallest fit.

    Images that need less than an equal share keep what they have alone, and leave the rest to the others.
    """
    grids: list[Grid] = [Grid(0, 0)] * len(sizes)
    left = shared
    order = sorted(range(len(sizes)), key=lambda index: sizer.static_grid(sizes[index]).num_patches)
    for position, index in enumerate(order):
        grid = sizer.fixed_grid(sizes[index], left // (len(order) - position))
        if grid is None:
            return None
        grids[index] = grid
        left -= sizer.num_tokens(grid) * sizer.merge_size**2
    return tuple(grids)


def _with_lines(path: Path, config: CheckConfig) -> Iterator[tuple[bytes, ManifestRow | RowFault]]:
    """Each row with its line as it stands, and each fault."""
    lines: dict[int, bytes] = {}

    def remembered() -> Iterator[bytes]:
        for number, line in enumerate(text_lines(path), start=1):
            lines.clear()
            lines[number] = line
            yield line

    for item in scan_manifest(path, policy=config.policy, check_media=False, lines=remembered()):
        yield lines.get(item.line, b""), item


def _replace(raw: Mapping[str, Any], media: MediaRef, ref: str) -> None:
    """Put a new reference in the place of a row's own, in the form in which it stood."""
    turns = [raw["responses_create_params"]["input"], *(raw.get("turns") or ())]
    message = turns[media.turn][media.message_index]
    part = message["content" if "role" in message else "output"][media.part_index]
    key = next(key for key in _URL_KEYS if key in part)
    part[key] = {**part[key], "url": ref} if isinstance(part[key], dict) else ref
