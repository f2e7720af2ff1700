# SPDX-License-Identifier: Apache-2.0
"""Census of media markers in data files: which rows would become phantom tokens, before a cluster finds out."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_ext.manifest.census_scan import (
    DEFAULT_MARKERS,
    BrokenLine,
    Finding,
    MarkerScanner,
    broken_lines,
    parse,
)
from nemo_rl_ext.manifest.census_sources import Slice, line_blocks, parquet_batches, slices, text_buffers

_MEDIA_WORD = re.compile(r"im(?:age|g)|video|audio|vision|media|sound|so_", re.IGNORECASE)
_INDEX = re.compile(r"\[\d+\]")


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

    def to_json(self) -> str:
        """The report as one JSON object."""
        lists = {"findings": [asdict(f) for f in self.findings], "broken": [asdict(b) for b in self.broken]}
        return json.dumps({**vars(self), **lists}, indent=1)

    @property
    def failed(self) -> bool:
        """Whether text would become placeholders: phantom tokens with a tokenizer, any marker without one."""
        return (self.num_findings if self.num_phantom_tokens is None else self.num_phantom_tokens) > 0


@dataclass(kw_only=True)
class _Part:
    """One slice's result; line numbers count from the slice's first line."""

    num_lines: int = 0
    num_rows: int = 0
    findings: list[Finding] = field(default_factory=list)
    broken: list[BrokenLine] = field(default_factory=list)


def take_census(
    paths: Iterable[str | Path],
    config: CensusConfig | None = None,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> CensusReport:
    """Sweep every string of every row of JSONL (plain, gzip, zstd) and Parquet files.

    A broken line is reported and skipped. `on_progress` is called with on-disk bytes as slices finish.

    Raises:
        ValueError: for a missing file, an unusable marker, or a tokenizer that cannot be loaded.
    """
    config = config or CensusConfig()
    began = time.perf_counter()
    parts = [part for path in paths for part in slices(path)]
    scanner = _scanner(config)
    report = CensusReport(markers=scanner.markers, num_files=len({p.file for p in parts}))
    if config.tokenizer:
        report.num_phantom_tokens = 0
    available = len(os.sched_getaffinity(0))
    num_workers = min(config.num_workers or available, max(len(parts), 1))
    done = _in_process(parts, scanner) if num_workers == 1 else _in_pool(parts, config, num_workers)
    lines_before: Counter[str] = Counter()
    for part, result in _ordered(done):
        _merge(report, part, result, lines_before, config.max_findings)
        if on_progress:
            on_progress(part.size)
    report.seconds = time.perf_counter() - began
    return report


def _merge(
    report: CensusReport, part: Slice, result: _Part, lines_before: Counter[str], max_findings: int
) -> None:
    shift = lines_before[part.file]
    lines_before[part.file] += result.num_lines
    report.num_rows += result.num_rows
    report.num_bytes += part.size
    report.num_findings += len(result.findings)
    report.num_broken += len(result.broken)
    report.num_rows_with_markers += len({f.line for f in result.findings})
    for found in result.findings:
        report.by_marker[found.marker] += found.count
        report.by_field[_INDEX.sub("[]", found.path)] += found.count
        if report.num_phantom_tokens is not None:
            report.num_phantom_tokens += found.phantom_tokens or 0
    for kept, new in ((report.findings, result.findings), (report.broken, result.broken)):
        room = max(max_findings - len(kept), 0)
        kept.extend(type(item)(**{**vars(item), "line": item.line + shift}) for item in new[:room])


def scan_slice(part: Slice, scanner: MarkerScanner) -> _Part:
    """Scan one slice; line numbers in the result start at 1 for the slice's first line."""
    result = _Part()
    if part.kind == "parquet":
        _scan_parquet(part, scanner, result)
    else:
        for block in line_blocks(part):
            _scan_lines(block, part.file, scanner, result)
    return result


def _scan_lines(block: bytes, file: str, scanner: MarkerScanner, result: _Part) -> None:
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
    num_lines = len(ends) + (not block.endswith(b"\n"))
    broken = broken_lines(block)
    result.broken.extend(
        BrokenLine(file=file, line=result.num_lines + number + 1, error=error) for number, error in broken
    )
    skip = {number for number, _ in broken}
    hit_lines = np.unique(np.searchsorted(ends, scanner.candidates(block)))
    for number in hit_lines.tolist():
        if number not in skip:
            begin = int(ends[number - 1]) + 1 if number else 0
            end = int(ends[number]) if number < len(ends) else len(block)
            row = parse(block[begin:end].decode("utf-8-sig"))
            result.findings.extend(
                scanner.findings(row, file=file, line=result.num_lines + number + 1)
            )  # fmt: skip
    result.num_lines += num_lines
    result.num_rows += num_lines - len(broken) - _num_blank(block, ends)


def _num_blank(block: bytes, ends: np.ndarray) -> int:
    """Lines without any row. Only short lines can be blank, so only those are looked at."""
    starts = np.concatenate(([0], ends + 1))
    stops = np.concatenate((ends, [len(block)]))
    if block.endswith(b"\n"):
        starts, stops = starts[:-1], stops[:-1]
    short = np.flatnonzero(stops - starts < 8)
    return sum(not block[starts[i] : stops[i]].strip() for i in short.tolist())


def _scan_parquet(part: Slice, scanner: MarkerScanner, result: _Part) -> None:
    for batch in parquet_batches(part):
        if any(len(scanner.candidates(buffer)) for buffer in text_buffers(batch)):
            for number, row in enumerate(batch.to_pylist()):
                result.findings.extend(
                    scanner.findings(row, file=part.file, line=result.num_lines + number + 1)
                )  # fmt: skip
        result.num_lines += batch.num_rows
        result.num_rows += batch.num_rows


def _ordered(done: Iterator[tuple[int, Slice, _Part]]) -> Iterator[tuple[Slice, _Part]]:
    """Slices in file order, so that line numbers add up, whatever order they finish in."""
    waiting: dict[int, tuple[Slice, _Part]] = {}
    turn = 0
    for index, part, result in done:
        waiting[index] = (part, result)
        while turn in waiting:
            yield waiting.pop(turn)
            turn += 1


def _in_process(parts: Sequence[Slice], scanner: MarkerScanner) -> Iterator[tuple[int, Slice, _Part]]:
    for index, part in enumerate(parts):
        yield index, part, scan_slice(part, scanner)


def _in_pool(
    parts: Sequence[Slice], config: CensusConfig, num_workers: int
) -> Iterator[tuple[int, Slice, _Part]]:
    # Spawned, not forked: the parent may hold threads of a tokenizer.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (config,)) as pool:
        queue = iter(enumerate(parts))
        running: dict[Any, int] = {}
        try:
            while True:
                # A short queue per worker keeps results of a long file from piling up out of order.
                while len(running) < 2 * num_workers and (item := next(queue, None)):
                    running[pool.submit(_work, item[1])] = item[0]
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


def _work(part: Slice) -> _Part:
    assert _worker_scanner is not None
    return scan_slice(part, _worker_scanner)


def _scanner(config: CensusConfig) -> MarkerScanner:
    if config.tokenizer is None:
        return MarkerScanner(config.markers or DEFAULT_MARKERS)
    from nemo_rl_ext.guards.encode import control_tokens, well_formed

    tokenizer = _load_tokenizer(config.tokenizer)
    ids = control_tokens(tokenizer)
    own = [literal for literal in ids if _MEDIA_WORD.search(literal)]
    markers = config.markers or (*DEFAULT_MARKERS, *own)

    def count_phantoms(text: str, marker: str) -> int:
        token_id = ids.get(marker)
        if token_id is None:
            return 0
        return list(tokenizer.encode(well_formed(text), add_special_tokens=False)).count(token_id)

    return MarkerScanner(markers, count_phantoms)


def _load_tokenizer(path: str) -> Any:
    if not Path(path).is_dir():
        raise ValueError(f"census: expected the directory of a tokenizer, {path} is none")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"census: no tokenizer could be loaded from {path}: {error}") from error
