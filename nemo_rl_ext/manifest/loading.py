# SPDX-License-Identifier: Apache-2.0
"""Reading a manifest: streaming, strict, and with every fault named by file, line and field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_ext.manifest.file_kinds import UnreadableError
from nemo_rl_ext.manifest.keys import closest_key
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.manifest.streams import MAX_LINE_BYTES, text_lines
from nemo_rl_ext.media.errors import MediaDecodeError, shorten
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.sources import reference_kind, resolve_local

MAX_ERRORS = 20


class ManifestError(ValueError):
    """A manifest that cannot be used; one string, listing the first faults as `file:line: field: problem`."""


@dataclass(frozen=True, kw_only=True)
class RowFault:
    """What is wrong with one line."""

    file: str
    line: int
    """From 1; 0 for the file as a whole."""
    field: str
    """Path of the key, dots between, or empty for the whole line."""
    problem: str
    kind: str = ""
    """Which of `check_rules.WARNING_KINDS` a warning is; empty for a fault."""

    def __str__(self) -> str:
        name = f"{self.field}: " if self.field else ""
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {name}{self.problem}"


@dataclass(frozen=True, kw_only=True)
class Manifest(Sequence[ManifestRow]):
    """The rows of a manifest, in file order."""

    path: Path
    rows: tuple[ManifestRow, ...] = field(repr=False)
    policy: MediaPolicy

    @property
    def base_dir(self) -> Path:
        """The directory that relative media references start from."""
        return self.path.parent

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ManifestRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ManifestRow, ...]: ...
    def __getitem__(self, index: int | slice) -> ManifestRow | tuple[ManifestRow, ...]:
        return self.rows[index]


def load_manifest(
    path: str | Path, *, policy: MediaPolicy | None = None, check_media: bool = True
) -> Manifest:
    """Load and validate every row.

    `check_media` also proves that each media reference is allowed and, if local, an existing file inside the
    policy's roots (the manifest's own directory by default); nothing is decoded. Raises `ManifestError` that
    lists the first 20 faults.
    """
    path = Path(path)
    policy = policy or MediaPolicy()
    rows: list[ManifestRow] = []
    faults: list[RowFault] = []
    for item in scan_manifest(path, policy=policy, check_media=check_media):
        if isinstance(item, ManifestRow):
            rows.append(item)
        else:
            faults.append(item)
            if len(faults) > MAX_ERRORS:
                break
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults[:MAX_ERRORS])
        more = "\n  ... and more; only the first faults are listed" if len(faults) > MAX_ERRORS else ""
        raise ManifestError(f"{path}: the manifest has faults; fix these lines:\n{listed}{more}")
    if not rows:
        raise ManifestError(f"{path}: expected one JSON object per line, found an empty file")
    return Manifest(path=path, rows=tuple(rows), policy=policy)


def scan_manifest(
    path: str | Path,
    *,
    policy: MediaPolicy | None = None,
    check_media: bool = True,
    lines: Iterable[bytes] | None = None,
) -> Iterator[ManifestRow | RowFault]:
    """Every row, or the faults of its line, one line in memory at a time. Compressed files are read as they are, and
    `-` is standard input, whose media paths start from the current directory. `lines` are read instead of the file.

    Blank lines and a byte order mark are faults because NeMo-Gym's own reader dies of them; CRLF is fine.
    Raises `ManifestError` when the file itself cannot be read.
    """
    path = Path(path)
    policy = policy or MediaPolicy()
    first_lines: dict[str, int] = {}
    media_faults: dict[str, str] = {}
    try:
        for number, line in enumerate(text_lines(path) if lines is None else lines, start=1):
            parsed = _parse_line(line, str(path), number)
            if isinstance(parsed, list):
                yield from parsed
                continue
            if parsed.id is not None:
                first = first_lines.setdefault(parsed.row_id, number)
                if first != number:
                    problem = f"duplicate id {parsed.row_id!r}, first on line {first}"
                    yield RowFault(file=str(path), line=number, field="id", problem=problem)
                    continue
            faults = _media_faults(parsed, policy, path.parent, media_faults) if check_media else []
            if faults:
                yield from faults
            else:
                yield parsed
    except UnreadableError as error:
        raise ManifestError(f"{path}: cannot read the manifest: {error}") from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot read the manifest ({error.strerror or error})") from None


def _parse_line(line: bytes, file: str, number: int) -> ManifestRow | list[RowFault]:
    def fault(problem: str, name: str = "") -> list[RowFault]:
        return [RowFault(file=file, line=number, field=name, problem=problem)]

    if len(line) > MAX_LINE_BYTES:
        return fault(f"the line is longer than {MAX_LINE_BYTES} bytes")
    if line.startswith(b"\xef\xbb\xbf"):
        return fault("starts with a byte order mark; save the file as plain UTF-8")
    if not line.strip():
        return fault("blank line; remove it")
    try:
        value = json.loads(
            line.decode("utf-8").rstrip(), object_pairs_hook=_unique_keys, parse_constant=_no_constant
        )
    except UnicodeDecodeError as error:
        return fault(f"not UTF-8 at byte {error.start + 1}; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return fault(f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return fault("not usable JSON: nested too deeply")
    except ValueError as error:
        return fault(f"not usable JSON: {error}")
    if rb"\ud" in line.lower() and _has_lone_surrogate(value):
        return fault("an escape such as \\ud800 that stands for half a character; no tokenizer takes it")
    if not isinstance(value, dict):
        return fault(f"expected a JSON object, found {type(value).__name__}")
    try:
        return ManifestRow.from_json(value, file=file, line=number)
    except ValidationError as error:
        return [
            RowFault(file=file, line=number, field=_field_name(entry["loc"]), problem=_problem(entry))
            for entry in error.errors(include_url=False, include_context=False)
        ]


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"duplicate key {twice!r}")
    return value


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _field_name(loc: tuple[int | str, ...]) -> str:
    # Pydantic puts the tags of unions into the path; a reader looks for the keys of the file.
    keys = []
    for index, item in enumerate(loc):
        before = loc[max(0, index - 2) : index]
        is_union_tag = item in ("string", "parts") and before[-1:] == ("content",)
        is_part_tag = len(before) == 2 and before[0] == "parts" and isinstance(before[1], int)
        if not (is_union_tag or is_part_tag):
            keys.append(str(item))
    return ".".join(keys)


def _problem(entry: ErrorDetails) -> str:
    found = entry["input"]
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == "missing" and isinstance(found, dict):
        close = closest_key(str(entry["loc"][-1]), (str(key) for key in found))
        return f"{message}; found {close!r}, which nothing reads: rename it" if close else message
    if entry["type"] in ("missing", "value_error"):
        return message
    return f"{message}, found {shorten(repr(found), 80)}"


def _media_faults(
    row: ManifestRow, policy: MediaPolicy, base_dir: Path, known: dict[str, str]
) -> list[RowFault]:
    faults = []
    for media in row.media_refs():
        if media.ref not in known:
            known[media.ref] = _media_problem(media.ref, policy, base_dir)
        if known[media.ref]:
            problem = known[media.ref]
            faults.append(RowFault(file=row._file, line=row.line, field=media.field, problem=problem))
    return faults


def _media_problem(ref: str, policy: MediaPolicy, base_dir: Path) -> str:
    """Why a reference is refused, or an empty string."""
    try:
        kind = reference_kind(ref)
        if kind == "local":
            resolve_local(ref, policy, base_dir)
        elif kind == "remote" and not policy.allow_remote:
            return f"remote media {shorten(ref)!r} are not allowed; download them or set allow_remote"
    except MediaDecodeError as error:
        return str(error)
    return ""
