# SPDX-License-Identifier: Apache-2.0
"""Checking a manifest before a cluster does: every row, every media item, and what the engine will do to them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from nemo_rl_ext.manifest.advice import Advice, RowImages, advise, row_images
from nemo_rl_ext.manifest.census_scan import media_scanner
from nemo_rl_ext.manifest.chat import LeftOutError
from nemo_rl_ext.manifest.check_rules import (
    WARNING_KINDS,
    WarningKind,
    frame_list_faults,
    markers_in_text,
    misspelled_keys,
    nemo_rl_refusals,
    too_many_media,
)
from nemo_rl_ext.manifest.forecast import Measured, RowForecast, forecast
from nemo_rl_ext.manifest.loading import ManifestError, RowFault, scan_manifest
from nemo_rl_ext.manifest.measuring import CheckConfig, Measurements
from nemo_rl_ext.manifest.row_media import media_items
from nemo_rl_ext.manifest.rows import ManifestRow, MediaRef
from nemo_rl_ext.manifest.scoring import NO_ANSWERS, has_answer, own_score_can_hit
from nemo_rl_ext.media.errors import MediaDecodeError, shorten

_ROWS_AT_ONCE = 256


@dataclass(kw_only=True)
class CheckReport:
    """The outcome over all rows."""

    path: str
    num_rows: int = 0
    """Lines that hold a valid row with usable media."""
    faults: list[RowFault] = field(default_factory=list)
    """What stops a run."""
    warnings: list[RowFault] = field(default_factory=list)
    """What a run survives: rows that the engine refuses, markers in text, what NeMo-RL does not take."""
    forecasts: list[RowForecast] = field(default_factory=list)
    advice: Advice | None = None
    """At which settings no image is re-sized; None without an image."""

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

    def warnings_by_kind(self) -> dict[WarningKind, list[RowFault]]:
        """The warnings of each kind that has some, those first that cost rows."""
        grouped = {kind: [fault for fault in self.warnings if fault.kind == kind] for kind in WARNING_KINDS}
        return {kind: faults for kind, faults in grouped.items() if faults}

    def to_json(self) -> str:
        """The whole report."""
        value = {
            "path": self.path,
            "usable": not self.failed,
            "summary": self.summary(),
            "warning_kinds": dict(Counter(fault.kind for fault in self.warnings)),
            "faults": [asdict(fault) for fault in self.faults],
            "warnings": [asdict(fault) for fault in self.warnings],
            "advice": None if self.advice is None else asdict(self.advice),
            "rows": [asdict(row) for row in self.forecasts],
        }
        return json.dumps(value, indent=1)


def check_manifest(
    path: str | Path, config: CheckConfig | None = None, *, on_row: Callable[[int], None] | None = None
) -> CheckReport:
    """Check every line of a manifest; `on_row` gets the number of each line that is done.

    Never stops at a bad row. Raises `ManifestError` when the file itself cannot be read.
    """
    config = config or CheckConfig()
    path = Path(path)
    report = CheckReport(path=str(path))
    checker = _Checker(config, path, report)
    items = scan_manifest(path, policy=config.policy, check_media=False)
    with ThreadPoolExecutor(config.num_workers or os.cpu_count() or 1) as threads:
        while batch := _next_rows(items, report):
            for item in batch:
                if isinstance(item, ManifestRow):
                    checker.measure.start(item, threads)
            for item in batch:
                if isinstance(item, RowFault):
                    report.faults.append(item)
                else:
                    checker.row(item)
                if on_row is not None:
                    on_row(item.line)
    checker.whole_file()
    return report


def _next_rows(items: Iterator[ManifestRow | RowFault], report: CheckReport) -> list[ManifestRow | RowFault]:
    """The next rows; a file that breaks off is a fault behind those that were read, and raises before any."""
    batch: list[ManifestRow | RowFault] = []
    try:
        for item in islice(items, _ROWS_AT_ONCE):
            batch.append(item)
    except ManifestError as error:
        if not (batch or report.num_rows or report.faults):
            raise
        problem = str(error).removeprefix(f"{report.path}: ")
        batch.append(RowFault(file=report.path, line=0, field="", problem=problem))
    return batch


class _Checker:
    """Judges rows one by one and keeps what has to be known of all of them at the end."""

    def __init__(self, config: CheckConfig, path: Path, report: CheckReport) -> None:
        self.measure = Measurements(config, path.parent)
        self._config, self._report = config, report
        self._scanner = media_scanner(config.engine.tokenizer)
        self._num_seen = 0
        self._without_answer: list[RowFault] = []
        self._images: list[RowImages] = []

    def row(self, row: ManifestRow) -> None:
        """Check one row. Whatever goes wrong with it is its own fault, by file and line."""
        num_faults = len(self._report.faults)
        try:
            self._judge(row, num_faults)
        except LeftOutError as error:
            self._fault(row, "", str(error))
        except Exception as error:
            reason = str(error) or "no reason given"
            self._fault(row, "", f"it cannot be forecast: {reason} ({type(error).__name__})")

    def _judge(self, row: ManifestRow, num_faults: int) -> None:
        sizes: dict[MediaRef, Measured] = {}
        for media in row.media_refs():
            try:
                sizes[media] = self.measure.result(row, media)
            except Exception as error:
                named = (
                    str(error) if isinstance(error, MediaDecodeError | ImportError) else _named(error, media)
                )
                self._fault(row, media.field, named)
        for place, problem in frame_list_faults(row, {media: item.size for media, item in sizes.items()}):
            self._fault(row, place, problem)
        remarks = [(media.field, remark) for media, item in sizes.items() for remark in item.remarks]
        self._warn(row, "clip", remarks)
        limits = {"image": self._config.engine.limit_images, "video": self._config.engine.limit_videos}
        self._warn(row, "too many media", too_many_media(row, limits))
        self._warn(row, "media marker in text", markers_in_text(row, self._scanner))
        self._warn(row, "unknown key", misspelled_keys(row))
        self._warn(row, "NeMo-RL", nemo_rl_refusals(row))
        self._note_answer(row)
        if len(self._report.faults) > num_faults:
            return
        engine = self._config.engine
        items = measured_items(row, sizes)
        predicted = forecast(row, items, engine)
        self._images.append(row_images(items, predicted, engine.max_new_tokens))
        self._report.num_rows += 1
        self._report.forecasts.append(predicted)
        if not predicted.fits:
            problem = (
                f"needs {predicted.sequence_tokens} tokens of a context of {engine.max_model_len}; "
                "shorten it or raise max_model_len"
            )
            self._warn(row, "does not fit", [("", problem)])

    def _note_answer(self, row: ManifestRow) -> None:
        self._num_seen += 1
        if not has_answer(row):
            problem = "no verifier_metadata.answer, and no agent_ref whose verifier scores it"
        elif not own_score_can_hit(row):
            problem = "the answer is no single letter: the embedded run's own scoring gives 0, a Gym verifier may not"
        else:
            return
        place = "verifier_metadata.answer"
        fault = RowFault(
            file=self._report.path, line=row.line, field=place, problem=problem, kind="no answer"
        )
        self._without_answer.append(fault)

    def whole_file(self) -> None:
        """What only shows when all rows are known."""
        engine = self._config.engine
        if any(row.sizes for row in self._images):
            self._report.advice = advise(
                self._images, engine.sizer, engine.max_model_len, trainer=engine.family.sizer
            )
        problem = ""
        if not self._report.num_rows and not self._report.faults:
            problem = "expected one JSON object per line, found an empty file"
        elif self._num_seen and len(self._without_answer) == self._num_seen:
            lacking = [fault for fault in self._without_answer if fault.problem.startswith("no ")]
            problem = NO_ANSWERS if len(lacking) == self._num_seen else ""
        if problem:
            self._report.faults.append(RowFault(file=self._report.path, line=0, field="", problem=problem))
        else:
            self._report.warnings += self._without_answer

    def _fault(self, row: ManifestRow, place: str, problem: str) -> None:
        self._report.faults.append(
            RowFault(file=self._report.path, line=row.line, field=place, problem=problem)
        )

    def _warn(self, row: ManifestRow, kind: WarningKind, problems: Iterable[tuple[str, str]]) -> None:
        self._report.warnings += [
            RowFault(file=self._report.path, line=row.line, field=place, problem=problem, kind=kind)
            for place, problem in problems
        ]


def _named(error: Exception, media: MediaRef) -> str:
    reason = str(error) or "no reason given"
    return f"{shorten(media.ref)!r} cannot be measured: {reason} ({type(error).__name__})"


def measured_items(row: ManifestRow, sizes: Mapping[MediaRef, Measured]) -> list[Measured]:
    """A row's media items as `forecast` wants them, from the measurement of each reference."""
    items = []
    for item in media_items(row):
        size = sizes[item.first]
        items.append(
            Measured(
                kind=item.kind,
                turn=item.turn,
                size=size.size,
                num_frames=len(item.refs) if item.is_frames else size.num_frames,
                fps=(item.first.fps or 1.0) if item.is_frames else size.fps,
                is_sampled=item.is_frames,
            )
        )
    return items
