# SPDX-License-Identifier: Apache-2.0
"""Lockstep and kept rows on real gloo ranks with FSDP: the hang without the guard, equal gradients with it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RANKS = Path(__file__).with_name("ranks.py")
COLLECTIVE_TIMEOUT = 6
pytestmark = pytest.mark.slow


def row(seed, *, image=False, loss_tokens=40):
    return {"seed": seed, "loss_tokens": loss_tokens, "image": image}


INTERLEAVED = [[row(1, image=True), row(2)], [row(3), row(4, image=True)]]
NO_IMAGE_ON_RANK_1 = [[row(1, image=True), row(2)], [row(3), row(4)]]
SHORT_ROW = [[row(1), row(2, loss_tokens=31)], [row(3), row(4)]]

JOBS = {
    "interleaved, as dealt": {
        "dealt": INTERLEAVED,
        "mode": "as_dealt",
        "collective_timeout_s": COLLECTIVE_TIMEOUT,
    },
    "interleaved, ordered": {"dealt": INTERLEAVED, "mode": "order"},
    "interleaved, dummies": {"dealt": INTERLEAVED, "mode": "dummies"},
    "no image on rank 1, as dealt": {
        "dealt": NO_IMAGE_ON_RANK_1,
        "mode": "as_dealt",
        "collective_timeout_s": COLLECTIVE_TIMEOUT,
    },
    "no image on rank 1, dummies": {"dealt": NO_IMAGE_ON_RANK_1, "mode": "dummies"},
    "short row, dropped": {
        "dealt": SHORT_ROW,
        "mode": "drop",
        "min_tokens": 32,
        "collective_timeout_s": COLLECTIVE_TIMEOUT,
    },
    "short row, zeroed": {"dealt": SHORT_ROW, "mode": "neutralise", "min_tokens": 32},
    "sharded masks": {"dealt": [[], []], "mode": "sharded_masks", "min_tokens": 32},
}


@pytest.fixture(scope="module")
def ran():
    """Every job once: name -> (result, what its ranks logged)."""
    common = {"ranks": 2, "min_tokens": 0, "collective_timeout_s": 60, "limit_s": 90}
    done = subprocess.run(
        [sys.executable, str(RANKS), json.dumps({name: common | job for name, job in JOBS.items()})],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    logs = dict(re.findall(r"^== ([^\n]*)\n(.*?)(?=^== |\Z)", done.stderr, re.DOTALL | re.MULTILINE))
    return {name: (result, logs[name]) for name, result in json.loads(done.stdout).items()}


def assert_hangs(result, log):
    """No rank finishes, and none fails before the collective timeout made it."""
    assert "loss" not in result and all(code != 0 for code in result["exits"])
    assert "imed out" in log and result["seconds"] >= COLLECTIVE_TIMEOUT


def assert_equals_one_process(result):
    assert result["exits"] == [0, 0]
    reference = result["reference"]
    assert result["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert result["grads"].keys() == reference["grads"].keys()
    for name, grad in reference["grads"].items():
        own = result["grads"][name]
        if grad is None:  # a tower that no row uses
            assert own is None or not torch.tensor(own).any()
        else:
            torch.testing.assert_close(torch.tensor(own), torch.tensor(grad), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dealt", ["interleaved", "no image on rank 1"])
def test_ranks_out_of_step_hang_until_the_collective_timeout(ran, dealt):
    assert_hangs(*ran[f"{dealt}, as dealt"])


def test_ordering_rows_completes_with_the_gradients_of_one_process(ran):
    assert_equals_one_process(ran["interleaved, ordered"][0])


@pytest.mark.parametrize("dealt", ["interleaved", "no image on rank 1"])
def test_dummy_media_complete_with_the_gradients_of_one_process(ran, dealt):
    assert_equals_one_process(ran[f"{dealt}, dummies"][0])


def test_dropping_a_row_of_31_tokens_under_a_threshold_of_32_hangs(ran):
    assert_hangs(*ran["short row, dropped"])


def test_zeroing_it_keeps_micro_batches_equal_and_the_loss_of_one_process(ran):
    result, log = ran["short row, zeroed"]
    assert_equals_one_process(result)
    assert result["micro_batches"] == [2, 2]
    assert "1 of 2 rows have fewer than 32 loss tokens" in log


def test_sequence_shards_decide_together_by_the_whole_row(ran):
    """Two context-parallel ranks hold 16 and 15 of a row's 31 loss tokens, and 16 and 16 of another's 32."""
    result, _ = ran["sharded masks"]
    assert result["exits"] == [0, 0]
    assert result["sharded"] == [{"kept": [0, 16], "zeroed": [0]}] * 2
