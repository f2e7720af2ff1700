# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks.

python -m benchmarks                    every one of the default run, each in a process of its own
python -m benchmarks runs repair        some of them
python -m benchmarks --publish          all, and write docs/benchmarks.md, its JSON and its plot
python -m benchmarks arms --steps 80    a longer study, with its own options: arms, fuzz, oracle, guards_*, distill_*
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.measure import Effort, machine_facts
from benchmarks.publish import PLOT_FILE, markdown, scaling_plot, targets, with_costs

DEFAULT = ("runs", "grids", "scaling", "decode", "manifest", "repair", "pool", "overhead")
TIMEOUT_S = 900
REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def studies() -> list[str]:
    """Modules beside this one that are run by name with options of their own."""
    found = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return [
        name
        for name in found
        if not name.startswith(("_", "bench_"))
        and "__main__" in (Path(__file__).parent / f"{name}.py").read_text()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 when a benchmark failed; a missed target is reported and is no failure."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in studies():
        sys.argv = [f"benchmarks {arguments[0]}", *arguments[1:]]
        runpy.run_module(f"benchmarks.{arguments[0]}", run_name="__main__")
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(DEFAULT)}; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of alternation")
    parser.add_argument("--quick", action="store_true", help="small cases, to see that everything runs")
    parser.add_argument("--json", type=Path, default=None, help="write the results here")
    parser.add_argument(
        "--publish", action="store_true", help="write docs/benchmarks.md, its JSON and its plot"
    )
    parser.add_argument("--section", choices=DEFAULT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in DEFAULT]
    if unknown:
        parser.error(
            f"no benchmark {', '.join(unknown)}; there are {', '.join(DEFAULT)} and {', '.join(studies())}"
        )
    effort = Effort(rounds=options.rounds, quick=options.quick)
    if options.section and options.json:
        section = importlib.import_module(f"benchmarks.bench_{options.section}").run(effort)
        options.json.write_text(json.dumps(section.to_json()), encoding="utf-8")
        return 0
    results, failed = measure(options.names or DEFAULT, options)
    show(results)
    if options.json:
        write_json(options.json, results)
    if options.publish:
        publish(results, DOCS, REPOSITORY / "README.md")
    return 1 if failed else 0


def measure(names: Sequence[str], options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run each benchmark in a process of its own; returns the results and the names of those that failed."""
    console = Console(stderr=True)
    began = time.perf_counter()
    results: dict[str, Any] = {
        "machine": machine_facts(),
        "rounds": options.rounds,
        "quick": options.quick,
        "sections": [],
    }
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            path = Path(scratch) / f"{name}.json"
            command = [sys.executable, "-m", "benchmarks", "--section", name, "--json", str(path)]
            command += ["--rounds", str(options.rounds), *(["--quick"] if options.quick else [])]
            section_began = time.perf_counter()
            environment = {**os.environ, **{key: os.environ.get(key, value) for key, value in QUIET.items()}}
            environment["PYTHONPATH"] = os.pathsep.join(
                filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
            )
            try:
                code = subprocess.run(
                    command, env=environment, cwd=REPOSITORY, stdout=sys.stderr, timeout=TIMEOUT_S
                ).returncode
            except subprocess.TimeoutExpired:
                code = f"no result after {TIMEOUT_S} s"
            took = time.perf_counter() - section_began
            if path.is_file():
                section = json.loads(path.read_text(encoding="utf-8"))
                section |= {
                    "seconds": round(took, 1),
                    "taken": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
                    "load_average": [round(value, 2) for value in os.getloadavg()],
                }
                results["sections"].append(section)
                console.print(f"{name}: {took:.0f} s", highlight=False)
            else:
                failed.append(name)
                console.print(f"{name}: failed ({code})", style="red", highlight=False)
    results["seconds"] = round(time.perf_counter() - began, 1)
    return results, failed


def show(results: dict[str, Any]) -> None:
    """Every table on the terminal, the targets last."""
    console = Console()
    tables = [
        (section["title"] if index == 0 else "", table)
        for section in results["sections"]
        for index, table in enumerate(section["tables"])
    ]
    tables.append(
        ("Targets", {"columns": ("target", "measured", "met"), "rows": targets(results), "caption": ""})
    )
    for title, table in tables:
        drawn = RichTable(title=title or None, caption=table["caption"] or None, title_justify="left")
        for column in table["columns"]:
            drawn.add_column(column, overflow="fold")
        for row in table["rows"]:
            drawn.add_row(*(str(cell).replace("[", "\\[") for cell in row))
        console.print(drawn)
    console.print(f"{results['seconds']:.0f} s", highlight=False)


def with_published(results: dict[str, Any], path: Path) -> dict[str, Any]:
    """Results, completed by published sections of the same machine and packages, in the default order."""
    sections = {}
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        same = ("cpu", "cores", "packages")
        if all(before["machine"][key] == results["machine"][key] for key in same):
            sections = {section["name"]: section for section in before["sections"]}
    sections |= {section["name"]: section for section in results["sections"]}
    return {**results, "sections": [sections[name] for name in DEFAULT if name in sections]}


def write_json(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def publish(results: dict[str, Any], folder: Path, readme: Path) -> None:
    """The page, its data, its plot and the README's table; sections that were not run stay as they were taken."""
    results = with_published(results, folder / "benchmarks.json")
    write_json(folder / "benchmarks.json", results)
    (folder / "benchmarks.md").write_text(markdown(results), encoding="utf-8")
    readme.write_text(with_costs(readme.read_text(encoding="utf-8"), results), encoding="utf-8")
    plot = scaling_plot(results)
    if plot is not None:
        (folder / PLOT_FILE).write_text(plot, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
