# SPDX-License-Identifier: Apache-2.0
"""Census of media markers in data files: which rows would become phantom tokens, before a cluster finds out."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_rl_ext.manifest.census_scan import Finding, MarkerScanner, media_scanner
from nemo_rl_ext.manifest.census_slice import SliceResult, scan_slice
from nemo_rl_ext.manifest.census_sources import Slice, slices
from nemo_rl_ext.manifest.streams import is_stream


@dataclass(frozen=True, kw_only=True)
class CensusConfig:
    """What to look for, and how."""

    markers: tuple[str, ...] = ()
    """Markers to look for; empty takes `DEFAULT_MARKERS`, plus the tokenizer's own media tokens."""
    tokenizer: str | None = None
    """Directory of a tokenizer. Each finding then says how many placeholder tokens it becomes."""
    num_workers: int | None = 1
    """Processes; None takes one per available core. More than one spawns, so the caller's script needs the usual
    `if __name__ == "__main__"`."""
    max_findings: int = 100_000
    """Findings kept in the report; counts stay exact beyond."""


@dataclass(frozen=True, kw_only=True)
class BrokenLine:
    """A line that could not be read; the census went on."""

    file: str
    line: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A file that could not be read, or not to its end."""

    file: str
    num_rows: int
    """Rows read before."""
    error: str


@dataclass(kw_only=True)
class CensusReport:
    """What a census found. Counts are exact; lists stop at the configured length."""

    markers: tuple[str, ...] = ()
    num_files: int = 0
    num_rows: int = 0
    num_bytes: int = 0
    num_findings: int = 0
    num_rows_with_markers: int = 0
    num_phantom_tokens: int | None = None
    """None without a tokenizer."""
    num_broken: int = 0
    seconds: float = 0.0
    by_marker: Counter[str] = field(default_factory=Counter)
    by_field: Counter[str] = field(default_factory=Counter)
    """Occurrences by field path, list indices left out."""
    findings: list[Finding] = field(default_factory=list)
    broken: list[BrokenLine] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    """Files that were not read whole, and files without a row."""

    def to_json(self) -> str:
        """The report as one JSON object."""
        lists = {
            name: [asdict(item) for item in getattr(self, name)] for name in ("findings", "broken", "unread")
        }
        return json.dumps({**vars(self), **lists}, indent=1)

    @property
    def has_markers(self) -> bool:
        """Whether text would become placeholders: phantom tokens with a tokenizer, any marker without one."""
        return (self.num_findings if self.num_phantom_tokens is None else self.num_phantom_tokens) > 0

    @property
    def failed(self) -> bool:
        """Whether a gate must stay shut: text would become placeholders, or something was not read."""
        return self.has_markers or self.num_broken > 0 or bool(self.unread) or not self.num_files


def take_census(
    paths: Iterable[str | Path],
    config: CensusConfig | None = None,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> CensusReport:
    """Sweep every string of every row of JSONL (plain, gzip, zstd, bz2, xz), Parquet, Arrow and Feather files.

    `-` is standard input. A broken line or file is reported, and the census goes on. `on_progress` is called with
    on-disk bytes as slices finish.

    Raises:
        ValueError: for a missing file, an unusable marker, or a tokenizer that cannot be loaded.
    """
    config = config or CensusConfig()
    began = time.perf_counter()
    parts = [part for path in dict.fromkeys(map(str, paths)) for part in slices(path)]
    scanner = _scanner(config)
    report = CensusReport(markers=scanner.markers, num_files=len({part.file for part in parts}))
    if config.tokenizer:
        report.num_phantom_tokens = 0
    available = len(os.sched_getaffinity(0))
    num_workers = min(config.num_workers or available, max(len(parts), 1))
    # A pipe that this process was given is open in this process only.
    if num_workers == 1 or any(is_stream(part.file) for part in parts):
        done = _in_process(parts, scanner, config.max_findings)
    else:
        done = _in_pool(parts, config, num_workers)
    rows: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for part, result in _ordered(done):
        _merge(report, result, lines[part.file], config)
        lines[part.file] += result.num_lines
        rows[part.file] += result.num_rows
        report.num_bytes += part.size
        if result.problem:
            report.unread.append(Unread(file=part.file, num_rows=rows[part.file], error=result.problem))
        if on_progress:
            on_progress(part.size)
    with_faults = {item.file for item in report.unread}
    for file in dict.fromkeys(part.file for part in parts):
        if not rows[file] and file not in with_faults:
            report.unread.append(Unread(file=file, num_rows=0, error="it holds no row"))
    report.seconds = time.perf_counter() - began
    return report


def _merge(report: CensusReport, result: SliceResult, shift: int, config: CensusConfig) -> None:
    report.num_rows += result.num_rows
    report.num_findings += result.num_findings
    report.num_broken += result.num_broken
    report.num_rows_with_markers += result.num_rows_with_markers
    report.by_marker += result.by_marker
    report.by_field += result.by_field
    if report.num_phantom_tokens is not None:
        report.num_phantom_tokens += result.num_phantom_tokens
    kept = result.findings[: max(config.max_findings - len(report.findings), 0)]
    report.findings += [replace(item, line=item.line + shift) for item in kept]
    broken = result.broken[: max(config.max_findings - len(report.broken), 0)]
    report.broken += [BrokenLine(file=result.file, line=line + shift, error=error) for line, error in broken]


def _ordered(done: Iterator[tuple[int, Slice, SliceResult]]) -> Iterator[tuple[Slice, SliceResult]]:
    """Slices in file order, so that line numbers add up, whatever order they finish in."""
    waiting: dict[int, tuple[Slice, SliceResult]] = {}
    turn = 0
    for index, part, result in done:
        waiting[index] = (part, result)
        while turn in waiting:
            yield waiting.pop(turn)
            turn += 1


def _in_process(
    parts: Sequence[Slice], scanner: MarkerScanner, max_findings: int
) -> Iterator[tuple[int, Slice, SliceResult]]:
    for index, part in enumerate(parts):
        yield index, part, scan_slice(part, scanner, max_findings)


def _in_pool(
    parts: Sequence[Slice], config: CensusConfig, num_workers: int
) -> Iterator[tuple[int, Slice, SliceResult]]:
    # Spawned, not forked: the parent may hold threads of a tokenizer.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (config,)) as pool:
        queue = iter(enumerate(parts))
        running: dict[Any, int] = {}
        try:
            while True:
                # A short queue per worker keeps results of a long file from piling up out of order.
                while len(running) < 2 * num_workers and (item := next(queue, None)):
                    running[pool.submit(_work, item[1], config.max_findings)] = item[0]
                if not running:
                    return
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    index = running.pop(future)
                    yield index, parts[index], future.result()
        finally:
            for future in running:
                future.cancel()


_worker_scanner: MarkerScanner | None = None


def _start_worker(config: CensusConfig) -> None:
    global _worker_scanner
    _worker_scanner = _scanner(config)


def _work(part: Slice, max_findings: int) -> SliceResult:
    assert _worker_scanner is not None
    return scan_slice(part, _worker_scanner, max_findings)


def _scanner(config: CensusConfig) -> MarkerScanner:
    return media_scanner(config.tokenizer and _load_tokenizer(config.tokenizer), config.markers)


def _load_tokenizer(path: str) -> Any:
    if not Path(path).is_dir():
        raise ValueError(f"census: expected the directory of a tokenizer, {path} is none")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"census: no tokenizer could be loaded from {path}: {error}") from error
