# SPDX-License-Identifier: Apache-2.0
"""The launcher: what it reads of a recipe, what it shares with workers, and what it refuses."""

import logging
import os
import sys
from types import SimpleNamespace

import pytest
import yaml

from nemo_rl_ext.integration import launch, plain_start, script_recipe
from nemo_rl_ext.integration.in_process import driver_is_bound, is_wrapped
from nemo_rl_ext.integration.probe import UnknownNemoRLError
from nemo_rl_ext.integration.settings import RecipeError


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text(' '.join(sys.argv[1:]))\n")
    return path


@pytest.fixture(autouse=True)
def own_process_state(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


def recipe(tmp_path, **block):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "grpo": {"media_alignment": block},
                "policy": {
                    "is_vlm": True,
                    "megatron_cfg": {"enabled": True},
                    "generation": {"backend": "vllm", "vllm_cfg": {"logprobs_mode": "raw_logprobs"}},
                },
                "env": {"should_use_nemo_gym": True},
            }
        )
    )
    return str(path)


def test_a_script_runs_unchanged_with_the_flag_off(tmp_path, script, nemo_rl_shapes):
    out = tmp_path / "out"
    arguments = ["--config", recipe(tmp_path, enabled=False), str(out)]
    launch.run(str(script), arguments)
    assert out.read_text() == " ".join(arguments)


def test_with_the_flag_on_the_hooks_are_there_first(tmp_path, script, nemo_rl_shapes, caplog):
    from nemo_rl_ext.integration.in_process import is_wrapped

    with caplog.at_level(logging.INFO):
        launch.run(str(script), ["--config", recipe(tmp_path, enabled=True), str(tmp_path / "out")])
    assert is_wrapped(sys.modules["nemo_rl.environments.nemo_gym"].setup_nemo_gym_config)
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0]


def test_without_a_recipe_the_overrides_count(nemo_rl_shapes):
    read = launch.read_recipe(["++grpo.media_alignment.num_aligners=4", "policy.model=x"])
    assert read.grpo.media_alignment.num_aligners == 4 and "policy" not in read
    assert launch.read_recipe([]) == {}


def test_an_override_reaches_the_recipe(tmp_path, nemo_rl_shapes):
    arguments = ["--config", recipe(tmp_path, enabled=True), "++grpo.media_alignment.enabled=false"]
    assert launch.read_recipe(arguments).grpo.media_alignment.enabled is False


def test_refusals_come_in_one_line_from_the_command(tmp_path, script, monkeypatch, nemo_rl_shapes, capsys):
    with pytest.raises(RecipeError, match="is not a file; name a script"):
        launch.run(str(tmp_path / "missing.py"), [])
    monkeypatch.setattr(sys, "argv", ["launch", str(tmp_path / "missing.py")])
    with pytest.raises(SystemExit, match="error: .* is not a file"):
        launch.main()
    for argv, code in ((["launch"], 2), (["launch", "--help"], 0)):
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit:
            launch.main()
        assert exit.value.code == code
    assert "--config RECIPE" in capsys.readouterr().out


def test_without_nemo_rl_it_says_so(script):
    with pytest.raises(UnknownNemoRLError, match="not on the import path"):
        launch.run(str(script), [])


def test_from_site_packages_only_the_package_is_shared(tmp_path, monkeypatch):
    site = tmp_path / "site-packages" / "nemo_rl_ext" / "integration"
    site.mkdir(parents=True)
    monkeypatch.setattr(launch, "__file__", str(site / "launch.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", "/other")
    for _ in range(2):
        launch.share_with_workers()
    shared, other = os.environ["PYTHONPATH"].split(os.pathsep)
    assert other == "/other" and os.listdir(shared) == ["nemo_rl_ext"]
    assert os.path.realpath(os.path.join(shared, "nemo_rl_ext")) == str(site.parent)


@pytest.fixture
def watched(nemo_rl_shapes, monkeypatch):
    """NeMo-RL's configuration module with its functions watched, and a script that holds two of its names."""
    config = sys.modules["nemo_rl.utils.config"]
    plain_start.watch_recipe(config)
    held = {
        "get_tokenizer": sys.modules["nemo_rl.algorithms.utils"].get_tokenizer,
        "setup_nemo_gym_config": sys.modules["nemo_rl.environments.nemo_gym"].setup_nemo_gym_config,
    }
    script = SimpleNamespace(**held, other=1)
    monkeypatch.setitem(sys.modules, "__main__", script)
    return config, script, held


def test_a_plain_start_binds_what_the_script_already_holds(tmp_path, watched, monkeypatch):
    config, script, held = watched
    path = recipe(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", path, "grpo.media_alignment.enabled=true"])
    config.load_config(path)
    assert driver_is_bound() and script.other == 1
    assert script.get_tokenizer is not held["get_tokenizer"]
    assert is_wrapped(script.setup_nemo_gym_config)
    script_recipe.require_hooks()


def test_a_plain_start_without_the_flag_or_a_recipe_binds_nothing(tmp_path, watched, monkeypatch):
    config, script, held = watched
    path = recipe(tmp_path, enabled=False)
    for argv in (["train.py"], ["train.py", "--config", path]):
        monkeypatch.setattr(sys, "argv", argv)
        config.load_config(path)
        assert vars(script) == {**held, "other": 1} and not driver_is_bound()
    assert config.parse_hydra_overrides({}, ["grpo.media_alignment.num_aligners=3"]).grpo.media_alignment


def test_a_plain_start_is_refused_in_one_line(tmp_path, watched, monkeypatch):
    config, _, _ = watched
    path = recipe(tmp_path, enabled=True, num_aligner=1)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", path])
    with pytest.raises(SystemExit, match="error: grpo.media_alignment.num_aligner"):
        config.load_config(path)


def test_a_data_set_of_ours_stops_a_run_that_bound_nothing(tmp_path, nemo_rl_shapes, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", recipe(tmp_path, enabled=True)])
    with pytest.raises(RecipeError, match="was started without nemo_rl_ext"):
        script_recipe.require_hooks()
