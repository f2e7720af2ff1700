# SPDX-License-Identifier: Apache-2.0
"""The block `grpo.media_alignment` of a NeMo-RL recipe, and the checks that a recipe must pass before it runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig

logger = logging.getLogger(__name__)

BLOCK = "grpo.media_alignment"
ACTOR_KEY = "media_alignment"
"""Key of `env.nemo_gym` under which the settings travel to the NemoGym actor; the actor takes it out again before
NeMo-Gym sees its configuration."""

MEDIA_TOKENS = ("<img>", "<image>", "</img>")
"""Words that the policy must not sample; every Nemotron VL tokenizer has each of them as one token."""


_ELSEWHERE = {"measure_logprob_gap": "NeMo-RL compares log-probs itself (train/token_mult_prob_error)"}


class RecipeError(ValueError):
    """A recipe that cannot run as it is; one string that names the key, its value and what to write instead."""


def settings_of(config: Any) -> MediaAlignmentConfig:
    """The settings in a recipe: a mapping, an OmegaConf container or NeMo-RL's `MasterConfig`.

    Raises:
        RecipeError: for an unknown key or a value of the wrong type, naming both.
    """
    block = pick(config, BLOCK)
    if block is None:
        return MediaAlignmentConfig(enabled=False)
    if not isinstance(block, Mapping) and not hasattr(block, "items"):
        raise RecipeError(f"{BLOCK} must be a mapping such as {{enabled: true}}, got {block!r}")
    try:
        # OmegaConf's lists are not lists.
        values = {
            key: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            for key, value in block.items()
        }
        settings = MediaAlignmentConfig.model_validate(values)
    except ValidationError as error:
        known = ", ".join(MediaAlignmentConfig.model_fields)
        faults = "; ".join(
            f"{BLOCK}.{'.'.join(map(str, fault['loc']))}: {fault['msg']}, got {fault['input']!r}"
            for fault in error.errors()
        )
        raise RecipeError(f"{faults}. Known keys: {known}") from None
    try:
        settings.refuse_keys(_ELSEWHERE)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return settings


def pick(config: Any, path: str) -> Any:
    """The value at a dotted path of mappings and objects, or None where any part is missing."""
    for name in path.split("."):
        if config is None:
            return None
        getter = getattr(config, "get", None)
        config = getter(name) if callable(getter) else getattr(config, name, None)
    return config


def ban_media_tokens(config: Any) -> list[str]:
    """Add the media tokens to every place that a Gym recipe takes `bad_words` from; returns those places.

    NeMo-RL's own requests read `policy.generation.bad_words`; a Gym model server sends what its `extra_body` holds.
    Both sides must compare log-probs from before the ban.

    Raises:
        RecipeError: when the engine reports log-probs from after the ban.
    """
    require_raw_logprobs(config)
    places = []
    generation = pick(config, "policy.generation")
    generation["bad_words"] = _joined(generation.get("bad_words"))
    places.append("policy.generation.bad_words")
    gym = pick(config, "env.nemo_gym")
    server = "policy_model.responses_api_models.vllm_model"
    if pick(gym, "policy_model") is not None or any(
        "/vllm_model/" in path for path in gym.get("config_paths") or ()
    ):
        for name in (*server.split("."), "extra_body"):
            gym = gym.setdefault(name, {})
        gym["bad_words"] = _joined(gym.get("bad_words"))
        places.append(f"env.nemo_gym.{server}.extra_body.bad_words")
    else:
        logger.warning(
            "no vllm_model server is configured under env.nemo_gym, so the ban on media tokens reaches only NeMo-RL's "
            "own requests; give your model server bad_words %s",
            list(MEDIA_TOKENS),
        )
    return places


def require_raw_logprobs(config: Any) -> None:
    """Refuse a ban on media tokens whose effect on log-probs the trainer would not know of.

    Raises:
        RecipeError: when the engine reports log-probs from after the ban.
    """
    mode = pick(config, "policy.generation.vllm_cfg.logprobs_mode")
    if mode != "raw_logprobs":
        raise RecipeError(
            f"policy.generation.vllm_cfg.logprobs_mode is {mode!r}: the engine would report log-probs from after the "
            "ban on media tokens, which the trainer does not apply. Set it to raw_logprobs, or set "
            f"{BLOCK}.ban_media_tokens: false"
        )


def _joined(words: Any) -> list[str]:
    return list(dict.fromkeys((*(words or ()), *MEDIA_TOKENS)))
