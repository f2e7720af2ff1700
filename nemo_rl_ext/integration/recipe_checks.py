# SPDX-License-Identifier: Apache-2.0
"""What a recipe must be for alignment to hold, checked before NeMo-RL starts anything."""

from __future__ import annotations

import logging
from typing import Any

from nemo_rl_ext.integration.settings import BLOCK, RecipeError, pick, require_raw_logprobs, settings_of

logger = logging.getLogger(__name__)


def check_recipe(config: Any) -> None:
    """Refuse a recipe under which alignment cannot hold, and say at start-up what it will do.

    Raises:
        RecipeError: with the key, its value, and the replacement.
    """
    _refuse_legacy_video_loader(config)
    _refuse_pruning(config)
    _refuse_device_processor(config)
    _refuse_data_plane(config)
    backend = pick(config, "policy.generation.backend")
    if backend != "vllm":
        raise RecipeError(
            f"{BLOCK}.enabled knows how vLLM expands media; policy.generation.backend is {backend!r}. "
            "Use vllm, or switch the block off"
        )
    if not comes_through_gym(config):
        _refuse_quantised_worker(config)
        return
    if not pick(config, "policy.is_vlm"):
        raise RecipeError(
            f"{BLOCK}.enabled needs policy.is_vlm: true, so that the NemoGym actor gets the model's processor"
        )
    _refuse_mixed_micro_batches(config)
    settings = settings_of(config)
    if settings.ban_media_tokens:
        require_raw_logprobs(config)
    if settings.prevent:
        from nemo_rl_ext.integration.prevention import check_prevention

        check_prevention(config)
    if pick(config, "env.should_mask_flagged_samples") is False:
        logger.warning(
            "env.should_mask_flagged_samples is false, so NeMo-RL ignores the flag on neutral rows: their loss "
            "multiplier is set to 0 in the rollout batch instead"
        )


def comes_through_gym(config: Any) -> bool:
    """Whether rollouts are made by NeMo-Gym, where media are repaired; elsewhere prompt ids are compared."""
    return bool(pick(config, "env.should_use_nemo_gym"))


def _refuse_quantised_worker(config: Any) -> None:
    if pick(config, "policy.generation.quant_cfg") is not None:
        raise RecipeError(
            "policy.generation.quant_cfg starts a worker of ModelOpt's, in which the engine's prompt ids are not "
            f"compared with the trainer's. Remove it, or switch {BLOCK} off"
        )


def _refuse_legacy_video_loader(config: Any) -> None:
    path = "policy.generation.vllm_cfg.video_loader"
    legacy = pick(config, path)
    if legacy is not None:
        raise RecipeError(
            f"{path}={legacy!r} is no longer read by NeMo-RL and would be ignored without a word. Write "
            "policy.generation.vllm_cfg.video: {sampling_style: nemotron_vl, num_frames: 32, temporal_patch_size: 2} "
            "instead: it sets the frames of the engine and of the trainer together"
        )


_PRUNING_PATHS = (
    "policy.generation.vllm_kwargs.video_pruning_rate",
    "policy.generation.vllm_cfg.video_pruning_rate",
    "policy.generation.vllm_kwargs.mm_processor_kwargs.video_pruning_rate",
    "policy.generation.vllm_kwargs.hf_overrides.video_pruning_rate",
    "policy.generation.vllm_kwargs.multimodal_config.video_pruning_rate",
)


def _refuse_pruning(config: Any) -> None:
    for path in _PRUNING_PATHS:
        rate = pick(config, path)
        if rate:
            raise RecipeError(
                f"{path}={rate!r} lets the engine prune video tokens (EVS): the pruned frames cannot be trained on. "
                "Set it to 0, or switch grpo.media_alignment off"
            )


_DEVICE_PATHS = (
    "policy.generation.vllm_kwargs.mm_processor_device",
    "policy.generation.vllm_kwargs.mm_processor_kwargs.device",
)


def _refuse_device_processor(config: Any) -> None:
    for path in _DEVICE_PATHS:
        device = pick(config, path)
        if device not in (None, "auto", "cpu"):
            raise RecipeError(
                f"{path}={device!r} resizes media on that device, where the last bits are others than the trainer's: "
                f"no receipt shows it. Set it to cpu, or switch {BLOCK} off"
            )


def _refuse_data_plane(config: Any) -> None:
    if pick(config, "data_plane.enabled"):
        raise RecipeError(
            "data_plane.enabled=True builds the train batch without media and with a sample mask of ones "
            "(nemo_rl/experience/payload.py): images and masked rows are lost there by NeMo-RL itself. Set "
            "data_plane.enabled: false and start the recipe with run_grpo_nemo_gym.py, or switch "
            f"{BLOCK} off"
        )


def takes_mixed_sizes(config: Any) -> bool:
    """Whether the training backend takes images of several sizes in one micro-batch: Megatron does."""
    return bool(pick(config, "policy.megatron_cfg.enabled"))


def _refuse_mixed_micro_batches(config: Any) -> None:
    """Without Megatron a neutral row must be alone in its micro-batch: its images have a size of their own."""
    if takes_mixed_sizes(config):
        return
    wanted = {
        "policy.train_micro_batch_size": 1,
        "policy.logprob_batch_size": 1,
        "policy.sequence_packing.enabled": False,
        "policy.dynamic_batching.enabled": False,
    }
    wrong = {
        key: pick(config, key) for key, value in wanted.items() if pick(config, key) not in (value, None)
    }
    if wrong:
        raise RecipeError(
            f"{', '.join(f'{key}={value!r}' for key, value in wrong.items())}: without policy.megatron_cfg.enabled "
            "NeMo-RL ends the run when images of several sizes meet in one micro-batch, as those of a repaired or "
            f"masked row do. Set {', '.join(f'{key}={wanted[key]!r}' for key in wrong)}, or train with Megatron"
        )
