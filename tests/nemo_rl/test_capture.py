# SPDX-License-Identifier: Apache-2.0
"""Asking for recorded grids in a recipe, and what happens where the recipe leaves no place for it."""

import pytest
from driving import image_recipe

from nemo_rl_ext.integration.capture import PLUGIN
from nemo_rl_ext.integration.settings import ACTOR_KEY


@pytest.fixture
def recipe(nemo_rl_root, checkpoint):
    config = image_recipe(nemo_rl_root, checkpoint, "rows.jsonl", dedup=True)
    config.grpo.media_alignment["evidence"] = "receipt"
    return config


def set_up(config, checkpoint):
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.environments.nemo_gym import setup_nemo_gym_config

    setup_nemo_gym_config(config, get_tokenizer({"name": str(checkpoint)}))
    vllm = config.policy["generation"]["vllm_cfg"]
    plugins = [vllm.get(key) for key in ("reasoning_parser_plugin", "tool_parser_plugin")]
    return plugins, config.env["nemo_gym"][ACTOR_KEY]["evidence"]


def test_the_free_plugin_key_is_used_once(recipe, checkpoint, installed):
    own = recipe.policy["generation"]["vllm_cfg"][
        "reasoning_parser_plugin"
    ]  # inherited from NeMo-RL's recipe
    assert own.endswith("nano_v3_reasoning_parser.py")
    for _ in range(2):
        assert set_up(recipe, checkpoint) == ([own, str(PLUGIN)], "receipt")


def test_with_both_keys_free_one_stays_free(recipe, checkpoint, installed):
    recipe.policy["generation"]["vllm_cfg"]["reasoning_parser_plugin"] = None
    for _ in range(2):
        assert set_up(recipe, checkpoint) == ([str(PLUGIN), None], "receipt")


def test_without_a_free_key_the_runs_decide_and_it_is_said(recipe, checkpoint, installed, caplog):
    recipe.policy["generation"]["vllm_cfg"]["tool_parser_plugin"] = "own.py"
    with caplog.at_level("WARNING"):
        plugins, source = set_up(recipe, checkpoint)
    assert str(PLUGIN) not in plugins and source == "runs"
    assert "both taken: the placeholder runs alone are evidence" in caplog.text


def test_with_runs_as_the_evidence_no_plugin_is_named(recipe, checkpoint, installed):
    recipe.grpo.media_alignment["evidence"] = "runs"
    plugins, source = set_up(recipe, checkpoint)
    assert str(PLUGIN) not in plugins and source == "runs"
