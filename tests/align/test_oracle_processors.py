# SPDX-License-Identifier: Apache-2.0
"""Every proof against vLLM's own media processors: `python -m benchmarks oracle_processors` in small."""

import dataclasses

import pytest

pytest.importorskip("vllm")

from benchmarks.oracle import MODES
from benchmarks.oracle_processors import CASES, run

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("family", sorted(CASES))
def test_no_proof_is_wrong(family, tmp_path):
    totals, other = run(family, 24, seed=5, model_dir=CASES[family].build(tmp_path / family))
    for mode in MODES:
        counts = totals[mode]
        assert not [name for name in counts if name.startswith("wrong")], (mode, counts)
        assert counts["matched"] + counts["repaired"] > 20
    assert totals["receipts"]["masked as they were"] <= totals["runs"]["masked as they were"]
    assert other["media compared pixel by pixel"] and not other["wrong pixels"]
    refused = {name: count for name, count in other.items() if name.startswith("refused")}
    assert sum(refused.values()) < 8, refused


def test_a_wrong_proof_is_counted(tmp_path, monkeypatch):
    """The same run with an engine that is said to have had other grids."""
    from benchmarks import oracle_processors

    case = CASES["qwen3_vl"]

    def other(item, tensors, family):
        geometry = case.geometry(item, tensors, family)
        return geometry._replace(grid=type(geometry.grid)(geometry.grid.width, geometry.grid.height + 2))

    monkeypatch.setitem(oracle_processors.CASES, "qwen3_vl", dataclasses.replace(case, geometry=other))
    totals, _ = run("qwen3_vl", 6, seed=5, model_dir=case.build(tmp_path / "qwen3_vl"))
    assert totals["receipts"]["wrong geometry"] > 0
