# SPDX-License-Identifier: Apache-2.0
"""Every proof against the engine's own arithmetic, over random requests: `python -m benchmarks oracle` in small."""

import pytest

pytest.importorskip("vllm")

from benchmarks.oracle import MODES, run
from benchmarks.oracle_engines import ENGINES

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("family", sorted(ENGINES))
def test_no_proof_is_wrong(family):
    totals = run(family, 400, seed=7)
    for mode in MODES:
        counts = totals[mode]
        assert not [name for name in counts if name.startswith("wrong")], (mode, counts)
        assert counts["matched"] > 100
    # A receipt proves what runs cannot: less is masked, and nothing unseen is left but what a client named itself.
    masked = {mode: totals[mode]["masked turns"] for mode in MODES}
    assert masked["receipts"] < masked["runs"]
