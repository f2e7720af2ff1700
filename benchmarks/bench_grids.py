# SPDX-License-Identifier: Apache-2.0
"""Recovering a grid from a run length: the cached table against an exhaustive scan of budgets."""

from __future__ import annotations

import numpy as np

from benchmarks.measure import Effort, Section, alternate, timing_table
from nemo_rl_ext.align import grids
from nemo_rl_ext.align.grids import DynamicTiler, Grid, Size

TILER = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=1024, max_num_patches=13312)


def scan(size: Size, tokens: int) -> list[Grid]:
    """Every grid with so many tokens, by trying every budget that the processor allows."""
    found = {TILER.grid(size, budget) for budget in range(TILER.min_num_patches, TILER.max_num_patches + 1)}
    return sorted(grid for grid in found if grid.num_tokens(TILER.merge_size) == tokens)


def run(effort: Effort) -> Section:
    """Photographs of three sizes, and the same question asked again."""
    cases = {}
    rng = np.random.default_rng(0)
    for size in [(480, 640), (1080, 2400), (3000, 4000)][: 1 if effort.quick else 3]:
        budget = int(rng.integers(TILER.min_num_patches, TILER.max_budget(size) + 1))
        tokens = TILER.grid(size, budget).num_tokens(TILER.merge_size)
        assert list(TILER.feasible_grids(size, tokens)) == scan(size, tokens)

        def cold(size: Size = size, tokens: int = tokens) -> object:
            grids._reachable.cache_clear()
            return TILER.feasible_grids(size, tokens)

        cases[f"{size[1]} x {size[0]} px"] = alternate(
            {
                "exhaustive scan of budgets": lambda size=size, tokens=tokens: scan(size, tokens),
                "feasible_grids, first time": cold,
                "feasible_grids, size seen before": lambda size=size, tokens=tokens: TILER.feasible_grids(
                    size, tokens
                ),
            },
            rounds=effort.rounds,
        )
    return Section(
        name="grids",
        title="Recovering grids",
        about="All patch grids that an image can have got with a given number of tokens, over every budget from "
        f"{TILER.min_num_patches} to {TILER.max_num_patches} patches.",
        tables=[timing_table(cases, "image")],
    )
