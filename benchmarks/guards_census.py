# SPDX-License-Identifier: Apache-2.0
"""Census throughput, memory and growth on generated corpora with planted markers, beside `grep -c` and `json.loads`.

    python -m benchmarks guards_census --rows 3000000

Prints one JSON object per measurement. CPU seconds are those of the processes doing the work, so that rows per second
per core hold on a busy machine as well; wall seconds are given next to them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measure import slope
from nemo_rl_ext.manifest.census import CensusConfig, take_census
from nemo_rl_ext.manifest.census_scan import DEFAULT_MARKERS

WORDS = (
    'the quick brown fox jumps over a lazy dog and <b>bold</b> "quoted" line\nbreak a < b [see] naïve'.split(
        " "
    )
)
NUM_PLANTED = 24


def make_corpus(path: Path, num_rows: int, seed: int = 0) -> set[int]:
    """Chat rows with tool calls; returns the 1-based lines that hold a marker, in six kinds of places."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randrange(5, 40))) for _ in range(5000)]
    planted = sorted(rng.sample(range(num_rows), NUM_PLANTED))
    kinds = {line: index % 6 for index, line in enumerate(planted)}
    marker = "{type<image>|bold}"
    with path.open("w", encoding="utf-8") as out:
        for index in range(num_rows):
            kind = kinds.get(index)
            arguments = {"style": marker if kind == 0 else "bold", "n": index, "text": rng.choice(texts)}
            if kind == 1:
                arguments["<image>"] = "x"
            function = {"name": "<video>" if kind == 2 else "fmt", "arguments": json.dumps(arguments)}
            if kind == 3:
                function["arguments"] = function["arguments"].replace("bold", "\\u003cimage\\u003e")
            answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}
            if kind == 4:
                answer["reasoning_content"] = marker
            parts = [{"type": "text", "text": marker if kind == 5 else rng.choice(texts)}]
            row = {"id": f"r{index}", "messages": [{"role": "user", "content": parts}, answer]}
            out.write(json.dumps(row, ensure_ascii=index % 2 == 0) + "\n")
    return {line + 1 for line in planted}


def measured(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """(result, wall seconds, CPU seconds of this process and its children)."""
    own, children = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    result = work()
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = time.process_time() - own
    return result, wall, cpu + after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime


def census_alone(path: Path, num_workers: int) -> dict[str, Any]:
    """One census; to be called in a process of its own, so that the peak of its memory is its own."""
    report, wall, cpu = measured(lambda: take_census([path], CensusConfig(num_workers=num_workers)))
    assert report.num_broken == 0 and not report.unread
    # A process's own peak is asked of /proc: `ru_maxrss` starts at what the process that started it held.
    status = Path("/proc/self/status").read_text()
    own = int(status.partition("VmHWM:")[2].split()[0])
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "rows": report.num_rows,
        "lines": sorted({finding.line for finding in report.findings}),
        "wall_s": wall,
        "cpu_s": cpu,
        "peak_mib": (children if num_workers > 1 else own) / 1024,
    }


def growth(folder: Path, num_rows: int) -> list[dict[str, Any]]:
    """A quarter, half and all of the rows, plain, and all of them as zstd where it is installed."""
    spawn = multiprocessing.get_context("spawn")
    found = []

    def note(path: Path, planted: set[int], size: int, workers: int) -> None:
        with ProcessPoolExecutor(1, spawn) as fresh:
            # By its module's own name: run by name, this file is `__main__`, which another process cannot import.
            alone = importlib.import_module("benchmarks.guards_census").census_alone
            one = fresh.submit(alone, path, workers).result()
        assert set(one.pop("lines")) == planted and one["rows"] == size, "the census missed or invented a row"
        one |= {"rows_per_s_per_core": round(size / one["cpu_s"]), "rows_per_s": round(size / one["wall_s"])}
        one |= {"file": path.suffix, "mib": round(path.stat().st_size / 2**20, 1), "processes": workers}
        one |= {key: round(one[key], 2) for key in ("wall_s", "cpu_s", "peak_mib")}
        print(json.dumps(one), flush=True)
        found.append(one)

    for size in (num_rows // 4, num_rows // 2, num_rows):
        path = folder / f"rows_{size}.jsonl"
        planted = make_corpus(path, size)
        path.read_bytes()
        for workers in (1, 2):
            note(path, planted, size, workers)
        if size == num_rows and shutil.which("zstd"):
            subprocess.run(["zstd", "-q", "--rm", str(path)], check=True)
            note(path.with_suffix(".jsonl.zst"), planted, size, 1)
        path.unlink(missing_ok=True)
    return found


def loads_walk(path: Path) -> set[int]:
    """What one would write first: parse every row, look for every marker in every string."""
    hits = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            pending = [json.loads(line)]
            while pending:
                value = pending.pop()
                if isinstance(value, dict):
                    pending.extend(value)
                    pending.extend(value.values())
                elif isinstance(value, list):
                    pending.extend(value)
                elif isinstance(value, str) and any(marker in value for marker in DEFAULT_MARKERS):
                    hits.add(number)
    return hits


def grep_count(path: Path, *patterns: str) -> int:
    """`grep -c`: lines that hold one of the fixed strings."""
    command = ["grep", "-cF", *(part for p in patterns for part in ("-e", p)), str(path)]
    out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    return int(out.stdout)


def compare(path: Path, num_rows: int) -> dict[str, Any]:
    """The census beside what one would write first, on one corpus."""
    planted = make_corpus(path, num_rows)
    path.read_bytes()  # every contender reads from the page cache
    contenders = {
        "census": lambda: {f.line for f in take_census([path]).findings},
        "json_loads_walk": lambda: loads_walk(path),
        "grep_c_one_marker": lambda: grep_count(path, "<image>"),
        "grep_c_all_markers": lambda: grep_count(path, *DEFAULT_MARKERS),
    }
    out: dict[str, Any] = {"rows": num_rows, "planted": NUM_PLANTED}
    for name, work in contenders.items():
        found, _, cpu = measured(work)
        count = found if isinstance(found, int) else len(found & planted)
        out[name] = {"found": count, "rows_per_s_per_core": round(num_rows / cpu)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=3_000_000, help="rows of the largest corpus")
    parser.add_argument(
        "--compared-rows", type=int, default=200_000, help="rows for the comparison with others"
    )
    parser.add_argument("--dir", type=Path, default=None, help="where to put the corpus (deleted afterwards)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        print(json.dumps(compare(folder / "compared.jsonl", args.compared_rows)), flush=True)
        runs = growth(folder, args.rows)
        for workers in (1, 2):
            points = [
                (run["rows"], run["cpu_s"])
                for run in runs
                if run["processes"] == workers and run["file"] == ".jsonl"
            ]
            print(json.dumps({"processes": workers, "growth_exponent": round(slope(points), 3)}), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
