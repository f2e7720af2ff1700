# SPDX-License-Identifier: Apache-2.0
"""Lines of text files of any size, plain or compressed, from disk, a pipe or standard input, in bounded memory.

A compressed stream that ends early, is damaged, or is followed by something else is an error, never a shorter file:
Python's own readers of bz2 and xz drop what follows, and zstandard's takes a cut frame for the end.
"""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from nemo_rl_ext.manifest.file_kinds import (
    COMPRESSED,
    HEAD_BYTES,
    Kind,
    UnreadableError,
    check_text,
    file_kind,
)

BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 256 << 20
"""Longest line that is read; the rest of a longer one is skipped."""
STDIN = "-"
"""The path that means standard input."""


def is_stream(path: str | Path) -> bool:
    """Whether a path can be read once only, from the front: standard input, or a pipe such as `<(...)`."""
    return str(path) == STDIN or Path(path).is_fifo() or Path(path).is_char_device()


def open_bytes(path: str | Path) -> AbstractContextManager[BinaryIO]:
    """A binary reader; `-` is standard input. Raises `OSError` when it cannot be opened."""
    return nullcontext(sys.stdin.buffer) if str(path) == STDIN else open(path, "rb")


def text_lines(path: str | Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Lines of a text file, plain or compressed, with their ends; a longer one comes cut after `max_line_bytes + 1`.

    Raises:
        OSError: when the file cannot be opened or read.
        UnreadableError: for what is not text, and, after the lines before it, for a damaged compressed stream.
    """
    with open_bytes(path) as stream:
        for block in line_blocks(text_blocks(stream), max_line_bytes):
            for line in io.BytesIO(block):
                yield line[: max_line_bytes + 1]


def text_blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Decompressed blocks of a text stream. Raises as `text_lines` does."""
    head = stream.read(HEAD_BYTES)
    kind = file_kind(head)
    if kind == "jsonl":
        yield head
        yield from iter(lambda: stream.read(BLOCK_BYTES), b"")
    elif kind in COMPRESSED:
        blocks = _decompressed(head, stream, kind)
        first = next(blocks, b"")
        check_text(first[:HEAD_BYTES])
        yield first
        yield from blocks
    else:
        raise UnreadableError(
            f"expected JSON lines, plain or compressed, found {kind}; only `census` reads it"
        )


def slice_blocks(stream: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """The lines of a plain file that start in bytes [start, end), the last of them whole, in blocks."""
    position = start
    if start:
        # The line that runs over the boundary belongs to the slice before.
        stream.seek(start - 1)
        position -= 1
        for part in _rest_of_line(stream):
            position += len(part)
    last = b"\n"
    while position < end:
        last = stream.read(min(BLOCK_BYTES, end - position))
        if not last:
            raise UnreadableError(f"the file became shorter while it was read: byte {position} is gone")
        position += len(last)
        yield last
    if not last.endswith(b"\n"):
        yield from _rest_of_line(stream)


def _rest_of_line(stream: BinaryIO) -> Iterator[bytes]:
    while part := stream.readline(BLOCK_BYTES):
        yield part
        if part.endswith(b"\n"):
            return


def line_blocks(blocks: Iterable[bytes], max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The same bytes in blocks that end at line ends; of a line that is too long, `max_line_bytes + 1` bytes.

    Only a line longer than the blocks that come in is cut: what is in memory already is handed on as it is.
    """
    pending: list[bytes] = []
    size = 0
    skipping = False
    for block in blocks:
        if skipping:
            cut = block.find(b"\n") + 1
            if not cut:
                continue
            skipping, block = False, block[cut:]
        cut = block.rfind(b"\n") + 1
        if cut:
            yield from _bounded(b"".join([*pending, block[:cut]]), max_line_bytes)
            pending, size = [], 0
        if cut < len(block):
            pending.append(block[cut:])
            size += len(block) - cut
        if size > max_line_bytes:
            yield b"".join(pending)[: max_line_bytes + 1] + b"\n"
            pending, size, skipping = [], 0, True
    if pending:
        yield b"".join(pending)


def _bounded(block: bytes, max_line_bytes: int) -> Iterator[bytes]:
    """A block of whole lines, of which the first may have become too long with its last piece."""
    first_end = block.find(b"\n")
    if first_end <= max_line_bytes:
        yield block
    else:
        yield block[: max_line_bytes + 1] + b"\n"
        if first_end + 1 < len(block):
            yield block[first_end + 1 :]


# What a decoder makes of one piece is in memory at once; a hostile zstd stream makes 32 KiB of a byte.
_PIECE_BYTES = {"gzip": 64 << 10, "xz": 8 << 10, "zstd": 2 << 10, "bz2": 2 << 10}
_PADDING: dict[str, bytes] = {"gzip": b"\0", "xz": b"\0"}


def _decompressed(head: bytes, stream: BinaryIO, kind: Kind) -> Iterator[bytes]:
    """Every member of a compressed stream, in blocks of about `BLOCK_BYTES`.

    Raises:
        UnreadableError: after the blocks before it, for a damaged or cut stream and for anything that follows one.
    """
    block = bytearray()
    problem = None
    try:
        for piece in _output(head, stream, kind):
            block += piece
            if len(block) >= BLOCK_BYTES:
                yield bytes(block)
                block.clear()
    except UnreadableError as error:
        problem = error
    if block:
        yield bytes(block)
    if problem:
        raise problem


def _output(head: bytes, stream: BinaryIO, kind: Kind) -> Iterator[bytes]:
    make, damage = _decoder(kind)
    size = _PIECE_BYTES[kind]
    data = head
    decoder: Any = None
    while True:
        if not data and not (data := stream.read(size)):
            break
        if decoder is None:
            data = data.lstrip(_PADDING.get(kind, b""))
            if not data:
                continue
            decoder = make()
        for begin in range(0, len(data), size):
            try:
                out = decoder.decompress(data[begin : begin + size])
            except damage as error:
                raise UnreadableError(
                    f"the {kind} stream is damaged ({error}); copy the file again"
                ) from None
            yield out
            if decoder.eof:
                data = decoder.unused_data + data[begin + size :]
                decoder = None
                break
        else:
            data = b""
    if decoder is not None:
        raise UnreadableError(f"the {kind} stream ends early: the file was cut; copy it again")


def _decoder(kind: Kind) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """How to start decoding one member, and what its decoder raises on damage."""
    if kind == "gzip":
        return lambda: zlib.decompressobj(wbits=31), (zlib.error,)
    if kind == "bz2":
        return bz2.BZ2Decompressor, (OSError, ValueError)
    if kind == "xz":
        return lzma.LZMADecompressor, (lzma.LZMAError,)
    try:
        import zstandard
    except ImportError:
        raise UnreadableError("reading zstd needs zstandard; pip install zstandard") from None
    return zstandard.ZstdDecompressor().decompressobj, (zstandard.ZstdError,)
