# SPDX-License-Identifier: Apache-2.0
"""What a data file is, by its first bytes, since names lie; what cannot be read is refused by its name."""

from __future__ import annotations

from typing import Literal

Kind = Literal["jsonl", "gzip", "zstd", "bz2", "xz", "parquet", "arrow", "arrow-stream", "feather-1"]

COMPRESSED: tuple[Kind, ...] = ("gzip", "zstd", "bz2", "xz")
HEAD_BYTES = 4096
"""As much of a file as `file_kind` wants to see."""

_READ: dict[bytes, Kind] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"FEA1": "feather-1",
    b"\xff\xff\xff\xff": "arrow-stream",
}
_ZSTD_SKIPPABLE = {bytes([0x50 + low, 0x2A, 0x4D, 0x18]) for low in range(16)}
# More digits first: UTF-32's mark begins like UTF-16's.
_REFUSED = {
    b"\xff\xfe\x00\x00": "UTF-32 text; save it as UTF-8",
    b"\x00\x00\xfe\xff": "UTF-32 text; save it as UTF-8",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"PARE": "encrypted Parquet; write it without encryption",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it",
    b"\x04\x22\x4d\x18": "lz4; unpack it, or compress it with gzip, zstd, bz2 or xz",
    b"\xff\x06\x00\x00sNaPpY": "snappy; unpack it, or compress it with gzip, zstd, bz2 or xz",
    b"\x1f\x9d": "compress (.Z); unpack it, or compress it with gzip, zstd, bz2 or xz",
    b"\x89HDF": "HDF5; export it as JSON lines or Parquet",
    b"SQLite format 3": "an SQLite database; export it as JSON lines or Parquet",
    b"Obj\x01": "Avro; export it as JSON lines or Parquet",
    b"ORC": "ORC; export it as JSON lines or Parquet",
}


class UnreadableError(ValueError):
    """A file, or the rest of it, that cannot be read; one sentence that says why and what to do."""


def file_kind(head: bytes) -> Kind:
    """The kind of a file whose first `HEAD_BYTES` are `head`; what looks like nothing else is JSON lines.

    Raises:
        UnreadableError: for what is known not to be rows: an archive, UTF-16, binary data, indented JSON.
    """
    for magic, kind in _READ.items():
        if head.startswith(magic):
            return kind
    if head[:4] in _ZSTD_SKIPPABLE:
        return "zstd"
    for magic, name in _REFUSED.items():
        if head.startswith(magic):
            raise UnreadableError(f"expected JSON lines, found {name}")
    if head[257:262] == b"ustar":
        raise UnreadableError("expected JSON lines, found a tar archive; unpack it")
    check_text(head)
    return "jsonl"


def check_text(head: bytes) -> None:
    """Refuse text that cannot be JSON lines.

    Raises:
        UnreadableError: for UTF-16 without a mark, binary data, and one JSON value over several lines.
    """
    if any(head[first::2].count(0) > len(head) // 4 for first in (0, 1)):
        raise UnreadableError("expected JSON lines, found UTF-16 or UTF-32 text; save it as UTF-8")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if b"\0" in head and not text.startswith((b"{", b"[", b'"')):
        raise UnreadableError("expected JSON lines, found binary data")
    first_line, _, rest = text.partition(b"\n")
    begins = first_line.strip()
    if begins == b"[" and rest.strip() or begins == b"{" and rest.lstrip().startswith((b'"', b"}")):
        raise UnreadableError(
            "expected JSON lines, found JSON over several lines; write one object per line (`jq -c` does)"
        )
