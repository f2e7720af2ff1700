# SPDX-License-Identifier: Apache-2.0
"""Configuration of the embedded GRPO run: NeMo-RL's names, plus the block ``grpo.media_alignment``.

``load_config`` reads YAML with ``defaults:`` inheritance, applies ``key=value`` overrides and validates the
result into frozen models. Every fault is one line of a ``ConfigError``: the file and line (or the override),
the dotted key, what was expected and what was found; unknown keys are refused with the known ones listed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from nemo_rl_ext.config.block import Block, ConfigPath
from nemo_rl_ext.config.faults import explain_fault
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.config.source import ConfigError, load_sources
from nemo_rl_ext.grpo.engine.config import VllmConfig
from nemo_rl_ext.grpo.training.config import LossConfig, OptimizerConfig

__all__ = ["Config", "ConfigError", "load_config"]


class AsyncGRPOConfig(Block):
    """``grpo.async_grpo``: how far generation may run ahead of training."""

    enabled: bool = Field(
        default=False,
        description="Generate while training, which needs loss_fn.use_importance_sampling_correction; false alternates "
        "strictly.",
    )
    max_trajectory_age_steps: int = Field(
        default=1,
        ge=1,
        description="Training steps by which a trajectory's weights may be older than the policy's.",
    )
    in_flight_weight_updates: bool = Field(
        default=False,
        description="Push new weights between the engine's requests without waiting for a group to finish.",
    )


class GRPOConfig(Block):
    """``grpo``: the shape of a step and of the run."""

    num_prompts_per_step: int = Field(default=8, ge=1, description="Prompt groups per training step.")
    num_generations_per_prompt: int = Field(
        default=8,
        ge=2,
        description="Rollouts per prompt group; advantages are relative to the group, so >= 2.",
    )
    max_num_steps: int = Field(default=80, ge=1, description="Training steps of the run.")
    max_rollout_turns: int = Field(default=2, ge=1, description="Assistant turns per rollout at most.")
    normalize_rewards: bool = Field(
        default=True,
        description="Divide advantages by the deviation of the rewards that their baseline is made of.",
    )
    use_leave_one_out_baseline: bool = Field(
        default=True,
        description="A rollout's baseline is the mean reward of the others of its group; false: of all.",
    )
    overlong_filtering: bool = Field(
        default=False,
        description="Mask rollouts with an answer that ran into max_new_tokens or the context, and conversations that "
        "outgrew the context in a later turn.",
    )
    val_period: int = Field(
        default=20,
        ge=0,
        description="Steps between evaluations; 0 evaluates only at the end.",
    )
    val_at_start: bool = Field(default=True, description="Evaluate before the first step.")
    max_val_samples: int = Field(default=128, ge=1, description="Held-out prompts per evaluation at most.")
    seed: int = Field(default=0, ge=0, description="Seed of data order, sampling and initialisation.")
    deduplicate_multimodal_data: bool = Field(
        default=True,
        description="The rollouts of a prompt group share one set of static tensors by reference.",
    )
    async_grpo: AsyncGRPOConfig = Field(
        default_factory=AsyncGRPOConfig, description="How far generation may run ahead of training."
    )
    media_alignment: MediaAlignmentConfig = Field(
        default_factory=MediaAlignmentConfig, description="Alignment of training tensors with the rollout."
    )


class GenerationConfig(Block):
    """``policy.generation``: sampling."""

    temperature: float = Field(
        default=1.0, gt=0.0, description="Sampling temperature, also applied to the training log-probs."
    )
    max_new_tokens: int = Field(default=4, ge=1, description="Sampled tokens per assistant turn at most.")
    allowed_tokens: list[str] | None = Field(
        default=None,
        min_length=1,
        description="The only tokens that may be sampled, as text of one token each; null allows all. "
        "Applied to the training log-probs as well.",
    )
    vllm_cfg: VllmConfig = Field(
        default_factory=VllmConfig,
        description="Arguments of the in-process engine.",
    )


class PolicyConfig(Block):
    """``policy``: the model that is trained, and how it generates."""

    model_name: str = Field(
        min_length=1, description="Directory of the checkpoint, loaded by vLLM and transformers alike."
    )
    build_tiny_checkpoint: bool = Field(
        default=False,
        description="Build the repository's tiny random checkpoint at model_name when that directory is "
        "missing.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that the checkpoint ships (processors, configuration classes).",
    )
    max_total_sequence_length: int = Field(
        default=512,
        ge=16,
        description="Tokens per training row at most, prompt and media included; the engine's context.",
    )
    precision: Literal["bfloat16", "float32"] = Field(
        default="float32", description="Weights and activations of the trained policy."
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW.")
    max_grad_norm: float = Field(default=1.0, gt=0.0, description="Gradients are clipped to this norm.")
    train_global_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Rollouts per update of the policy; null updates once per step, with all of them.",
    )
    train_micro_batch_size: int = Field(
        default=8, ge=1, description="Rows per forward of the policy; does not change the gradient."
    )
    generation: GenerationConfig = Field(default_factory=GenerationConfig, description="Sampling.")


class DatasetConfig(Block):
    """``data.train`` and ``data.validation``."""

    data_path: ConfigPath = Field(description="NeMo-Gym style JSONL manifest.")


class VideoConfig(Block):
    """``data.video``: how clips are decoded and sampled, unless a row says otherwise."""

    backend: Literal["opencv", "torchcodec"] = Field(default="opencv", description="Decoder.")
    num_frames: int = Field(default=8, ge=1, description="Frames sampled per clip.")
    decode_timeout_s: float = Field(
        default=30.0, gt=0.0, description="Seconds after which a decoder that hangs becomes a data failure."
    )


class DataConfig(Block):
    """``data``: manifests, and what they may make this process read. A manifest is untrusted input."""

    train: DatasetConfig = Field(description="Training prompts.")
    validation: DatasetConfig | None = Field(
        default=None,
        description="Held-out prompts; null never evaluates.",
    )
    build_demo_manifest: bool = Field(
        default=False,
        description="Build the demo's manifests at the two data_path places when they are missing.",
    )
    verify_media: bool = Field(
        default=True,
        description="Decode every image once before the run, so that a broken file stops it at once; when false, "
        "its rows are masked and named as they come up.",
    )
    shuffle: bool = Field(default=True, description="Shuffle the training prompts at every pass over them.")
    media_roots: list[ConfigPath] = Field(
        default_factory=list,
        description="Directories that media paths must stay inside, symlinks resolved; empty means the "
        "directory of the manifest.",
    )
    allow_remote: bool = Field(
        default=False, description="Fetch http(s) media; private addresses are refused all the same."
    )
    max_image_pixels: int = Field(
        default=64_000_000, ge=1, description="Images with more pixels are refused before they are decoded."
    )
    max_media_bytes: int = Field(
        default=256 << 20, ge=1, description="Media files with more bytes are refused before they are read."
    )
    video: VideoConfig = Field(default_factory=VideoConfig, description="Decoding and sampling of clips.")


class NemoGymConfig(Block):
    """``env.nemo_gym``: the servers that the run starts when ``env.should_use_nemo_gym``."""

    venv: ConfigPath = Field(
        default=Path(".venv-gym"), description="NeMo-Gym's own Python environment, as built by `make gym`."
    )
    root: ConfigPath = Field(
        default=Path("gym_resources"),
        description="Directory of our resources servers, in Gym's layout; their scoring modules are loaded from it.",
    )
    config_paths: list[ConfigPath] = Field(
        default_factory=list, description="Gym configuration files of the agents and resources servers."
    )


class EnvConfig(Block):
    """``env``: where rewards come from."""

    should_use_nemo_gym: bool = Field(
        default=False,
        description="Take rollouts and rewards from NeMo-Gym servers; false scores in this process.",
    )
    reward_function: str | None = Field(
        default=None,
        description="Your own reward: module:function or file.py:function, called with a rollout's last answer and its "
        "row's verifier_metadata, returns a number; null compares the answer's first letter with "
        "verifier_metadata.answer.",
    )
    nemo_gym: NemoGymConfig = Field(default_factory=NemoGymConfig, description="The Gym servers to start.")

    @model_validator(mode="after")
    def _one_reward(self) -> "EnvConfig":
        if self.should_use_nemo_gym and self.reward_function is not None:
            raise ValueError(
                "env.reward_function scores in this process, and with env.should_use_nemo_gym Gym's verifiers do: set "
                "one of them"
            )
        return self


class LoggerConfig(Block):
    """``logger``: what a run writes."""

    log_dir: ConfigPath = Field(
        default=Path("runs/grpo"),
        description="Run directory: metrics.jsonl, config.yaml, report.html, TensorBoard.",
    )
    tensorboard_enabled: bool = Field(default=True, description="Write TensorBoard event files.")
    report_enabled: bool = Field(default=True, description="Write report.html when the run ends.")


class CheckpointingConfig(Block):
    """``checkpointing``: when the policy and the optimizer are saved."""

    enabled: bool = Field(default=True, description="Write checkpoints; needed for --resume.")
    checkpoint_dir: ConfigPath | None = Field(
        default=None, description="Where they go; null means `checkpoints` inside logger.log_dir."
    )
    save_period: int = Field(
        default=20,
        ge=1,
        description="Steps between checkpoints; the last step is always saved.",
    )
    keep_top_k: int = Field(default=2, ge=1, description="Checkpoints kept; the oldest is deleted first.")


class Config(Block):
    """The whole configuration of ``nemo-rl-ext grpo``."""

    grpo: GRPOConfig = Field(default_factory=GRPOConfig, description="The shape of a step and of the run.")
    loss_fn: LossConfig = Field(default_factory=LossConfig, description="The clipped policy gradient.")
    policy: PolicyConfig = Field(description="The model that is trained, and how it generates.")
    data: DataConfig = Field(description="Manifests and what they may make this process read.")
    env: EnvConfig = Field(default_factory=EnvConfig, description="Where rewards come from.")
    logger: LoggerConfig = Field(default_factory=LoggerConfig, description="What a run writes.")
    checkpointing: CheckpointingConfig = Field(
        default_factory=CheckpointingConfig, description="When the policy and the optimizer are saved."
    )

    @model_validator(mode="after")
    def _blocks_agree(self) -> "Config":
        engine = self.policy.generation.vllm_cfg
        if self.max_model_len > self.policy.max_total_sequence_length:
            raise ValueError(
                f"policy.generation.vllm_cfg.max_model_len ({self.max_model_len}) must not exceed "
                f"policy.max_total_sequence_length ({self.policy.max_total_sequence_length}): "
                "rollouts could be longer than training accepts"
            )
        if self.policy.generation.max_new_tokens >= self.max_model_len:
            raise ValueError(
                f"policy.generation.max_new_tokens ({self.policy.generation.max_new_tokens}) must be below "
                f"policy.generation.vllm_cfg.max_model_len ({self.max_model_len}): a prompt needs room too"
            )
        self._require_objective()
        if self.grpo.media_alignment.enabled and engine.video_pruning_rate > 0:
            raise ValueError(
                "policy.generation.vllm_cfg.video_pruning_rate must be 0 while grpo.media_alignment.enabled, "
                f"found {engine.video_pruning_rate}: a pruned video (EVS) cannot be aligned"
            )
        self.grpo.media_alignment.refuse_keys(
            {
                "media_roots": "name the directories in data.media_roots",
                "allow_remote": "set data.allow_remote",
            }
        )
        return self

    def _require_objective(self) -> None:
        rollouts = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        per_update = self.policy.train_global_batch_size or rollouts
        if rollouts % per_update:
            raise ValueError(
                f"policy.train_global_batch_size ({per_update}) must divide the {rollouts} rollouts of a step "
                "(grpo.num_prompts_per_step * grpo.num_generations_per_prompt)"
            )
        if self.loss_fn.force_on_policy_ratio and per_update != rollouts:
            raise ValueError(
                "loss_fn.force_on_policy_ratio needs one update per step: leave policy.train_global_batch_size null, "
                f"found {per_update} of {rollouts} rollouts"
            )
        if self.grpo.async_grpo.enabled and not self.loss_fn.use_importance_sampling_correction:
            raise ValueError(
                "grpo.async_grpo.enabled needs loss_fn.use_importance_sampling_correction: true, as in NeMo-RL: "
                "rollouts are sampled with older weights than those that train on them"
            )

    @property
    def max_model_len(self) -> int:
        """Context of the engine in tokens."""
        return self.policy.generation.vllm_cfg.max_model_len or self.policy.max_total_sequence_length

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of the run's checkpoints."""
        return self.checkpointing.checkpoint_dir or self.logger.log_dir / "checkpoints"

    def to_yaml(self) -> str:
        """The complete configuration as YAML; ``load_config`` reads it back to an equal object."""
        return yaml.safe_dump(
            self.model_dump(
                mode="json", exclude={"grpo": {"media_alignment": {"media_roots", "allow_remote"}}}
            ),
            sort_keys=False,
            allow_unicode=True,
        )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and its ``defaults:`` parents, apply ``key=value`` or ``++key=value``, and validate.

    Interpolations (``${policy.max_total_sequence_length}``, ``${oc.env:NAME}``) are OmegaConf's. Raises
    ``ConfigError`` (a ``ValueError``) with one line per fault.
    """
    source = load_sources(path, overrides)
    try:
        return Config.model_validate(source.values)
    except ValidationError as error:
        faults = [explain_fault(fault, source, Config) for fault in error.errors()]
        raise ConfigError("\n".join(faults)) from None
