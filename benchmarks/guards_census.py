# SPDX-License-Identifier: Apache-2.0
"""Census throughput on a generated corpus with planted markers, against `grep -c` and a `json.loads` walk.

    python benchmarks/guards_census.py --rows 1000000

Prints one JSON object. CPU seconds are those of the processes doing the work, so that rows per second per core
hold on a busy machine as well; wall seconds are given next to them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

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


def measured(work) -> tuple[object, float, float]:
    """(result, wall seconds, CPU seconds of this process and its children)."""
    own, children = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    result = work()
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = time.process_time() - own
    return result, wall, cpu + after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dir", type=Path, default=None, help="where to put the corpus (deleted afterwards)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        path = folder / "corpus.jsonl"
        planted = make_corpus(path, args.rows)
        path.read_bytes()  # every contender reads from the page cache
        out = {"rows": args.rows, "mib": round(path.stat().st_size / 2**20, 1), "planted": NUM_PLANTED}

        def note(name, lines_found, wall, cpu):
            out[name] = {
                "found": lines_found,
                "wall_s": round(wall, 2),
                "cpu_s": round(cpu, 2),
                "rows_per_s_per_core": round(args.rows / cpu),
            }

        for name, workers in (("census_1_process", 1), ("census_2_processes", 2)):
            report, wall, cpu = measured(lambda n=workers: take_census([path], CensusConfig(num_workers=n)))
            assert report.num_rows == args.rows and report.num_broken == 0
            note(name, len({f.line for f in report.findings} & planted), wall, cpu)
            assert {f.line for f in report.findings} == planted, "the census missed or invented a row"
        found, wall, cpu = measured(lambda: loads_walk(path))
        note("json_loads_walk", len(found & planted), wall, cpu)
        found, wall, cpu = measured(lambda: grep_count(path, "<image>"))
        note("grep_c_one_marker", found, wall, cpu)
        found, wall, cpu = measured(lambda: grep_count(path, *DEFAULT_MARKERS))
        note("grep_c_all_markers", found, wall, cpu)
        print(json.dumps(out, indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
