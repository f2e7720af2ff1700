# SPDX-License-Identifier: Apache-2.0
"""The census over files: every format, every split, exact line numbers, and the command."""

import gzip
import json
import random

import pytest

from nemo_rl_ext.manifest import streams
from nemo_rl_ext.manifest.census import CensusConfig, take_census
from nemo_rl_ext.manifest.census_sources import blocks_of_lines, slices

SEED_STRING = "{type<image>|bold}"


def row(index, dirty=False, size=20):
    arguments = json.dumps({"style": SEED_STRING if dirty else "bold"})
    call = {"id": "c", "type": "function", "function": {"name": "fmt", "arguments": arguments}}
    content = "look at this " * random.Random(index).randrange(size)
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    return {"id": f"r{index}", "messages": messages}


PLANTED = (3, 40, 41, 199)
ROWS = [row(i, dirty=i in PLANTED) for i in range(200)]
TEXT = "".join(json.dumps(r) + "\n" for r in ROWS).encode()
PATH = "messages[1].tool_calls[0].function.arguments{json}.style"


def write(path, kind):
    if kind == "zstd":
        zstandard = pytest.importorskip("zstandard")
        half = len(TEXT) // 2  # two frames, as `zstd` makes when files are appended
        path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(t) for t in (TEXT[:half], TEXT[half:])))
    elif kind == "gzip":
        path.write_bytes(gzip.compress(TEXT))
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=64)
    else:
        path.write_bytes(TEXT)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "gzip", "zstd", "parquet"])
def test_every_format_gives_the_same_findings(tmp_path, kind):
    report = take_census([write(tmp_path / f"data.{kind}", kind)])
    assert [(f.line, f.example_id, f.path, f.marker, f.count) for f in report.findings] == [
        (i + 1, f"r{i}", PATH, "<image>", 1) for i in PLANTED
    ]
    assert (report.num_rows, report.num_rows_with_markers, report.num_broken) == (200, 4, 0)
    assert report.by_marker == {"<image>": 4} and report.failed
    assert report.by_field == {"messages[].tool_calls[].function.arguments{json}.style": 4}
    assert report.num_phantom_tokens is None


@pytest.mark.parametrize("slice_bytes", [1, 7, 100, 1000, 10**6])
@pytest.mark.parametrize("block_bytes", [1, 64, 10**6])
def test_slices_cut_anywhere_hold_every_line_once(tmp_path, monkeypatch, slice_bytes, block_bytes):
    monkeypatch.setattr(streams, "BLOCK_BYTES", block_bytes)
    text = (
        b'{"a": 1}\n\n{"b": "' + b"x" * 50 + b'"}\r\n' + b'{"c": 3}\n' * 5 + b'{"no": "newline at the end"}'
    )
    path = tmp_path / "data.jsonl"
    path.write_bytes(text)
    blocks = [block for part in slices(path, slice_bytes) for block in blocks_of_lines(part)]
    assert b"".join(blocks) == text
    assert all(block.endswith(b"\n") for block in blocks[:-1])


def test_line_numbers_add_up_over_slices_blocks_and_broken_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_rl_ext.manifest.census.slices", lambda p: slices(p, slice_bytes=50))
    lines = ['{"a": "<image>"}', "", "not json <image>", '{"a": 1}', '{"id": 7, "a": "<img>"}', "   "] * 20
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    report = take_census([path])
    assert [f.line for f in report.findings] == [
        i + 1 for i, t in enumerate(lines) if "json" not in t and "<" in t
    ]
    assert [b.line for b in report.broken] == [i + 1 for i, t in enumerate(lines) if "json" in t]
    assert report.num_rows == 60 and report.num_broken == 20


def test_two_workers_report_what_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_rl_ext.manifest.census.slices", lambda p: slices(p, slice_bytes=9000))
    path = write(tmp_path / "data.jsonl", "jsonl")
    seen = []
    one = take_census([path])
    two = take_census([path], CensusConfig(num_workers=2), on_progress=seen.append)
    assert two.findings == one.findings and two.num_rows == one.num_rows
    assert sum(seen) == len(TEXT)


def test_empty_and_odd_files(tmp_path):
    cases = {
        "empty": b"",
        "bom": b'\xef\xbb\xbf{"a": "<image>"}\n',
        "newlines": b"\n\n\n",
        "scalar": b'"<image>"\n',
    }
    counts = {}
    for name, data in cases.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(data)
        report = take_census([path])
        counts[name] = (report.num_rows, report.num_findings, report.num_broken)
    assert counts == {"empty": (0, 0, 0), "bom": (1, 1, 0), "newlines": (0, 0, 0), "scalar": (1, 1, 0)}


def test_findings_kept_are_bounded_and_counts_stay_exact(tmp_path):
    path = write(tmp_path / "data.jsonl", "jsonl")
    report = take_census([path], CensusConfig(max_findings=2))
    assert len(report.findings) == 2 and report.num_findings == 4


def test_missing_files_and_tokenizers_are_named(tmp_path):
    with pytest.raises(ValueError, match="expected a file, .*nope.jsonl is none"):
        take_census([tmp_path / "nope.jsonl"])
    with pytest.raises(ValueError, match="expected the directory of a tokenizer"):
        take_census([write(tmp_path / "d.jsonl", "jsonl")], CensusConfig(tokenizer=str(tmp_path / "nope")))


def test_a_tokenizer_tells_phantoms_from_harmless_markers(tmp_path, tokenizer_dir):
    path = tmp_path / "data.jsonl"
    texts = [SEED_STRING, "<video> is no token here", "<my_image_pad><my_image_pad>", "clean"]
    path.write_text("".join(json.dumps({"id": i, "a": t}) + "\n" for i, t in enumerate(texts)))
    report = take_census([path], CensusConfig(tokenizer=str(tokenizer_dir)))
    assert [(f.marker, f.count, f.phantom_tokens) for f in report.findings] == [
        ("<image>", 1, 1),
        ("<video>", 1, 0),
        ("<my_image_pad>", 2, 2),
    ]
    assert report.num_phantom_tokens == 3 and report.failed
    path.write_text(json.dumps({"a": "<video>"}) + "\n")
    assert not take_census([path], CensusConfig(tokenizer=str(tokenizer_dir))).failed


def run_command(*arguments):
    import typer
    from typer.testing import CliRunner

    from nemo_rl_ext.manifest.census_command import census

    app = typer.Typer()
    app.command()(census)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_command_prints_reports_and_fails_on_request(tmp_path):
    dirty, clean = write(tmp_path / "dirty.jsonl", "jsonl"), tmp_path / "clean.jsonl"
    clean.write_text('{"a": 1}\nbroken\n')
    out = run_command(dirty, clean, "--workers", 1, "--report", tmp_path / "report.json", "--show", 2)
    assert out.exit_code == 0, out.output
    assert f"dirty.jsonl:4: {PATH}: '<image>' x1 (id r3)" in out.output
    assert "... 2 more findings" in out.output and "clean.jsonl:2: skipped, not JSON" in out.output
    assert "201 rows in 2 files, 1 broken line, 0 files not read whole: 4 markers in 4 rows" in out.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["findings"][0]["path"] == PATH and report["num_broken"] == 1
    assert run_command(dirty, "--workers", 1, "--fail").exit_code == 1
    assert run_command(clean, "--workers", 1, "--fail").exit_code == 1, "a broken line was not read"
    clean.write_text('{"a": 1}\n')
    assert run_command(clean, "--workers", 1, "--fail").exit_code == 0
    assert isinstance(run_command(tmp_path / "nope", "--fail").exception, ValueError)
