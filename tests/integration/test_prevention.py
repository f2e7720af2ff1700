# SPDX-License-Identifier: Apache-2.0
"""Limits of a recipe that prevents re-sizing: refused with numbers that do, or with what is not known."""

import copy
import logging
import re

import pytest

from nemo_rl_ext.integration.prevention import check_prevention
from nemo_rl_ext.integration.recipe_checks import check_recipe
from nemo_rl_ext.integration.settings import RecipeError
from nemo_rl_ext.models.pin import pin_checkpoint


@pytest.fixture
def recipe(tiny_checkpoint):
    def make(model=tiny_checkpoint, max_model_len=2048, num_images=4, **kwargs):
        return {
            "grpo": {"media_alignment": {"enabled": True, "prevent": True}},
            "policy": {
                "model_name": str(model),
                "tokenizer": {"name": str(model)},
                "is_vlm": True,
                "megatron_cfg": {"enabled": True},
                "generation": {
                    "backend": "vllm",
                    "vllm_cfg": {"logprobs_mode": "raw_logprobs", "max_model_len": max_model_len},
                    "vllm_kwargs": {"limit_mm_per_prompt": {"image": num_images}, **kwargs},
                },
            },
            "env": {"should_use_nemo_gym": True},
        }

    return make


def test_limits_that_hold_pass_and_what_they_leave_for_text_is_said(recipe, caplog):
    with caplog.at_level(logging.INFO, logger="nemo_rl_ext"):
        check_recipe(recipe())
    # 2048 - 4 - 4 images of 1024 patches, four to a token
    assert "up to 4 images of any size keep their grids beside at most 1020 tokens of text" in caplog.text


def test_limits_that_do_not_are_refused_with_each_number_that_would_do(recipe, tiny_checkpoint, tmp_path):
    with pytest.raises(RecipeError, match="an agent may send 4 images") as caught:
        check_recipe(recipe(max_model_len=512))
    limit, context, images = (
        int(re.search(rf"do: .*{key} (\d+)", str(caught.value)).group(1))
        for key in ("max_num_patches", "max_model_len", "image")
    )
    assert (limit, context, images) == (508, 1028, 1)
    check_recipe(recipe(pin_checkpoint(tiny_checkpoint, tmp_path / "pinned", limit).out, 512))
    check_recipe(recipe(max_model_len=context))
    check_recipe(recipe(max_model_len=512, num_images=images))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("policy.model_name", "nvidia/a-model", "nvidia/a-model is no directory"),
        ("policy.tokenizer.name", "nvidia/a-processor", "nvidia/a-processor is no directory"),
        ("policy.generation.vllm_cfg.max_model_len", None, "vllm_cfg.max_model_len"),
        ("policy.generation.vllm_kwargs.limit_mm_per_prompt", {}, "limit_mm_per_prompt.image"),
        (
            "policy.generation.vllm_kwargs.hf_overrides",
            {"vision_config": {"args": {"max_num_patches": 64}}},
            "hf_overrides.vision_config reaches the engine alone",
        ),
    ],
)
def test_what_is_not_known_or_not_the_trainers_is_refused_by_name(recipe, path, value, named):
    config = copy.deepcopy(recipe())
    *sections, key = path.split(".")
    section = config
    for name in sections:
        section = section[name]
    section[key] = value
    with pytest.raises(RecipeError, match=re.escape(named)):
        check_prevention(config)


def test_a_processor_from_another_directory_must_have_the_same_limits(recipe, tiny_checkpoint, tmp_path):
    config = recipe()
    config["policy"]["tokenizer"]["name"] = str(pin_checkpoint(tiny_checkpoint, tmp_path / "pin", 64).out)
    with pytest.raises(RecipeError, match="max_num_patches=1024.*max_num_patches=64.*one directory"):
        check_prevention(config)


def test_the_recipe_is_not_looked_at_without_the_flag(recipe):
    config = recipe(model="nvidia/a-model")
    config["grpo"]["media_alignment"]["prevent"] = False
    check_recipe(config)
