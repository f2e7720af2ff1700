# SPDX-License-Identifier: Apache-2.0
"""Every recipe in configs/nemo_rl, through NeMo-RL's own loader and schema."""

from collections import Counter
from pathlib import Path

import pytest
from driving import load_recipe
from omegaconf import OmegaConf

from nemo_rl_ext.integration.recipe_checks import check_recipe, comes_through_gym
from nemo_rl_ext.integration.settings import BLOCK, RecipeError, ban_media_tokens, pick, settings_of

CONFIGS = Path(__file__).parents[2] / "configs" / "nemo_rl"
RECIPES = sorted(path.name for path in CONFIGS.glob("*.yaml"))


@pytest.fixture(params=RECIPES)
def recipe(request, nemo_rl_root, monkeypatch):
    monkeypatch.setenv("NEMO_RL", str(nemo_rl_root))
    return load_recipe(CONFIGS, request.param, [])


def test_there_are_an_image_a_video_and_a_mixed_recipe():
    assert RECIPES == ["async_gym_image.yaml", "async_gym_video.yaml", "mixed_sav_tracks.yaml"]


def test_recipe_inherits_and_adds_only_ours(recipe):
    assert settings_of(recipe).enabled
    assert recipe.grpo.async_grpo.enabled
    assert pick(recipe, "env.nemo_gym.config_paths")
    assert pick(recipe, "policy.megatron_cfg.enabled")  # inherited, written nowhere here
    check_recipe(recipe)


SHIPPED = "examples/configs/recipes/vlm"


def outcome(recipe):
    """What the flag means for a recipe: aligned, aligned after one named key, compared, or the refusal."""
    try:
        check_recipe(recipe)
    except RecipeError as error:
        refusal = str(error)
    else:
        return "aligned" if comes_through_gym(recipe) else "compared"
    if "Set it to raw_logprobs" in refusal:
        recipe.policy.generation.vllm_cfg.logprobs_mode = "raw_logprobs"
        check_recipe(recipe)
        return "one key"
    return refusal


def test_every_shipped_recipe_is_aligned_or_compared(nemo_rl_root):
    from nemo_rl.utils.config import load_config, register_omegaconf_resolvers

    register_omegaconf_resolvers()
    found = {}
    for path in sorted((nemo_rl_root / SHIPPED).glob("*.yaml")):
        recipe = load_config(str(path))
        OmegaConf.set_struct(recipe, False)
        recipe.grpo.media_alignment = {"enabled": True}
        found[path.name] = outcome(recipe)
    assert Counter(found.values()) == {"aligned": 7, "one key": 1, "compared": 15}, found


def test_media_tokens_are_banned_where_requests_are_made(recipe):
    places = ban_media_tokens(recipe)
    for place in places:
        words = pick(recipe, place)
        assert set(words) >= {"<img>", "<image>", "</img>"}
        assert len(words) == len(set(words))
    assert "env.nemo_gym.policy_model.responses_api_models.vllm_model.extra_body.bad_words" in places


def test_an_override_reaches_the_block(nemo_rl_root, monkeypatch):
    monkeypatch.setenv("NEMO_RL", str(nemo_rl_root))
    recipe = load_recipe(CONFIGS, RECIPES[0], [f"++{BLOCK}.num_aligners=7", f"{BLOCK}.enabled=false"])
    assert settings_of(recipe).num_aligners == 7
    assert not settings_of(recipe).enabled
