# SPDX-License-Identifier: Apache-2.0
"""Prompt/response pairs from JSON Lines, every line checked before anything is trained.

One line is one object: ``{"input": str, "output": str}``, optionally with ``images`` and ``videos`` (lists of
media references), and ``id`` or ``metadata``, which are carried but not read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.manifest.file_kinds import UnreadableError
from nemo_rl_ext.manifest.streams import text_lines

logger = logging.getLogger(__name__)

KNOWN_KEYS = ("input", "output", "images", "videos", "id", "metadata")


class DatasetError(ValueError):
    """One or more records cannot be trained on; the message names file and line of each."""


class RecordError(ValueError):
    """What is wrong with one record; the reader adds file and line."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One prompt/response pair as it stands in the file."""

    where: str
    """``file:line`` for messages."""
    prompt: str
    response: str
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()


class Problems:
    """Collects one line per bad record and raises them together, so that a file is fixed in one go."""

    def __init__(self, *, shown: int = 20) -> None:
        self.shown = shown
        self.lines: list[str] = []
        self.count = 0

    def add(self, where: str, problem: object) -> None:
        self.count += 1
        if self.count <= self.shown:
            self.lines.append(f"{where}: {problem}")

    def raise_if_any(self) -> None:
        """Raises `DatasetError` when something was added."""
        if not self.count:
            return
        more = f"\n... and {self.count - len(self.lines)} more" if self.count > len(self.lines) else ""
        head = "" if self.count == 1 else f"{self.count} bad records, nothing was trained:\n"
        raise DatasetError(head + "\n".join(self.lines) + more)


def read_records(path: Path, problems: Problems, *, max_record_bytes: int) -> list[Record]:
    """Read and check one file; faults go to ``problems`` and reading goes on with the next line.

    Raises:
        DatasetError: the file itself is missing, unreadable or holds no record.
    """
    records: list[Record] = []
    for line, raw in _lines(path, problems, max_record_bytes):
        where = f"{path}:{line}"
        try:
            row = parse_line(raw)
            records.append(_pair(row, where))
        except RecordError as problem:
            problems.add(where, problem)
    if not records and not problems.count:
        raise DatasetError(f"{path}: no records; expected one JSON object per line with 'input' and 'output'")
    return records


def read_texts(path: Path, problems: Problems, *, max_record_bytes: int) -> list[Record]:
    """Plain documents, ``{"text": str}`` per line, as records with an empty prompt."""
    records: list[Record] = []
    for line, raw in _lines(path, problems, max_record_bytes):
        where = f"{path}:{line}"
        try:
            row = parse_line(raw)
            _known(row, ("text", "id", "metadata"))
            records.append(Record(where=where, prompt="", response=_text(row, "text")))
        except RecordError as problem:
            problems.add(where, problem)
    if not records and not problems.count:
        raise DatasetError(f"{path}: no records; expected one JSON object per line with 'text'")
    return records


def _lines(path: Path, problems: Problems, limit: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are neither blank nor too long, counted from 1."""
    blank = 0
    try:
        for number, raw in enumerate(text_lines(path, limit), start=1):
            if len(raw) > limit and not raw.endswith(b"\n"):
                problems.add(
                    f"{path}:{number}",
                    f"longer than max_record_bytes = {limit}; shorten it or raise the limit",
                )
                continue
            if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                raw = raw[3:]
            if not raw.strip():
                blank += 1
                continue
            yield number, raw
    except UnreadableError as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from None
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror})") from None
    if blank:
        logger.info("%s: %s skipped", path, counted(blank, "blank line"))


def parse_line(raw: bytes) -> dict[str, Any]:
    """One JSON object without repeated keys.

    Raises:
        RecordError: not UTF-8, not JSON, or not an object.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(
            f"not UTF-8: byte {raw[error.start]:#04x} at offset {error.start} of the line; re-encode the file"
        ) from None
    try:
        row = json.loads(text, object_pairs_hook=_unique)
    except RecordError:
        raise
    except json.JSONDecodeError as error:
        raise RecordError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RecordError("not JSON that can be read: nested too deeply") from None
    except ValueError as error:  # an integer with thousands of digits
        raise RecordError(f"not JSON that can be read: {error}") from None
    if not isinstance(row, dict):
        raise RecordError(f"expected a JSON object, found {_kind(row)}")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise RecordError(f"key {key!r} appears twice")
        row[key] = value
    return row


def _pair(row: dict[str, Any], where: str) -> Record:
    _known(row, KNOWN_KEYS)
    return Record(
        where=where,
        prompt=_text(row, "input"),
        response=_text(row, "output"),
        images=_references(row, "images"),
        videos=_references(row, "videos"),
    )


def _known(row: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = [key for key in row if key not in known]
    if unknown:
        noun = "key" if len(unknown) == 1 else "keys"
        raise RecordError(f"unknown {noun} {', '.join(map(repr, unknown))}; known: {', '.join(known)}")


def _text(row: dict[str, Any], key: str) -> str:
    if key not in row:
        raise RecordError(f"{key!r} is missing")
    value = row[key]
    if not isinstance(value, str):
        raise RecordError(f"{key!r} must be a string, found {_kind(value)}")
    if not value:
        raise RecordError(f"{key!r} is empty; expected at least one character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(
            f"{key!r} holds half of a surrogate pair at character {error.start}; it is not text"
        ) from None
    return value


def _references(row: dict[str, Any], key: str) -> tuple[str, ...]:
    value = row.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise RecordError(f"{key!r} must be a list of non-empty strings, found {_kind(value)}")
    return tuple(value)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), f"the number {str(value)[:40]}")
