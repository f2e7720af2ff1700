# SPDX-License-Identifier: Apache-2.0
"""Finding placeholder runs: `find_runs` against a Python loop, a regular expression, and one pass over memory."""

from __future__ import annotations

import re

import numpy as np

from benchmarks.measure import Check, Effort, Section, alternate, ratio, seconds, timing_table
from nemo_rl_ext.align import compiled
from nemo_rl_ext.align.runs import Grammar, find_runs, vectorised_runs

GRAMMAR = Grammar(start_id=18, context_id=20, end_id=19)
RUN, TEXT = 2010, 1500
LENGTHS = (1_000, 10_000, 131_072, 1_000_000)
TARGET_S, TARGET_LENGTH = 1e-4, 131_072


def prompt_ids(length: int) -> np.ndarray:
    """Ids int64 [length]: runs of 2010 tokens, as 2400x1080 images get in a 32k context, and text between them."""
    run, text = (RUN, TEXT) if length > 2 * RUN else (length // 4, length // 8)
    block = [GRAMMAR.start_id, *[GRAMMAR.context_id] * run, GRAMMAR.end_id]
    words = np.random.default_rng(0).integers(100, 100_000, text).tolist()
    return np.array(((words + block) * (length // (text + len(block)) + 1))[:length], dtype=np.int64)


def loop(ids: list[int]) -> list[tuple[int, int]]:
    """What one writes first: (offset, length) of every block of context tokens."""
    runs, begin = [], None
    for index, token in enumerate(ids):
        if token == GRAMMAR.context_id:
            if begin is None:
                begin = index
        elif begin is not None:
            runs.append((begin, index - begin))
            begin = None
    if begin is not None:
        runs.append((begin, len(ids) - begin))
    return runs


NAMES = {GRAMMAR.start_id: "<img>", GRAMMAR.context_id: "<image>", GRAMMAR.end_id: "</img>"}
PATTERN = re.compile(r"<img>((?:<image>)*)</img>")


def regular_expression(text: str) -> list[int]:
    """Run lengths out of decoded text."""
    return [len(found.group(1)) // len("<image>") for found in PATTERN.finditer(text)]


def run(effort: Effort) -> Section:
    """Every length, array and list input."""
    # As in an aligner, which loads the kernels when it starts.
    compiled.load()
    cases, points = {}, []
    for length in LENGTHS[:2] if effort.quick else LENGTHS:
        wide = prompt_ids(length)
        narrow, listed = wide.astype(np.int32), wide.tolist()
        text = "".join(NAMES.get(token, " word") for token in listed)
        found = [(run.offset, run.length) for run in find_runs(wide, GRAMMAR)]
        assert found == loop(listed)
        complete = [run.length for run in find_runs(wide, GRAMMAR) if run.kind.value == "wrapped"]
        assert complete == regular_expression(text)
        timings = alternate(
            {
                "one comparison over the array (int32)": lambda ids=narrow: ids == GRAMMAR.context_id,
                "find_runs, int32 array": lambda ids=narrow: find_runs(ids, GRAMMAR),
                "find_runs, int64 array": lambda ids=wide: find_runs(ids, GRAMMAR),
                "find_runs without numba, int32 array": lambda ids=narrow: vectorised_runs(ids, GRAMMAR),
                "find_runs without numba, int64 array": lambda ids=wide: vectorised_runs(ids, GRAMMAR),
                "find_runs, list": lambda ids=listed: find_runs(ids, GRAMMAR),
                "Python loop, list": lambda ids=listed: loop(ids),
                "regular expression, text at hand": lambda text=text: regular_expression(text),
            },
            rounds=effort.rounds,
        )
        cases[f"{length:,} ids"] = timings
        points.append((float(length), timings["find_runs, int32 array"].median))
    checks = []
    at_target = cases.get(f"{TARGET_LENGTH:,} ids")
    if at_target:
        for kind in ("int32", "int64"):
            timing = at_target[f"find_runs, {kind} array"]
            checks.append(
                Check(
                    target=f"runs in 131k ids <= 0.1 ms ({kind} array)",
                    measured=f"{seconds(timing.median)}, {ratio(timing.ratio)} one comparison over the array",
                    met=timing.median <= TARGET_S,
                )
            )
    return Section(
        name="runs",
        title="Finding runs",
        about="`find_runs` against a Python loop and a regular expression. The regular expression is given the "
        "decoded text for nothing; decoding costs far more than any contender here. Aligners load the compiled "
        "kernels when they start; where they are not loaded, numpy finds the same runs.",
        tables=[timing_table(cases, "prompt")],
        checks=checks,
        series={"find_runs: seconds against ids": points},
    )
