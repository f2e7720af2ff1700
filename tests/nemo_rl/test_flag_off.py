# SPDX-License-Identifier: Apache-2.0
"""The same NeMo-RL run without this package, and through its launcher with the flag off: equal byte by byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gym_edge
import pytest
import yaml
from driving import IMAGE_RECIPE, urls, write_rows

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(directory, name, command, path, recipe):
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OUT": str(directory / name),
        "EDGE": str(HERE),
        # The order of some keys follows from that of a set.
        "PYTHONHASHSEED": "0",
    }
    process = subprocess.run(
        [sys.executable, "-W", "ignore", *command, "--config", str(recipe), "grpo.num_prompts_per_step=2"],
        env=env,
        cwd=directory,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    bytes_of = [(directory / f"{name}.dedup-{dedup}").read_bytes() for dedup in (False, True)]
    return bytes_of, json.loads((directory / f"{name}.json").read_text())


@pytest.mark.slow
def test_with_the_flag_off_a_run_is_the_one_without_the_package(tmp_path, ray_head, nemo_rl_root, checkpoint):
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [
            gym_edge.image_row(urls([(160, 320)] * 3), [[50, 50, 50], [18, 18, 18]], id="over-budget"),
            gym_edge.image_row(urls([(480, 640)], 9), [[300], [120]], id="single"),
        ],
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "defaults": str(nemo_rl_root / IMAGE_RECIPE),
                "grpo": {
                    "num_generations_per_prompt": 2,
                    "media_alignment": {"enabled": False, "geometry_source": "captured"},
                },
                "policy": {
                    "model_name": str(checkpoint),
                    "tokenizer": {"name": str(checkpoint), "chat_template": "default"},
                },
                "data": {"train": {"data_path": str(rows)}, "validation": {"data_path": str(rows)}},
            }
        )
    )
    script = str(HERE / "plain_rollout.py")
    others = [str(HERE), str(nemo_rl_root)]
    plain, without = run(tmp_path, "without", [script], others, recipe)
    off, launched = run(tmp_path, "off", ["-m", "nemo_rl_ext.launch", script], [str(ROOT), *others], recipe)

    assert not without["found"] and without["driver"] == without["actor"] == []
    assert launched["found"] and launched["actor"] == []
    assert "nemo_rl_ext.integration.settings" in launched["driver"]
    assert not [name for name in launched["driver"] if name.endswith((".install", ".in_process", ".actor"))]
    assert off == plain
    # They hold pixels and runs that do not fit: nothing was repaired, nothing is empty.
    assert all(b"tensor torch.float32 (3, 3, 160, 320)" in text for text in plain)
