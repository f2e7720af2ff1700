# SPDX-License-Identifier: Apache-2.0
"""Growth: runs over ids, plans over media, repairs over images and over megapixels. All must be linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.bench_repair import MAX_PATCHES, MEAN, MIN_PATCHES, STD
from benchmarks.bench_runs import GRAMMAR, prompt_ids
from benchmarks.measure import Check, Effort, Section, Table, alternate, seconds, slope
from nemo_rl_ext.align import compiled
from nemo_rl_ext.align.runs import find_runs

LIMIT = 1.15
"""Exponent of growth up to which a curve counts as linear."""


def points(
    values: list[float], make: Callable[[float], Callable[[], Any]], effort: Effort
) -> list[tuple[float, float]]:
    """(value, seconds) for every value, measured in alternation."""
    timings = alternate({str(value): make(value) for value in values}, rounds=effort.rounds)
    return [(value, timings[str(value)].least) for value in values]


def repair_of(size: tuple[int, int], count: int) -> Callable[[], Any]:
    """A repair of `count` images of a size, on the grids that four fifths of their static tokens leave."""
    import torch

    from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
    from nemo_rl_ext.align.grids import DynamicTiler
    from nemo_rl_ext.align.items import MediaItem
    from nemo_rl_ext.align.turn import align_turn

    tiler = DynamicTiler(16, 2, 16, MAX_PATCHES)
    family = NemotronFamily(
        grammar=GRAMMAR,
        tiler=tiler,
        mean=tuple(MEAN),
        std=tuple(STD),
        layout=Layout.NATIVE,
        dtype=torch.float32,
    )
    grid = tiler.grid(size, int(tiler.static_grid(size).num_patches * 0.8))
    run = [GRAMMAR.start_id, *[GRAMMAR.context_id] * grid.num_tokens(), GRAMMAR.end_id]
    ids = np.array(run * count, dtype=np.int32)
    frames = np.random.default_rng(0).integers(0, 256, (1, *size, 3), dtype=np.uint8)
    items = [MediaItem(size=size, source="a.png", load=lambda: frames) for _ in range(count)]
    return lambda: align_turn(ids, items, family=family, captured=[grid] * count)


def plan_of(count: int) -> Callable[[], Any]:
    """Judging a turn of `count` images of different sizes without touching a pixel."""
    from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
    from nemo_rl_ext.align.grids import DynamicTiler
    from nemo_rl_ext.align.items import MediaItem
    from nemo_rl_ext.align.plan import plan_turn

    tiler = DynamicTiler(16, 2, MIN_PATCHES, MAX_PATCHES)
    family = NemotronFamily(
        grammar=GRAMMAR, tiler=tiler, mean=tuple(MEAN), std=tuple(STD), layout=Layout.NATIVE
    )
    sizes = [(400 + 7 * (index % 64), 900) for index in range(count)]
    items = [MediaItem(size=size, source="a.png") for size in sizes]
    ids: list[int] = []
    for size in sizes:
        ids += [
            GRAMMAR.start_id,
            *[GRAMMAR.context_id] * tiler.static_grid(size).num_tokens(),
            GRAMMAR.end_id,
        ]
    runs = find_runs(np.array(ids, dtype=np.int32), GRAMMAR)
    return lambda: plan_turn(runs, items, family)


def run(effort: Effort) -> Section:
    """Four curves."""
    # As in an aligner, which loads the kernels when it starts.
    compiled.load()
    import torch

    torch.set_num_threads(1)
    side = 360

    def ids_of(value: float) -> Callable[[], Any]:
        ids = prompt_ids(int(value)).astype(np.int32)
        return lambda: find_runs(ids, GRAMMAR)

    lengths = [2.0**power for power in (range(14, 18) if effort.quick else range(15, 23))]
    counts = [1.0, 2.0, 4.0] if effort.quick else [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    scales = [1.0, 2.0] if effort.quick else [1.0, 2.0, 4.0, 8.0, 16.0]
    series = {
        "find_runs: seconds against ids": points(lengths, ids_of, effort),
        "plan: seconds against media of a turn": points(counts, lambda value: plan_of(int(value)), effort),
        "repair: seconds against images of a turn": points(
            counts[:5], lambda value: repair_of((480, 640), int(value)), effort
        ),
        "repair: seconds against megapixels": [
            (scale * side * 480 / 1e6, took)
            for scale, took in points(scales, lambda value: repair_of((side, int(480 * value)), 1), effort)
        ],
    }
    rows, checks = [], []
    for name, curve in series.items():
        exponent = slope(curve)
        first, last = curve[0], curve[-1]
        rows.append(
            (
                name,
                f"{first[0]:,.3g}: {seconds(first[1])}",
                f"{last[0]:,.3g}: {seconds(last[1])}",
                f"{exponent:.2f}",
            )
        )
        checks.append(
            Check(target=f"linear growth, {name}", measured=f"exponent {exponent:.2f}", met=exponent <= LIMIT)
        )
    table = Table(
        columns=("curve", "least", "most", "exponent"),
        rows=rows,
        caption="Exponent of growth between the first and the last third of a curve: 1 is linear, below 1 fixed costs "
        "still show.",
    )
    return Section(
        name="scaling",
        title="Growth",
        about="Time over the size of the work, on logarithmic axes: a straight line of slope 1 is linear growth.",
        tables=[table],
        checks=checks,
        series=series,
    )
