# SPDX-License-Identifier: Apache-2.0
"""From the configuration to the parts of a run: one function per part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl_ext.align.families.family import Layout
from nemo_rl_ext.align.runs import Grammar
from nemo_rl_ext.grpo.collecting.assembly import AlignmentOptions
from nemo_rl_ext.grpo.collecting.gym import in_process_scorer
from nemo_rl_ext.grpo.collecting.gym_servers import GymConfig
from nemo_rl_ext.grpo.collecting.player import Sampling
from nemo_rl_ext.grpo.config import Config
from nemo_rl_ext.grpo.engine.config import EngineConfig
from nemo_rl_ext.grpo.reward_function import checked_reward, load_reward_function
from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.guards.sampling import media_token_ban, media_token_ids
from nemo_rl_ext.manifest.forecast import EngineModel, engine_from_checkpoint
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.manifest.scoring import score
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.models.limits import run_limits
from nemo_rl_ext.rollout.aligner import AlignerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def new_policy(config: Config) -> Policy:
    """The policy as the checkpoint has it, with a fresh optimizer."""
    torch.manual_seed(config.grpo.seed)
    return Policy.from_pretrained(
        config.policy.model_name,
        precision=config.policy.precision,
        max_grad_norm=config.policy.max_grad_norm,
        **config.policy.optimizer.model_dump(),
    )


def engine_config(config: Config) -> EngineConfig:
    """Arguments of the in-process engine."""
    return EngineConfig(
        **config.policy.generation.vllm_cfg.model_dump(exclude={"max_model_len"}),
        model=config.policy.model_name,
        max_model_len=config.max_model_len,
        trust_remote_code=config.policy.trust_remote_code,
        seed=config.grpo.seed,
    )


def aligner_config(config: Config, media_policy: MediaPolicy, base_dir: Path) -> AlignerConfig:
    """What every aligner loads; `base_dir` is where relative media references start."""
    return AlignerConfig(
        model_dir=Path(config.policy.model_name),
        media_policy=media_policy,
        base_dir=base_dir,
        layout=Layout.NATIVE,
        dtype=getattr(torch, config.policy.precision),
        cache_bytes=config.grpo.media_alignment.cache_bytes,
        num_frames=config.data.video.num_frames,
        video_backend=config.data.video.backend,
        trust_remote_code=config.policy.trust_remote_code,
        identify=config.grpo.media_alignment.evidence == "receipt",
        share=True,
        render_static=config.grpo.media_alignment.enabled,
    )


def prevention_engine(config: Config) -> EngineModel:
    """The engine by whose limits `grpo.media_alignment.prevent` judges.

    Raises:
        ValueError: when its limits are not the trainer's.
    """
    vllm = config.policy.generation.vllm_cfg
    try:
        run_limits(
            config.policy.model_name, hf_overrides=vllm.hf_overrides, arguments=vllm.mm_processor_kwargs
        )
    except ValueError as error:
        raise ValueError(f"grpo.media_alignment.prevent: {error}") from None
    return engine_from_checkpoint(
        config.policy.model_name,
        max_model_len=config.max_model_len,
        max_new_tokens=config.policy.generation.max_new_tokens,
        num_frames=config.data.video.num_frames,
        limit_images=vllm.limit_mm_per_prompt.image,
        limit_videos=vllm.limit_mm_per_prompt.video,
    )


def sampling_of(config: Config, tokenizer: PreTrainedTokenizerBase, grammars: Sequence[Grammar]) -> Sampling:
    """How answers are drawn, the media-token ban included."""
    generation = config.policy.generation
    banned: tuple[int, ...] = ()
    if config.grpo.media_alignment.ban_media_tokens:
        banned = media_token_ban(media_token_ids(tokenizer, grammars)).token_ids
    return Sampling(
        temperature=generation.temperature,
        max_new_tokens=generation.max_new_tokens,
        allowed_token_ids=_allowed_token_ids(tokenizer, generation.allowed_tokens),
        banned_token_ids=banned,
        seed=config.grpo.seed,
        logprobs_mode=generation.vllm_cfg.logprobs_mode,
    )


def alignment_options(config: Config) -> AlignmentOptions:
    """What assembling a group needs of the configuration."""
    return AlignmentOptions(
        enabled=config.grpo.media_alignment.enabled,
        share_static=config.grpo.deduplicate_multimodal_data,
        # With a processor cache an image may keep the grid of an earlier request: no budget is shared.
        max_model_len=None
        if config.policy.generation.vllm_cfg.mm_processor_cache_gb
        else config.max_model_len,
        ordered=not config.env.should_use_nemo_gym,
        prevent=config.grpo.media_alignment.prevent,
        overlong_filtering=config.grpo.overlong_filtering,
    )


def reward_of(config: Config) -> Callable[[ManifestRow, str], float]:
    """The in-process reward: the user's own function, else the demo's for rows with an answer, else the agent's.

    Raises:
        ValueError: `env.reward_function` names nothing that can be called.
    """
    if (name := config.env.reward_function) is not None:
        return checked_reward(load_reward_function(name), name)
    scorers: dict[str, Callable[..., Any]] = {}

    def reward(row: ManifestRow, text: str) -> float:
        if row.agent_ref is None or "answer" in row.verifier_metadata:
            return score(row, text)
        agent = row.agent_ref.name
        if agent not in scorers:
            scorers[agent] = in_process_scorer(agent, config.env.nemo_gym.root)
        return float(scorers[agent](text, row.verifier_metadata)["reward"])

    return reward


def gym_config(config: Config, base_url: str) -> GymConfig:
    """How Gym is started against the embedded engine's endpoint."""
    gym = config.env.nemo_gym
    return GymConfig(
        venv=gym.venv,
        root=gym.root,
        config_paths=gym.config_paths,
        base_url=base_url,
        model_name=str(config.policy.model_name),
        run_dir=config.logger.log_dir / "gym",
    )


def _allowed_token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] | None
) -> tuple[int, ...] | None:
    """Ids of the only tokens that may be sampled. Raises ValueError for a text that is not one token."""
    if texts is None:
        return None
    ids = []
    for text in texts:
        encoded = tokenizer(text, add_special_tokens=False).input_ids
        if len(encoded) != 1:
            raise ValueError(
                f"policy.generation.allowed_tokens: {text!r} is {len(encoded)} tokens for this tokenizer; "
                "each entry must be exactly one"
            )
        ids.append(encoded[0])
    return tuple(ids)
