# SPDX-License-Identifier: Apache-2.0
"""Data files cut into parts that can be read on their own: text in blocks of lines, Parquet and Arrow in batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_ext.manifest.file_kinds import HEAD_BYTES, Kind, UnreadableError, file_kind
from nemo_rl_ext.manifest.streams import (
    BLOCK_BYTES,
    is_stream,
    line_blocks,
    open_bytes,
    slice_blocks,
    text_blocks,
)

_BATCH_ROWS = 4096
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of a file that one worker reads: bytes of a plain file, row groups of Parquet, or all of it."""

    file: str
    kind: Kind | None
    """None for a file that cannot be read, and for a stream, whose kind shows when it is read."""
    start: int = 0
    end: int = 0
    """Half open. Bytes for `jsonl`, row groups for `parquet`, without meaning otherwise."""
    size: int = field(default=0)
    """On-disk bytes, for the progress bar."""
    problem: str = ""
    """Why nothing of it can be read."""


def slices(path: str | Path, slice_bytes: int = 4 * BLOCK_BYTES) -> list[Slice]:
    """Split a file into parts for workers. Compressed files and streams are one part each: they read only forwards.

    Raises:
        ValueError: for a missing file.
    """
    file = str(path)
    if is_stream(path):
        return [Slice(file=file, kind=None)]
    if not Path(path).is_file():
        raise ValueError(f"census: expected a file, {file} is none; {_advice(Path(path))}")
    size = Path(path).stat().st_size
    try:
        with open_bytes(path) as stream:
            kind = file_kind(stream.read(HEAD_BYTES))
        if kind == "jsonl":
            bounds = [*range(0, size, slice_bytes), size] if size else [0, 0]
            return [
                Slice(file=file, kind=kind, start=a, end=b, size=b - a)
                for a, b in zip(bounds, bounds[1:], strict=False)
            ]
        if kind == "parquet":
            with _arrow_errors(kind):
                groups = _pyarrow("parquet").ParquetFile(path).metadata.num_row_groups
            step = max(1, groups * slice_bytes // max(size, 1))
            return [
                Slice(file=file, kind=kind, start=g, end=min(g + step, groups), size=size * step // groups)
                for g in range(0, groups, step)
            ] or [Slice(file=file, kind=kind, size=size)]
    except UnreadableError as error:
        return [Slice(file=file, kind=None, size=size, problem=str(error))]
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
        return [Slice(file=file, kind=None, size=size, problem=problem)]
    return [Slice(file=file, kind=kind, size=size)]


def _advice(path: Path) -> str:
    if path.is_dir():
        return f"name the files in it, such as {path}/*.jsonl"
    if any(char in path.name for char in "*?["):
        return "no file matches this pattern, or it was quoted: the shell replaces patterns that stand without quotes"
    return "check the path"


def blocks_of_lines(part: Slice) -> Iterator[bytes]:
    """Blocks of whole lines of a text slice. A plain slice owns the lines that start in [start, end).

    Raises:
        UnreadableError: for what cannot be read, after the lines before it.
    """
    if part.problem:
        raise UnreadableError(part.problem)
    with open_bytes(part.file) as stream:
        is_plain = part.kind == "jsonl"
        yield from line_blocks(
            slice_blocks(stream, part.start, part.end) if is_plain else text_blocks(stream)
        )


def batches(part: Slice) -> Iterator[Any]:
    """Arrow record batches of a Parquet, Arrow or Feather slice, of at most some thousand rows each.

    Raises:
        UnreadableError: for what cannot be read, after the batches before it.
    """
    assert part.kind is not None
    with _arrow_errors(part.kind):
        if part.kind == "parquet":
            file = _pyarrow("parquet").ParquetFile(part.file)
            yield from file.iter_batches(batch_size=_BATCH_ROWS, row_groups=list(range(part.start, part.end)))
            return
        for batch in _arrow_batches(part):
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(start, _BATCH_ROWS)


def _arrow_batches(part: Slice) -> Iterator[Any]:
    if part.kind == "feather-1":
        yield from _pyarrow("feather").read_table(part.file).to_batches()
        return
    ipc = _pyarrow("ipc")
    with _pyarrow().memory_map(part.file) as source:
        if part.kind == "arrow":
            reader = ipc.open_file(source)
            yield from map(reader.get_batch, range(reader.num_record_batches))
            return
        yield from ipc.open_stream(source)
    # A stream that lost whole batches reads like a shorter one; what writers put at its end does not survive a cut.
    with open(part.file, "rb") as stream:
        stream.seek(-len(_END_OF_STREAM), 2)
        if stream.read() != _END_OF_STREAM:
            raise UnreadableError("the Arrow stream has no mark at its end: the file was cut; copy it again")


@contextmanager
def _arrow_errors(kind: Kind) -> Iterator[None]:
    arrow = _pyarrow()
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, UnreadableError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableError(
            f"the {kind} file is damaged, cut or of an unknown version ({reason})"
        ) from None


def _pyarrow(module: str = "") -> Any:
    import importlib

    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError:
        raise UnreadableError("reading Parquet and Arrow needs pyarrow; pip install pyarrow") from None


def text_buffers(batch: Any) -> Iterator[Any]:
    """The bytes under every text and binary column of a record batch, at any depth of structs and lists; None for a
    column of a type that is not known here, which may hold text as well."""
    pa = _pyarrow()
    kinds = pa.types
    pending = list(batch.columns)
    while pending:
        column = pending.pop()
        kind = column.type
        if isinstance(kind, pa.BaseExtensionType):
            pending.append(column.storage)
        elif kinds.is_dictionary(kind):
            pending.append(column.dictionary)
        elif kinds.is_struct(kind):
            pending.extend(column.flatten())
        elif kinds.is_map(kind):
            pending.extend([column.keys, column.items])
        elif kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
            pending.append(column.flatten())
        elif kinds.is_string(kind) or kinds.is_binary(kind):
            yield _bytes_of(column, np.int32)
        elif kinds.is_large_string(kind) or kinds.is_large_binary(kind):
            yield _bytes_of(column, np.int64)
        elif kinds.is_string_view(kind) or kinds.is_binary_view(kind):
            pending.append(
                column.cast(pa.large_string() if kinds.is_string_view(kind) else pa.large_binary())
            )
        elif not (kinds.is_primitive(kind) or kinds.is_null(kind) or kinds.is_decimal(kind)):
            yield None


def _bytes_of(column: Any, offset_type: type) -> bytes:
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return b""
    # A slice of a batch shares the buffers of the whole: only its own bytes are taken.
    bounds: np.ndarray = np.frombuffer(offsets, offset_type)[column.offset : column.offset + len(column) + 1]
    return memoryview(data)[int(bounds[0]) : int(bounds[-1])].tobytes()
