# SPDX-License-Identifier: Apache-2.0
"""The launcher in a process of its own: what it does with the flag off, and which recipes it refuses."""

import json
import os
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


PACKAGE = Path(__file__).parents[2] / "nemo_rl_ext"
LIGHT = {
    "nemo_rl_ext",
    "nemo_rl_ext.config",
    "nemo_rl_ext.config.block",
    "nemo_rl_ext.config.media_alignment",
    "nemo_rl_ext.integration",
    *(
        f"nemo_rl_ext.integration.{name}"
        for name in (
            "launch",
            "plain_start",
            "probe",
            "script_recipe",
            "settings",
            "upstream_alignment",
            "upstream_contract",
        )
    ),
}
"""What the flag's absence may load: nothing that knows torch, Ray or NeMo-RL."""


def launch(tmp_path, recipe, *overrides, script=SCRIPT, by=("-m", "nemo_rl_ext.launch"), env=None):
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = [str(tmp_path / "script.py"), "--config", str(tmp_path / "recipe.yaml"), *overrides]
    return subprocess.run(
        [sys.executable, "-W", "ignore", *by, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=env,
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
    assert set(out["loaded"]) <= LIGHT


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


def paths_without(*names):
    """PYTHONPATH without this package, so that only what a test adds can find it."""
    entries = os.environ["PYTHONPATH"].split(os.pathsep)
    return [entry for entry in entries if Path(entry) != PACKAGE.parent] + list(names)


def test_the_launcher_is_a_path_too_and_hides_no_module(tmp_path):
    script = "import importlib.util\n" + SCRIPT.replace(
        '"name": __name__,', '"name": __name__, "hides": importlib.util.find_spec("guards") is not None,'
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths_without())}
    out = result(launch(tmp_path, {"grpo": {}}, script=script, by=(str(PACKAGE / "launch.py"),), env=env))
    assert out["name"] == "__main__" and not out["hides"]


@pytest.mark.parametrize(
    "override", ["grpo.media_alignment.enabled=false", "++grpo.media_alignment.enabled=false"]
)
def test_overrides_of_the_block_need_no_plus(tmp_path, nemo_rl_root, override):
    script = """
import sys
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
register_omegaconf_resolvers()
recipe = parse_hydra_overrides(load_config(sys.argv[2]), sys.argv[3:])
print("RESULT", __import__("json").dumps({"enabled": recipe.grpo.media_alignment.enabled}))
"""
    recipe = {"defaults": str(nemo_rl_root / IMAGE_RECIPE)}
    assert result(launch(tmp_path, recipe, override, script=script)) == {"enabled": False}


# What NeMo-RL's own scripts do, in their order, up to the data set.
PLAIN = """
import sys
from pathlib import Path
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.environments.nemo_gym import setup_nemo_gym_config
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
register_omegaconf_resolvers()
recipe = load_config(sys.argv[2])
recipe = parse_hydra_overrides(recipe, sys.argv[3:])
Path(sys.argv[2]).with_name("logs").mkdir()
import nemo_rl.environments.nemo_gym as nemo_gym
from nemo_rl.data.processors import PROCESSOR_REGISTRY
print("RESULT", __import__("json").dumps({
    "actor": nemo_gym.NemoGym.__ray_metadata__.modified_class.__name__,
    "wrapped": [hasattr(f, "_nemo_rl_ext_original") for f in (get_tokenizer, setup_nemo_gym_config)],
    "processor": type(PROCESSOR_REGISTRY["nemo_gym_data_processor"]).__name__,
}))
"""


@pytest.fixture
def plain_env():
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PACKAGE / "integration" / "autostart"), *paths_without()])
    }


def test_a_plain_start_takes_up_the_flag(tmp_path, nemo_rl_root, plain_env):
    recipe = {"defaults": str(nemo_rl_root / IMAGE_RECIPE)}
    on = "grpo.media_alignment.enabled=true"
    out = result(launch(tmp_path, recipe, on, script=PLAIN, by=(), env=plain_env))
    assert out == {"actor": "AlignedNemoGym", "wrapped": [True, True], "processor": "RowProcessor"}


def test_a_plain_start_with_the_flag_off_is_left_alone(tmp_path, nemo_rl_root, plain_env):
    recipe = {"defaults": str(nemo_rl_root / IMAGE_RECIPE)}
    out = result(launch(tmp_path, recipe, script=PLAIN, by=(), env=plain_env))
    assert out["actor"] == "NemoGym" and out["wrapped"] == [False, False]


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "launcher"])
def test_a_refusal_comes_before_a_log_directory(tmp_path, nemo_rl_root, plain_env, plain):
    recipe = {"defaults": str(nemo_rl_root / IMAGE_RECIPE)}
    on = ("grpo.media_alignment.enabled=true", "policy.generation.vllm_cfg.logprobs_mode=processed_logprobs")
    how = {"by": (), "env": plain_env} if plain else {}
    process = launch(tmp_path, recipe, *on, script=PLAIN, **how)
    assert process.returncode == 1 and "error: policy.generation.vllm_cfg.logprobs_mode" in process.stderr
    assert "Traceback" not in process.stderr and not (tmp_path / "logs").exists()


def test_an_environments_own_sitecustomize_still_runs(tmp_path, plain_env):
    (tmp_path / "sitecustomize.py").write_text("print('THE ENVIRONMENTS OWN')")
    env = plain_env | {"PYTHONPATH": os.pathsep.join([plain_env["PYTHONPATH"], str(tmp_path)])}
    process = subprocess.run([sys.executable, "-c", ""], env=env, capture_output=True, text=True)
    assert process.stdout.strip() == "THE ENVIRONMENTS OWN" and not process.stderr


def test_our_data_set_says_when_nothing_was_bound(tmp_path, nemo_rl_root):
    (tmp_path / "rows.jsonl").write_text("")
    script = f"""
from nemo_rl_ext.integration.data import MixedNemoGymDataset
MixedNemoGymDataset({str(tmp_path / "rows.jsonl")!r})
"""
    recipe = {"defaults": str(nemo_rl_root / IMAGE_RECIPE), "grpo": {"media_alignment": {"enabled": True}}}
    process = launch(tmp_path, recipe, script=script, by=())
    assert process.returncode == 1
    assert "was started without nemo_rl_ext: nothing would be aligned" in process.stderr
