# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/distill.md run as they are written there, and its table has every key."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from nemo_rl_ext.config.faults import known_keys
from nemo_rl_ext.config.reference import reference_table
from nemo_rl_ext.distill.config import DistillConfig

ROOT = Path(__file__).parents[2]


def test_every_key_is_described():
    table = reference_table(DistillConfig)
    assert table in (ROOT / "docs" / "distill.md").read_text(), (
        "paste the output of: python -m nemo_rl_ext.config.reference nemo_rl_ext.distill.config:DistillConfig"
    )
    blocks = {"data", "loss", "train", "eval"}
    keys = set(known_keys(DistillConfig)) - blocks
    described = dict(re.findall(r"^\| `(\S+)` \| .* \| (.*) \|$", table, re.M))
    assert described.keys() == keys and all(described.values())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_documented_commands_run(tmp_path):
    block = re.search(r"```bash\n(.*?)```", (ROOT / "docs" / "distill.md").read_text(), re.S)[1]
    for line in block.strip().splitlines():
        program, *arguments = shlex.split(line)
        if program == "nemo-rl-ext":
            arguments = ["-c", "from nemo_rl_ext.cli import main; main()", *arguments]
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": ""}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=190,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "tiny_distill" / "run" / "checkpoints" / "step_000020" / "model").is_dir()
