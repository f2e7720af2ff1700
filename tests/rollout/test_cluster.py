# SPDX-License-Identifier: Apache-2.0
"""What pools and brokers do on a cluster of several Ray nodes, all scenarios in one process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tiny_checkpoint, tmp_path_factory):
    script = Path(__file__).with_name("on_a_cluster.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_checkpoint), str(tmp_path_factory.mktemp("cluster"))],
        capture_output=True,
        text=True,
        timeout=500,
    )
    return done.stdout + done.stderr[-6000:]


@pytest.mark.parametrize(
    "scenario",
    ["nodes_lost", "actor_and_brokers_killed", "store_too_small", "trainer_slower_than_generation"],
)
def test_no_row_is_lost_and_nothing_grows(scenario, told):
    assert f"{scenario} held" in told, told
