# SPDX-License-Identifier: Apache-2.0
"""Census and manifest check: rows per second against what one would write first."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from benchmarks.guards_census import grep_count, loads_walk, make_corpus
from benchmarks.measure import Effort, Section, Table, alternate, ratio

NUM_ROWS, NUM_CHECKED = 60_000, 240


def census(folder: Path, effort: Effort) -> Table:
    """A corpus of chat rows with two dozen planted markers, all of which must be found."""
    from nemo_rl_ext.manifest.census import CensusConfig, take_census

    path = folder / "corpus.jsonl"
    num_rows = 2_000 if effort.quick else NUM_ROWS
    planted = make_corpus(path, num_rows)
    path.read_bytes()

    def ours(workers: int) -> None:
        found = take_census([path], CensusConfig(num_workers=workers))
        assert {finding.line for finding in found.findings} == planted, "the census missed or invented a row"

    found = {"walk": loads_walk(path), "grep": grep_count(path, "<image>")}
    timings = alternate(
        {
            "parse every row, look into every string": lambda: loads_walk(path),
            "census, 1 process": lambda: ours(1),
            "census, 2 processes": lambda: ours(2),
            "grep -c, one marker": lambda: grep_count(path, "<image>"),
        },
        rounds=3,
        clock=time.perf_counter,
    )
    hits = {
        "parse every row, look into every string": f"{len(found['walk'] & planted)} of {len(planted)}",
        "grep -c, one marker": f"{found['grep']} of {len(planted)}",
    }
    every = f"{len(planted)} of {len(planted)}"
    rows = [
        (name, f"{num_rows / timing.median:,.0f}", ratio(1 / timing.ratio), hits.get(name, every))
        for name, timing in timings.items()
    ]
    columns = ("census", "rows per second", "speed against baseline", "planted rows found")
    size = path.stat().st_size / 2**20
    return Table(columns=columns, rows=rows, caption=f"{num_rows:,} rows, {size:.0f} MiB; wall time.")


def check(folder: Path, effort: Effort) -> Table:
    """The demo's manifest: every row validated, every medium opened, every run predicted."""
    from PIL import Image

    from nemo_rl_ext.manifest.check import CheckConfig, check_manifest
    from nemo_rl_ext.manifest.demo import build_demo_manifest
    from nemo_rl_ext.manifest.loading import load_manifest
    from nemo_rl_ext.manifest.rows import ManifestRow

    num_rows = 24 if effort.quick else NUM_CHECKED
    path, _ = build_demo_manifest(folder / "demo", num_rows=num_rows, num_validation_rows=2, seed=0)

    def plain() -> None:
        with open(path, encoding="utf-8") as handle:
            for line in handle:
                for ref in ManifestRow.from_json(json.loads(line)).media_refs():
                    if ref.kind == "image" and not ref.ref.startswith("data:"):
                        Image.open(path.parent / ref.ref).convert("RGB")

    timings = alternate(
        {
            "parse, and decode images with Pillow": plain,
            "load_manifest (no media opened)": lambda: load_manifest(path),
            "check, headers": lambda: check_manifest(path, CheckConfig(decode=False, num_workers=1)),
            "check, media decoded": lambda: check_manifest(path, CheckConfig(num_workers=1)),
            "check, media decoded, 2 threads": lambda: check_manifest(path, CheckConfig(num_workers=2)),
        },
        rounds=3,
        clock=time.perf_counter,
    )
    rows = [
        (name, f"{num_rows / timing.median:,.0f}", ratio(1 / timing.ratio))
        for name, timing in timings.items()
    ]
    caption = f"The demo's {num_rows} rows, clips included (the baseline leaves clips out); wall time."
    return Table(
        columns=("manifest", "rows per second", "speed against baseline"), rows=rows, caption=caption
    )


def run(effort: Effort) -> Section:
    """Both, in one temporary directory."""
    with tempfile.TemporaryDirectory() as scratch:
        tables = [census(Path(scratch), effort), check(Path(scratch), effort)]
    return Section(
        name="manifest",
        title="Census and manifest check",
        about="What to run before a training run, and how long it takes.",
        tables=tables,
    )
