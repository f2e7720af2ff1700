# SPDX-License-Identifier: Apache-2.0
"""What is bound in the driver, once, by the launcher: the actor class, the registries, and start-up's checks."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any

from nemo_rl_ext.integration.capture import ReceiptHandOver, request_receipts
from nemo_rl_ext.integration.clips import ClipSettings
from nemo_rl_ext.integration.in_process import bind, install_in_process, wrap
from nemo_rl_ext.integration.known_processor import check_processor
from nemo_rl_ext.integration.probe import probe
from nemo_rl_ext.integration.processor import sync_chat_template
from nemo_rl_ext.integration.reattach import with_sums
from nemo_rl_ext.integration.recipe_checks import check_recipe, takes_mixed_sizes
from nemo_rl_ext.integration.settings import (
    ACTOR_KEY,
    ban_media_tokens,
    pick,
    settings_of,
)
from nemo_rl_ext.rollout.broker import BrokersHandOver

logger = logging.getLogger(__name__)


def install_driver() -> bool:
    """Bind NeMo-RL's names in the driver; returns whether anything was bound. Idempotent.

    False when NeMo-RL aligns media itself: then this package stands aside and says so.

    Raises:
        UnknownNemoRLError: when NeMo-RL's code is not what the hooks know.
    """
    found = probe()
    if found.in_tree:
        logger.warning(
            "NeMo-RL %s in %s matches media to rollouts itself (%s); grpo.media_alignment stands aside",
            found.version,
            found.root,
            ", ".join(found.in_tree),
        )
        return False
    for line in found.beside:
        logger.info("%s", line)
    install_in_process()

    import nemo_rl.algorithms.grpo as grpo
    import nemo_rl.algorithms.utils as tokenizers
    import nemo_rl.environments.nemo_gym as nemo_gym
    from nemo_rl.data.datasets.response_datasets import DATASET_REGISTRY
    from nemo_rl.data.processors import PROCESSOR_REGISTRY

    from nemo_rl_ext.integration.data import CheckedNemoGymDataset, RowProcessor

    wrap(tokenizers, "get_tokenizer", with_synced_template)
    wrap(nemo_gym, "setup_nemo_gym_config", with_settings)
    if hasattr(grpo, "aggregate_rollout_metrics"):
        wrap(grpo, "aggregate_rollout_metrics", with_sums)
    _bind_actor(nemo_gym)
    for name in ("nemo_gym_data_processor", RowProcessor.name):
        if not isinstance(PROCESSOR_REGISTRY.get(name), RowProcessor):
            bind(PROCESSOR_REGISTRY, name, RowProcessor())
    if DATASET_REGISTRY.get("NemoGymDataset") is not CheckedNemoGymDataset:
        bind(DATASET_REGISTRY, "NemoGymDataset", CheckedNemoGymDataset)
    logger.info("grpo.media_alignment is installed over NeMo-RL %s in %s", found.version, found.root)
    return True


def pixel_dtype(config: Any) -> str:
    """The dtype in which pixels travel: the policy's, where NeMo-RL casts all of them to it before they are used."""
    casts = hasattr(sys.modules.get("nemo_rl.algorithms.grpo"), "_policy_dtype")
    return "bfloat16" if casts and pick(config, "policy.precision") == "bfloat16" else "float32"


def _bind_actor(nemo_gym: Any) -> None:
    import ray

    from nemo_rl_ext.integration.actor import AlignedNemoGym, UpstreamNemoGym

    if nemo_gym.NemoGym.__ray_metadata__.modified_class is UpstreamNemoGym:
        actor = ray.remote(max_restarts=-1, max_task_retries=-1)(AlignedNemoGym)
        bind(nemo_gym, "NemoGym", actor)


def with_synced_template(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `algorithms.utils.get_tokenizer`: a processor is known, and renders with its tokenizer's template.

    Raises:
        RecipeError: for a processor whose engine-side counts are not known.
    """

    def get_tokenizer(
        tokenizer_config: dict[str, Any], get_processor: bool = False, *args: Any, **options: Any
    ) -> Any:
        loaded = original(tokenizer_config, get_processor, *args, **options)
        if not get_processor:
            return loaded
        check_processor(loaded)
        return sync_chat_template(loaded, tokenizer_config)

    return get_tokenizer


def with_settings(original: Callable[..., None]) -> Callable[..., None]:
    """For `nemo_gym.setup_nemo_gym_config`: check the recipe, ban media tokens, hand the actor its settings."""

    def setup_nemo_gym_config(config: Any, tokenizer: Any, *args: Any, **options: Any) -> None:
        original(config, tokenizer, *args, **options)
        settings = settings_of(config)
        if not settings.enabled:
            return
        check_recipe(config)
        if settings.ban_media_tokens:
            logger.info(
                "media tokens are banned from sampling through %s", ", ".join(ban_media_tokens(config))
            )
        if settings.evidence == "receipt":
            if request_receipts(config):
                ReceiptHandOver.start()
            else:
                settings = settings.model_copy(update={"evidence": "runs"})
        clips = ClipSettings.of(config)
        video = pick(config, "policy.generation.vllm_cfg.video.temporal_patch_size")
        config.env["nemo_gym"][ACTOR_KEY] = {
            **settings.model_dump(mode="json"),
            "context": {
                # With a processor cache, which is the default, an image may keep the grid of an earlier request.
                "max_model_len": pick(config, "policy.generation.vllm_cfg.max_model_len")
                if pick(config, "policy.generation.vllm_kwargs.mm_processor_cache_gb") == 0
                else None,
                "temporal_patch_size": int(video or 1),
                "one_size_per_row": not takes_mixed_sizes(config),
                "clips": dataclasses.asdict(clips) if clips is not None else None,
                "share": BrokersHandOver.start(),
                "pixel_dtype": pixel_dtype(config),
            },
        }

    return setup_nemo_gym_config
