# SPDX-License-Identifier: Apache-2.0
"""A gate fails closed: every kind of file, whole, cut and damaged, is either swept to its end or named."""

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec

import numpy as np
import pytest

from nemo_rl_ext.manifest import census_sources, streams
from nemo_rl_ext.manifest.census import CensusConfig, take_census

NUM_ROWS = 3000
PLANTED = (3, 2990)
_noise = np.random.default_rng(0)
# Text that does not compress away, so that a cut in the middle of a file is a cut in the middle of the rows.
ROWS = [
    {"id": f"r{i}", "a": "<image>" if i + 1 in PLANTED else _noise.bytes(40).hex(), "n": [{"text": "x"}]}
    for i in range(NUM_ROWS)
]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
SMALL = TEXT[: TEXT.index(b"\n", 400) + 1]


def _zstd(data):
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor().compress(data)


def _zstd_stream(data):
    zstandard = pytest.importorskip("zstandard")
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return compressor.compress(data) + compressor.flush()


def _rows(data):
    return [json.loads(line) for line in data.splitlines()]


def _parquet(data, **options):
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(_rows(data)), out, **options)
    return out.getvalue()


def _arrow(data, kind="new_file"):
    pa = pytest.importorskip("pyarrow")
    table, out = pa.Table.from_pylist(_rows(data)), io.BytesIO()
    with getattr(pa.ipc, kind)(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    return out.getvalue()


def _feather(data, **options):
    feather = pytest.importorskip("pyarrow.feather")
    pa = pytest.importorskip("pyarrow")
    out = io.BytesIO()
    feather.write_feather(pa.Table.from_pylist(_rows(data)), out, **options)
    return out.getvalue()


KINDS = {
    "jsonl": lambda data: data,
    "gzip": gzip.compress,
    "zstd": _zstd,
    "zstd without sizes": _zstd_stream,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "parquet": _parquet,
    "parquet, row groups": lambda data: _parquet(data, row_group_size=700),
    "arrow": _arrow,
    "arrow stream": lambda data: _arrow(data, "new_stream"),
    "feather": _feather,
    "feather, lz4": lambda data: _feather(data, compression="lz4"),
}
MEMBERS = {"gzip": gzip.compress, "zstd": _zstd, "bz2": bz2.compress, "xz": lzma.compress}


def census(tmp_path, data, **options):
    path = tmp_path / "data"
    path.write_bytes(data)
    return take_census([path], CensusConfig(**options))


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_swept_to_its_end(tmp_path, kind):
    report = census(tmp_path, KINDS[kind](TEXT))
    assert (report.num_rows, report.num_broken, report.unread) == (NUM_ROWS, 0, [])
    assert [(f.line, f.example_id, f.path) for f in report.findings] == [
        (i, f"r{i - 1}", "a") for i in PLANTED
    ]
    clean = census(tmp_path, KINDS[kind](TEXT.replace(b"<image>", b"picture")))
    assert clean.num_rows == NUM_ROWS and not clean.failed


@pytest.mark.parametrize("share", [0.6, 0.99, "a byte less", "eight bytes less"])
@pytest.mark.parametrize("size", ["large", "small"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_is_never_taken_for_a_whole_one(tmp_path, kind, size, share):
    clean = (TEXT if size == "large" else SMALL).replace(b"<image>", b"picture")
    data = KINDS[kind](clean)
    length = {"a byte less": len(data) - 1, "eight bytes less": len(data) - 8}.get(share) or int(
        len(data) * share
    )
    if kind == "jsonl" and data[:length].count(b"}}") == 0 and share == "a byte less":
        pytest.skip("only the last line's end is missing: the row is whole")
    report = census(tmp_path, data[:length])
    assert report.failed, "rows behind the cut were passed"
    assert report.unread or (kind == "jsonl" and report.num_broken == 1)


@pytest.mark.parametrize("kind", MEMBERS)
def test_members_in_a_row_are_one_file_and_the_rest_must_be_one_too(tmp_path, kind):
    half = TEXT.index(b"\n", len(TEXT) // 2) - 20
    data = MEMBERS[kind](TEXT[:half]) + MEMBERS[kind](b"") + MEMBERS[kind](TEXT[half:])
    assert (census(tmp_path, data).num_rows, census(tmp_path, data).unread) == (NUM_ROWS, [])
    for rest in (b"garbage behind the end", TEXT, MEMBERS[kind](TEXT)[:40]):
        report = census(tmp_path, MEMBERS[kind](TEXT) + rest)
        assert report.unread and report.num_rows == NUM_ROWS, rest[:10]
    damaged = bytearray(MEMBERS[kind](TEXT))
    damaged[len(damaged) // 2] ^= 0xFF
    assert census(tmp_path, bytes(damaged)).failed


def test_what_a_padded_gzip_or_a_skippable_frame_holds_is_nothing(tmp_path):
    assert not census(tmp_path, gzip.compress(b'{"a": 1}\n') + b"\0" * 600).failed
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    for data in (skippable + _zstd(b'{"a": 1}\n'), _zstd(b'{"a": 1}\n') + skippable):
        report = census(tmp_path, data)
        assert (report.num_rows, report.unread) == (1, [])


def _zip(data):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("rows.jsonl", data)
    return out.getvalue()


def _tar(data):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("rows.jsonl")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


REFUSED = {
    "UTF-16": (TEXT.decode().encode("utf-16"), "UTF-16"),
    "UTF-16 without a mark": (TEXT.decode().encode("utf-16-be"), "UTF-16"),
    "UTF-32": (TEXT.decode().encode("utf-32"), "UTF-32"),
    "UTF-16 in gzip": (gzip.compress(TEXT.decode().encode("utf-16-le")), "UTF-16"),
    "indented JSON": (json.dumps(ROWS[:50], indent=1).encode(), "several lines"),
    "one indented object": (json.dumps(ROWS[0], indent=1).encode(), "several lines"),
    "indented JSON in xz": (lzma.compress(json.dumps(ROWS[:50], indent=1).encode()), "several lines"),
    "random bytes": (b"\x01" + np.random.default_rng(1).bytes(20_000), "binary data"),
    "no byte": (b"", "no row"),
    "no row": (b"\n\n" + b" " * 40 + b"\n", "no row"),
    "no row in gzip": (gzip.compress(b""), "no row"),
    "zip": (_zip(TEXT), "zip archive"),
    "tar": (_tar(TEXT), "tar archive"),
    "tar in gzip": (gzip.compress(_tar(TEXT)), ""),
    "gzip in gzip": (gzip.compress(gzip.compress(TEXT)), ""),
    "lz4": (b"\x04\x22\x4d\x18" + b"x" * 50, "lz4"),
    "SQLite": (b"SQLite format 3\0" + b"\0" * 200, "SQLite"),
    "encrypted Parquet": (b"PARE" + b"\0" * 200 + b"PARE", "encrypted Parquet"),
}


@pytest.mark.parametrize("data,reason", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_is_refused_by_name(tmp_path, data, reason):
    report = census(tmp_path, data)
    assert report.failed and (report.unread or report.num_broken)
    assert reason in "".join(item.error for item in report.unread)


def test_few_random_bytes_and_json_over_several_lines_are_broken_lines(tmp_path):
    for data in (b"\x8f\xc3nonsense", b'{"a": 1,\n "b": 2}\n', b"[1,\n2]\n"):
        assert census(tmp_path, data).failed


def test_one_unreadable_file_does_not_hide_the_others(tmp_path):
    names = {"cut.gz": gzip.compress(TEXT)[:9000], "utf16": TEXT.decode().encode("utf-16"), "good": TEXT}
    for name, data in names.items():
        (tmp_path / name).write_bytes(data)
    for workers in (1, 2):
        report = take_census([tmp_path / name for name in names], CensusConfig(num_workers=workers))
        assert {os.path.basename(item.file) for item in report.unread} == {"cut.gz", "utf16"}
        assert [f.line for f in report.findings if f.file.endswith("good")] == list(PLANTED)
        assert report.unread[0].num_rows > 0 and "cut" in report.unread[0].error


def test_a_file_that_may_not_be_opened_is_named_and_the_others_are_read(tmp_path, monkeypatch):
    for name in ("closed.jsonl", "good.jsonl"):
        (tmp_path / name).write_bytes(TEXT)
    opened = census_sources.open_bytes

    def refuse(path):
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    monkeypatch.setattr(census_sources, "open_bytes", refuse)  # a test that runs as root may open anything
    report = take_census([tmp_path / "closed.jsonl", tmp_path / "good.jsonl"])
    assert [item.error for item in report.unread] == ["it cannot be read (Permission denied)"]
    assert report.failed and report.num_rows == NUM_ROWS


def test_parquet_and_arrow_text_at_any_depth_and_of_any_type(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = ["clean", "a <image>", None]
    columns = {
        "plain": pa.array(text),
        "large": pa.array(text, pa.large_string()),
        "view": pa.array(text, pa.string_view()),
        "binary": pa.array([None if t is None else t.encode() for t in text]),
        "dictionary": pa.array(text).dictionary_encode(),
        "list": pa.array([[], ["x", "<image>"], None]),
        "struct": pa.array([{"a": None}, {"a": [{"b": "<image>"}]}, None]),
        "map": pa.array([[], [("k", "<image>")], None], pa.map_(pa.string(), pa.string())),
        "map_key": pa.array([[], [("<image>", "v")], None], pa.map_(pa.string(), pa.string())),
        "parts": pa.array([None, [{"type": "text", "text": "<im "}, {"type": "text", "text": "age>"}], []]),
        "union": pa.UnionArray.from_sparse(pa.array([0, 0, 0], pa.int8()), [pa.array(["", "<image>", ""])]),
    }
    for name, column in columns.items():
        table = pa.table({"id": ["x", "y", "z"], name: column})
        batches = [(tmp_path / "a", lambda p, t=table: _write_stream(p, t))]
        if name not in ("union",):  # Parquet has no unions
            batches.append((tmp_path / "p", lambda p, t=table: parquet.write_table(t, p)))
        for path, write in batches:
            write(path)
            report = take_census([path])
            assert [f.line for f in report.findings] == [2], (name, report.unread)


def _write_stream(path, table):
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("limit,too_long", [(100_000, []), (20_000, [2]), (500, [2, 4])])
@pytest.mark.parametrize("block_bytes", [700, 30_000, 10**6])
def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch, limit, too_long, block_bytes):
    monkeypatch.setattr(streams, "BLOCK_BYTES", block_bytes)
    lines = [b'{"a": "<image>"}', b"x" * 70_000, b'{"a": 1}', b"y" * 1_000, b"", b"the last"]
    path = tmp_path / "data"
    for data in (b"\n".join(lines), gzip.compress(b"\n".join(lines))):
        path.write_bytes(data)
        found = [line.rstrip(b"\n") for line in streams.text_lines(path, limit)]
        assert [number for number, line in enumerate(found, 1) if len(line) > limit] == too_long
        assert found == [line[: limit + 1] for line in lines]


def command(*arguments, **options):
    line = [sys.executable, "-m", "nemo_rl_ext", "-q", "census", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, timeout=120, **options)


def test_standard_input_and_pipes(tmp_path):
    for data in (TEXT, gzip.compress(TEXT), bz2.compress(TEXT)):
        done = command("-", "--fail", input=data)
        assert done.returncode == 1 and f"-:{PLANTED[0]}: a: '<image>'".encode() in done.stdout
    done = command("-", "--fail", input=gzip.compress(TEXT)[:5000])
    assert done.returncode == 1 and b"-: not read whole: the gzip stream ends early" in done.stdout
    done = command("-", "--fail", input=b"")
    assert done.returncode == 1 and b"-: not read whole: it holds no row" in done.stdout
    if find_spec("pyarrow"):
        done = command("-", "--fail", input=_parquet(TEXT))
        assert done.returncode == 1 and b"expected JSON lines" in done.stdout
    path = tmp_path / "rows.gz"
    path.write_bytes(gzip.compress(TEXT))
    shell = f"{sys.executable} -m nemo_rl_ext -q census <(cat {path}) --fail"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=120)
    assert done.returncode == 1 and b"2 markers in 2 rows" in done.stdout, done.stderr


def test_a_pattern_that_matches_nothing_and_a_directory_are_told_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="no file matches this pattern, or it was quoted"):
        take_census([tmp_path / "*.jsonl"])
    with pytest.raises(ValueError, match="name the files in it"):
        take_census([tmp_path])
