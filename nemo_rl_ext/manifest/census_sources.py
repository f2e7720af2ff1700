# SPDX-License-Identifier: Apache-2.0
"""Rows of JSONL (plain, gzip, zstd) and Parquet files in blocks that can be read on their own."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of a file that one worker reads: bytes of a plain file, row groups of Parquet, or all of it."""

    file: str
    kind: str
    """`jsonl`, `gzip`, `zstd` or `parquet`."""
    start: int
    end: int
    """Half open. Bytes for `jsonl`, row groups for `parquet`, the file's bytes otherwise."""
    size: int
    """On-disk bytes, for the progress bar."""


def slices(path: str | Path, slice_bytes: int = 4 * BLOCK_BYTES) -> list[Slice]:
    """Split a file into parts for workers. Compressed files are one part each: they read only forwards.

    Raises:
        ValueError: for a missing file, or Parquet or zstd without the library that reads it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"census: expected a file, {path} is none; quote shell patterns or check the path")
    size = path.stat().st_size
    kind = file_kind(path)
    if kind == "jsonl":
        bounds = [*range(0, size, slice_bytes), size] if size else [0]
        return [
            Slice(file=str(path), kind=kind, start=a, end=b, size=b - a)
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]
    if kind == "parquet":
        num_groups = _parquet_file(path).metadata.num_row_groups
        share = size // max(num_groups, 1)
        return [
            Slice(file=str(path), kind=kind, start=g, end=g + 1, size=share) for g in range(num_groups)
        ]  # fmt: skip
    if kind == "zstd":
        _zstandard()
    return [Slice(file=str(path), kind=kind, start=0, end=size, size=size)]


def file_kind(path: Path) -> str:
    """By content, since names lie: the magic bytes of gzip, zstd and Parquet, JSONL otherwise."""
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic[:2] == b"\x1f\x8b":
        return "gzip"
    return {b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}.get(magic, "jsonl")


def line_blocks(part: Slice) -> Iterator[bytes]:
    """Blocks of whole lines of a JSONL slice. A plain slice owns the lines that start in [start, end)."""
    if part.kind == "gzip":
        with gzip.open(part.file, "rb") as stream:
            yield from _whole_lines(stream, None)
    elif part.kind == "zstd":
        reader = _zstandard().ZstdDecompressor()
        with open(part.file, "rb") as raw, reader.stream_reader(raw, read_across_frames=True) as stream:
            yield from _whole_lines(stream, None)
    else:
        with open(part.file, "rb") as stream:
            start = part.start
            if start:
                # The line that runs over the boundary belongs to the slice before.
                stream.seek(start - 1)
                start += len(stream.readline()) - 1
            if start < part.end:
                stream.seek(start)
                yield from _whole_lines(stream, part.end - start)


def _whole_lines(stream: BinaryIO | io.BufferedIOBase | Any, budget: int | None) -> Iterator[bytes]:
    """Blocks that end at line ends; with a budget, stops after the line that reaches it."""
    pending: list[bytes] = []
    taken = 0
    while budget is None or taken < budget:
        block = stream.read(BLOCK_BYTES if budget is None else min(BLOCK_BYTES, budget - taken))
        if not block:
            break
        taken += len(block)
        cut = block.rfind(b"\n") + 1
        if cut:
            yield b"".join([*pending, block[:cut]])
            pending = [block[cut:]] if cut < len(block) else []
        else:
            pending.append(block)
    if pending:
        tail = b"" if budget is None else stream.readline()
        yield b"".join([*pending, tail])


def parquet_batches(part: Slice, batch_rows: int = 4096) -> Iterator[Any]:
    """Arrow record batches of a Parquet slice."""
    yield from _parquet_file(Path(part.file)).iter_batches(
        batch_size=batch_rows, row_groups=list(range(part.start, part.end))
    )


def text_buffers(batch: Any) -> Iterator[bytes]:
    """The bytes under every string column of a record batch, at any depth of structs and lists."""
    import pyarrow as pa

    pending = list(batch.columns)
    while pending:
        column = pending.pop()
        kind = column.type
        if pa.types.is_dictionary(kind):
            pending.append(column.dictionary)
        elif pa.types.is_struct(kind):
            pending.extend(column.flatten())
        elif pa.types.is_map(kind):
            pending.extend([column.keys, column.items])
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            pending.append(column.flatten())
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            data = column.buffers()[-1]
            if data is not None:
                yield data.to_pybytes()
        elif pa.types.is_string_view(kind):
            pending.append(column.cast(pa.large_string()))


def _parquet_file(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"census: reading {path} needs pyarrow; pip install pyarrow") from error
    return pyarrow.parquet.ParquetFile(path)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ValueError("census: reading zstd files needs zstandard; pip install zstandard") from error
    return zstandard
