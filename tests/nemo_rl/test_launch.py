# SPDX-License-Identifier: Apache-2.0
"""The launcher in a process of its own: what it does with the flag off, and which recipes it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from driving import IMAGE_RECIPE, VIDEO_RECIPE

SCRIPT = """
import json, sys
print("RESULT", json.dumps({
    "arguments": sys.argv[1:],
    "name": __name__,
    "loaded": sorted(name for name in sys.modules if name.startswith("nemo_rl_ext")),
}))
"""


def launch(tmp_path, recipe, *overrides, script=SCRIPT):
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "nemo_rl_ext.launch",
            str(tmp_path / "script.py"),
            "--config",
            str(tmp_path / "recipe.yaml"),
            *overrides,
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )


def result(process):
    assert process.returncode == 0, process.stderr
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize("block", [{}, {"media_alignment": {"enabled": False, "num_aligners": 3}}])
def test_with_the_flag_off_the_script_runs_and_nothing_is_imported(tmp_path, block):
    out = result(
        launch(tmp_path, {"grpo": {"num_prompts_per_step": 1, **block}}, "grpo.num_prompts_per_step=2")
    )
    assert out["name"] == "__main__"
    assert out["arguments"][0] == "--config" and out["arguments"][2:] == ["grpo.num_prompts_per_step=2"]
    # The launcher itself is `__main__` before the script is.
    assert set(out["loaded"]) == {
        "nemo_rl_ext",
        "nemo_rl_ext.integration",
        "nemo_rl_ext.integration.probe",
        "nemo_rl_ext.integration.settings",
        "nemo_rl_ext.integration.upstream_contract",
    }


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["++policy.generation.vllm_cfg.video_loader=nemotron_vl"], "vllm_cfg.video: {sampling_style"),
        (["++policy.generation.vllm_kwargs.video_pruning_rate=0.5"], "EVS"),
        (["policy.is_vlm=false"], "policy.is_vlm: true"),
        (["++grpo.media_alignment.enable=true"], "grpo.media_alignment.enable"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_in_one_line(tmp_path, nemo_rl_root, overrides, named):
    recipe = {
        "defaults": str(nemo_rl_root / VIDEO_RECIPE),
        "grpo": {"media_alignment": {"enabled": True}},
    }
    process = launch(tmp_path, recipe, *overrides)
    assert process.returncode == 1
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert named in line
    assert "Traceback" not in process.stderr and "RESULT" not in process.stdout


def test_a_missing_nemo_rl_is_said_in_one_line(tmp_path):
    (tmp_path / "script.py").write_text("")
    code = (
        "import sys; sys.path = [p for p in sys.path if not __import__('os').path.isdir(p + '/nemo_rl')]; "
        f"sys.argv = ['launch', {str(tmp_path / 'script.py')!r}]; from nemo_rl_ext.launch import main; main()"
    )
    package = str(Path(__file__).parents[2])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {package!r}); {code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert "error: NeMo-RL is not on the import path; put the directory" in process.stderr


@pytest.mark.slow
def test_with_the_flag_on_the_script_finds_everything_in_place(tmp_path, nemo_rl_root):
    recipe = {
        "defaults": str(nemo_rl_root / IMAGE_RECIPE),
        "grpo": {"media_alignment": {"enabled": True}},
    }
    script = """
import os
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.processors import PROCESSOR_REGISTRY
from nemo_rl.environments.nemo_gym import NemoGym, setup_nemo_gym_config
print("RESULT", __import__("json").dumps({
    "actor": NemoGym.__ray_metadata__.modified_class.__name__,
    "wrapped": [hasattr(f, "_nemo_rl_ext_original") for f in (get_tokenizer, setup_nemo_gym_config)],
    "processor": type(PROCESSOR_REGISTRY["nemo_gym_data_processor"]).__name__,
    "path": os.environ["PYTHONPATH"],
}))
"""
    out = result(launch(tmp_path, recipe, script=script))
    assert out["actor"] == "AlignedNemoGym" and out["wrapped"] == [True, True]
    assert out["processor"] == "RowProcessor"
    assert str(Path(__file__).parents[2]) in out["path"].split(":")
