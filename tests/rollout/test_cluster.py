# SPDX-License-Identifier: Apache-2.0
"""What a pool does on a cluster of several Ray nodes, each scenario in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", ["nodes_lost"])
def test_no_row_is_lost(scenario, tiny_checkpoint, tmp_path):
    script = Path(__file__).with_name("on_a_cluster.py")
    done = subprocess.run(
        [sys.executable, str(script), scenario, str(tiny_checkpoint), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
