# SPDX-License-Identifier: Apache-2.0
"""One slice of a census: its rows swept, what was found counted, and what could not be read said."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_rl_ext.manifest.census_scan import Finding, MarkerScanner
from nemo_rl_ext.manifest.census_sources import Slice, batches, blocks_of_lines, text_buffers
from nemo_rl_ext.manifest.file_kinds import UnreadableError
from nemo_rl_ext.manifest.json_walk import check_lines, parse
from nemo_rl_ext.manifest.streams import MAX_LINE_BYTES

_INDEX = re.compile(r"\[\d+\]")
_BINARY_KINDS = ("parquet", "arrow", "arrow-stream", "feather-1")


@dataclass(kw_only=True)
class SliceResult:
    """What one slice holds; line numbers count from the slice's first line. Lists are bounded, counts are not."""

    file: str
    max_kept: int
    num_lines: int = 0
    num_rows: int = 0
    num_findings: int = 0
    num_rows_with_markers: int = 0
    num_phantom_tokens: int = 0
    num_broken: int = 0
    by_marker: Counter[str] = field(default_factory=Counter)
    by_field: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)
    """(line, error)"""
    problem: str = ""
    """Why the slice was not read to its end."""

    def add(self, found: list[Finding]) -> None:
        """Count the findings of one row."""
        self.num_rows_with_markers += bool(found)
        self.num_findings += len(found)
        for item in found:
            self.by_marker[item.marker] += item.count
            self.by_field[_INDEX.sub("[]", item.path)] += item.count
            self.num_phantom_tokens += item.phantom_tokens or 0
        self.findings += found[: max(self.max_kept - len(self.findings), 0)]

    def add_broken(self, line: int, error: str) -> None:
        """Count a line that is no JSON."""
        self.num_broken += 1
        if len(self.broken) < self.max_kept:
            self.broken.append((line, error))


def scan_slice(part: Slice, scanner: MarkerScanner, max_kept: int = 100_000) -> SliceResult:
    """Scan one slice; never raises for what a file holds, however broken."""
    result = SliceResult(file=part.file, max_kept=max_kept)
    try:
        if part.kind in _BINARY_KINDS:
            _scan_batches(part, scanner, result)
        else:
            for block in blocks_of_lines(part):
                _scan_lines(block, scanner, result)
    except UnreadableError as error:
        result.problem = str(error)
    except OSError as error:
        result.problem = f"it cannot be read ({error.strerror or error})"
    return result


def _scan_lines(block: bytes, scanner: MarkerScanner, result: SliceResult) -> None:
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
    num_lines = len(ends) + (not block.endswith(b"\n"))
    if len(block) > MAX_LINE_BYTES and num_lines == 1:
        result.num_lines += 1
        result.add_broken(result.num_lines, f"the line is longer than {MAX_LINE_BYTES} bytes")
        return
    num_rows, broken = check_lines(block)
    for number, error in broken:
        result.add_broken(result.num_lines + number + 1, error)
    skip = {number for number, _ in broken}
    hit_lines = np.unique(np.searchsorted(ends, scanner.candidates(block)))
    for number in hit_lines.tolist():
        if number not in skip:
            begin = int(ends[number - 1]) + 1 if number else 0
            end = int(ends[number]) if number < len(ends) else len(block)
            row = parse(block[begin:end].decode("utf-8-sig"))
            result.add(scanner.findings(row, file=result.file, line=result.num_lines + number + 1))
    result.num_lines += num_lines
    result.num_rows += num_rows


def _scan_batches(part: Slice, scanner: MarkerScanner, result: SliceResult) -> None:
    for batch in batches(part):
        if _may_hold(batch, scanner):
            for number, row in enumerate(batch.to_pylist(maps_as_pydicts=None)):
                result.add(scanner.findings(row, file=part.file, line=result.num_lines + number + 1))
        result.num_lines += batch.num_rows
        result.num_rows += batch.num_rows


def _may_hold(batch: Any, scanner: MarkerScanner) -> bool:
    """Whether a batch is worth a walk. The texts of a column lie end to end, so that markers over neighbours show;
    without spaces also those whose halves a template would trim."""
    for data in (str(batch.schema).encode(), *text_buffers(batch)):
        if data is None or len(scanner.candidates(data, in_lines=False)):
            return True
        if len(scanner.candidates(data.translate(None, b" \t\r\n"), in_lines=False)):
            return True
    return False
