# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nemo_rl_ext.integration.known_processor import check_checkpoint, check_processor
from nemo_rl_ext.integration.recipe_checks import check_recipe, takes_mixed_sizes
from nemo_rl_ext.integration.settings import (
    MEDIA_TOKENS,
    RecipeError,
    ban_media_tokens,
    settings_of,
)


def recipe(**generation):
    return {
        "grpo": {"media_alignment": {"enabled": True}},
        "policy": {
            "is_vlm": True,
            "megatron_cfg": {"enabled": True},
            "generation": {
                "backend": "vllm",
                "bad_words": [],
                "vllm_cfg": {"logprobs_mode": "raw_logprobs"},
                "vllm_kwargs": {},
                **generation,
            },
        },
        "env": {"should_use_nemo_gym": True, "nemo_gym": {"config_paths": ["a/vllm_model/configs/b.yaml"]}},
    }


def test_a_recipe_without_the_block_is_off():
    assert not settings_of({"grpo": {}}).enabled
    assert not settings_of({}).enabled


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"enabled": True, "num_aligner": 3}, "grpo.media_alignment.num_aligner"),
        ({"on_ambiguous": "drop"}, "grpo.media_alignment.on_ambiguous"),
        ({"max_masked_fraction": 1.5}, "grpo.media_alignment.max_masked_fraction"),
        (True, "must be a mapping"),
    ],
)
def test_a_wrong_key_or_value_is_named(block, named):
    with pytest.raises(RecipeError, match=named):
        settings_of({"grpo": {"media_alignment": block}})


def test_a_good_recipe_passes():
    check_recipe(recipe())


def test_the_legacy_video_loader_is_refused_with_its_replacement():
    with pytest.raises(RecipeError, match=r"video_loader='nemotron_vl'.*vllm_cfg\.video: \{sampling_style"):
        check_recipe(recipe(vllm_cfg={"video_loader": "nemotron_vl"}))


@pytest.mark.parametrize(
    "generation",
    [
        {"vllm_kwargs": {"video_pruning_rate": 0.5}},
        {"vllm_cfg": {"video_pruning_rate": 0.1}},
        {"vllm_kwargs": {"hf_overrides": {"video_pruning_rate": 0.7}}},
    ],
)
def test_pruning_is_refused(generation):
    with pytest.raises(RecipeError, match=r"video_pruning_rate=0\.\d lets the engine prune"):
        check_recipe(recipe(**generation))


@pytest.mark.parametrize(
    "kwargs", [{"mm_processor_device": "cuda"}, {"mm_processor_kwargs": {"device": "cuda:0"}}]
)
def test_a_media_processor_on_the_accelerator_is_refused(kwargs):
    with pytest.raises(RecipeError, match=r"device='cuda.*' resizes media on that device"):
        check_recipe(recipe(vllm_kwargs=kwargs))


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_media_processor_on_the_host_is_taken(device):
    check_recipe(recipe(vllm_kwargs={"mm_processor_device": device, "mm_device_do_normalize": True}))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("data_plane",), {"enabled": True}, "data_plane.enabled=True builds the train batch without media"),
        (("policy", "is_vlm"), False, "is_vlm"),
    ],
)
def test_what_alignment_needs_is_named(path, value, named):
    broken = recipe()
    *sections, key = path
    section = broken
    for name in sections:
        section = section[name]
    section[key] = value
    with pytest.raises(RecipeError, match=named):
        check_recipe(broken)


def test_without_gym_prompts_are_compared_by_nemo_rls_own_workers_alone():
    config = recipe(backend="vllm")
    config["env"]["should_use_nemo_gym"] = False
    config["policy"]["is_vlm"] = False
    check_recipe(config)
    config["policy"]["generation"]["quant_cfg"] = "NVFP4"
    with pytest.raises(RecipeError, match="quant_cfg starts a worker of ModelOpt's"):
        check_recipe(config)
    config["policy"]["generation"] = {"backend": "megatron"}
    with pytest.raises(RecipeError, match="backend is 'megatron'"):
        check_recipe(config)


def test_the_ban_reaches_requests_and_model_server_once():
    config = recipe(bad_words=["<image>", "<so_start>"])
    ban_media_tokens(config)
    ban_media_tokens(config)
    assert config["policy"]["generation"]["bad_words"] == ["<image>", "<so_start>", "<img>", "</img>"]
    server = config["env"]["nemo_gym"]["policy_model"]["responses_api_models"]["vllm_model"]
    assert server["extra_body"]["bad_words"] == list(MEDIA_TOKENS)


def test_the_ban_needs_log_probs_from_before_it():
    with pytest.raises(RecipeError, match="raw_logprobs"):
        ban_media_tokens(recipe(vllm_cfg={"logprobs_mode": "processed_logprobs"}))


def test_settings_and_probe_import_nothing_heavy():
    code = (
        "import sys; import nemo_rl_ext.integration.settings, nemo_rl_ext.integration.probe; "
        "print([m for m in ('torch', 'ray', 'numpy', 'nemo_rl', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_without_megatron_a_row_must_be_alone_in_its_micro_batch():
    config = recipe()
    config["policy"]["megatron_cfg"] = {"enabled": False}
    config["policy"] |= {"train_micro_batch_size": 1, "logprob_batch_size": 4}
    config["policy"]["sequence_packing"] = {"enabled": False}
    assert not takes_mixed_sizes(config)
    with pytest.raises(RecipeError, match=r"Set policy\.logprob_batch_size=1, or train with Megatron"):
        check_recipe(config)
    config["policy"]["logprob_batch_size"] = 1
    check_recipe(config)


def test_the_ban_is_judged_before_anything_starts():
    config = recipe(vllm_cfg={"logprobs_mode": "processed_logprobs"})
    with pytest.raises(RecipeError, match="raw_logprobs"):
        check_recipe(config)
    config["grpo"]["media_alignment"]["ban_media_tokens"] = False
    check_recipe(config)


def test_fixed_tiles_are_refused_in_one_sentence_before_anything_starts(tmp_path):
    config = recipe()
    config["policy"]["tokenizer"] = {"name": str(tmp_path)}
    check_checkpoint(config)  # a name of the hub, or a directory without the file: judged once it is loaded
    file = tmp_path / "preprocessor_config.json"
    file.write_text('{"processor_class": "NemotronNanoVLV2Processor", "patch_size": 16, "max_num_tiles": 12}')
    with pytest.raises(
        RecipeError, match="NemotronNanoVLV2Processor has no min_num_patches, max_num_patches"
    ):
        check_checkpoint(config)
    file.write_text('{"patch_size": 16, "min_num_patches": 16, "max_num_patches": 1024}')
    check_checkpoint(config)
    with pytest.raises(RecipeError, match="SimpleNamespace has no patch_size, min_num_patches"):
        check_processor(SimpleNamespace(image_processor=SimpleNamespace(max_num_patches=1)))
