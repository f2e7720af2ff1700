# SPDX-License-Identifier: Apache-2.0
"""The one place where NeMo-RL's names are bound to something else.

Two functions, both idempotent. `install_driver` runs once, in the driver, from the launcher. `install_in_process`
runs in every process that receives one of this package's objects (the actor class, a row processor, a rollout's
record), each of which calls it when it is unpickled; no hook of Ray's is needed, and a process that receives none of
them is left alone.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from nemo_rl_ext.integration.names import extend_processor_names
from nemo_rl_ext.integration.probe import probe
from nemo_rl_ext.integration.settings import (
    ACTOR_KEY,
    ban_media_tokens,
    check_recipe,
    pick,
    settings_of,
)

logger = logging.getLogger(__name__)

_MARK = "_nemo_rl_ext_original"
_originals: list[tuple[Any, str, Any]] = []


def install_driver() -> bool:
    """Bind NeMo-RL's names in the driver; returns whether anything was bound.

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
    install_in_process()

    import nemo_rl.algorithms.utils as tokenizers
    import nemo_rl.environments.nemo_gym as nemo_gym
    from nemo_rl.data.datasets.response_datasets import DATASET_REGISTRY
    from nemo_rl.data.processors import PROCESSOR_REGISTRY

    from nemo_rl_ext.integration.data import CheckedNemoGymDataset, RowProcessor

    _wrap(tokenizers, "get_tokenizer", _with_synced_template)
    _wrap(nemo_gym, "setup_nemo_gym_config", _with_settings)
    _bind_actor(nemo_gym)
    for name in ("nemo_gym_data_processor", RowProcessor.name):
        if not isinstance(PROCESSOR_REGISTRY.get(name), RowProcessor):
            _bind(PROCESSOR_REGISTRY, name, RowProcessor())
    if DATASET_REGISTRY.get("NemoGymDataset") is not CheckedNemoGymDataset:
        _bind(DATASET_REGISTRY, "NemoGymDataset", CheckedNemoGymDataset)
    logger.info("grpo.media_alignment is installed over NeMo-RL %s in %s", found.version, found.root)
    return True


def install_in_process() -> None:
    """Bind what a rollout-collecting or data-loading process needs; what it has not imported, it does not use."""
    from nemo_rl_ext.integration import reattach

    if not _originals:
        probe()
    _show_log()
    extend_processor_names()
    rollouts = sys.modules.get("nemo_rl.experience.rollouts")
    if rollouts is not None:
        _wrap(
            rollouts,
            "_reattach_static_multimodal_payloads_to_result",
            reattach.reattach_respecting_marks,
        )
        _wrap(
            rollouts,
            "_postprocess_single_nemo_gym_group",
            lambda original: reattach.typed_masked_fraction(reattach.group_with_metrics(original)),
        )
    manager = sys.modules.get("nemo_rl.experience.rollout_manager")
    if manager is not None:
        _wrap(manager, "attach_static_multimodal_payload", reattach.attach_respecting_marks)


def _show_log() -> None:
    """Let this package's start-up lines be seen in Ray's workers, which show warnings at most."""
    ours = logging.getLogger("nemo_rl_ext")
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)
    if not ours.isEnabledFor(logging.INFO):
        ours.setLevel(logging.INFO)


def uninstall() -> None:
    """Give every name its original back; for tests and notebooks."""
    while _originals:
        owner, name, original = _originals.pop()
        _set(owner, name, original)


def _wrap(module: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    current = getattr(module, name)
    if not hasattr(current, _MARK):
        replacement = functools.wraps(current)(make(current))
        setattr(replacement, _MARK, current)
        _bind(module, name, replacement)


def _bind(owner: Any, name: str, value: Any) -> None:
    _originals.append((owner, name, owner.get(name) if isinstance(owner, dict) else getattr(owner, name)))
    _set(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    if not isinstance(owner, dict):
        setattr(owner, name, value)
    elif value is None:
        owner.pop(name, None)
    else:
        owner[name] = value


def _bind_actor(nemo_gym: Any) -> None:
    import ray

    from nemo_rl_ext.integration.actor import AlignedNemoGym, UpstreamNemoGym

    if nemo_gym.NemoGym.__ray_metadata__.modified_class is UpstreamNemoGym:
        actor = ray.remote(max_restarts=-1, max_task_retries=-1)(AlignedNemoGym)
        _bind(nemo_gym, "NemoGym", actor)


def _with_synced_template(original: Callable) -> Callable:
    from nemo_rl_ext.integration.processor import sync_chat_template

    def get_tokenizer(tokenizer_config: dict[str, Any], get_processor: bool = False) -> Any:
        loaded = original(tokenizer_config, get_processor=get_processor)
        return sync_chat_template(loaded, tokenizer_config) if get_processor else loaded

    return get_tokenizer


def _with_settings(original: Callable) -> Callable:
    """After NeMo-RL set up its Gym configuration: check the recipe, ban media tokens, hand the actor its settings."""

    def setup_nemo_gym_config(config: Any, tokenizer: Any) -> None:
        original(config, tokenizer)
        settings = settings_of(config)
        if not settings.enabled:
            return
        check_recipe(config)
        if settings.ban_media_tokens:
            logger.info(
                "media tokens are banned from sampling through %s", ", ".join(ban_media_tokens(config))
            )
        if settings.evidence == "receipt":
            from nemo_rl_ext.integration.capture import request_capture

            if not request_capture(config):
                settings = settings.model_copy(update={"evidence": "runs"})
        video = pick(config, "policy.generation.vllm_cfg.video.temporal_patch_size")
        config.env["nemo_gym"][ACTOR_KEY] = {
            **settings.model_dump(mode="json"),
            "context": {
                "max_model_len": pick(config, "policy.generation.vllm_cfg.max_model_len"),
                "temporal_patch_size": int(video or 1),
            },
        }

    return setup_nemo_gym_config
