# SPDX-License-Identifier: Apache-2.0
"""``loss_fn`` and ``policy.optimizer``: what a training step takes of the configuration."""

from typing import Literal

from pydantic import Field, model_validator

from nemo_rl_ext.config.block import Block


class LossConfig(Block):
    """``loss_fn``: NeMo-RL's clipped policy gradient, with its names, meanings and defaults."""

    token_level_loss: bool = Field(
        default=True,
        description="Average over all unmasked tokens of the update; false averages per rollout first.",
    )
    disable_ppo_ratio: bool = Field(
        default=False, description="REINFORCE: log-probs instead of clipped ratios."
    )
    force_on_policy_ratio: bool = Field(
        default=False, description="Ratios are 1, with their gradient; needs one update per step."
    )
    ratio_clip_min: float = Field(
        default=0.2,
        ge=0.0,
        lt=1.0,
        description="Ratios of the policy to the policy before the step's first update are clipped below at 1 - this.",
    )
    ratio_clip_max: float = Field(default=0.2, ge=0.0, description="They are clipped above at 1 + this.")
    ratio_clip_c: float | None = Field(
        default=None,
        gt=1.0,
        description="Dual clip: with a negative advantage, a token's loss is at most this times the advantage's size.",
    )
    reference_policy_kl_penalty: float = Field(
        default=0.01,
        ge=0.0,
        description="Weight of the KL divergence from the checkpoint that the run started with; 0 spares its forward.",
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Estimator of that divergence (Schulman 2020)."
    )
    kl_input_clamp_value: float | None = Field(
        default=20.0,
        gt=0.0,
        description="Log-ratios to the reference are clamped to this size; null leaves them.",
    )
    kl_output_clamp_value: float | None = Field(
        default=10.0, gt=0.0, description="A token's divergence is clamped to this size; null leaves it."
    )
    use_on_policy_kl_approximation: bool = Field(
        default=False, description="Weigh the divergence by the policy's ratio to the engine that sampled."
    )
    use_importance_sampling_correction: bool = Field(
        default=False,
        description="Weigh tokens by the ratio of the policy before the step to the engine that sampled; "
        "asynchronous runs need it.",
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        default=None,
        description="What happens to such weights outside the bounds: clamped to them (tis), tokens dropped (icepop), "
        "or rollouts dropped by their geometric mean (seq-mask-tis).",
    )
    truncated_importance_sampling_ratio: float | None = Field(
        default=None, gt=0.0, description="Upper bound of the weights; null does not truncate."
    )
    truncated_importance_sampling_ratio_min: float | None = Field(
        default=None, ge=0.0, description="Lower bound; null is 0 for tis, the other types need one."
    )

    @model_validator(mode="after")
    def _agrees(self) -> "LossConfig":
        kind, high = self.truncated_importance_sampling_type, self.truncated_importance_sampling_ratio
        low = self.truncated_importance_sampling_ratio_min
        if (kind is None) != (high is None):
            raise ValueError(
                "truncated_importance_sampling_type and truncated_importance_sampling_ratio go together: found "
                f"{kind!r} and {high!r}"
            )
        if kind is not None and not self.use_importance_sampling_correction:
            raise ValueError(
                f"truncated_importance_sampling_type {kind!r} truncates the weights of "
                "use_importance_sampling_correction, which is false"
            )
        if kind in ("icepop", "seq-mask-tis") and low is None:
            raise ValueError(f"{kind} needs truncated_importance_sampling_ratio_min")
        if low is not None and (high is None or low > high):
            raise ValueError(
                f"truncated_importance_sampling_ratio_min ({low}) must not exceed "
                f"truncated_importance_sampling_ratio ({high})"
            )
        return self


class OptimizerConfig(Block):
    """``policy.optimizer``: AdamW."""

    lr: float = Field(default=1e-3, gt=0.0, description="Learning rate.")
    weight_decay: float = Field(default=0.0, ge=0.0, description="Decoupled weight decay.")
    betas: list[float] = Field(
        default=[0.9, 0.999],
        min_length=2,
        max_length=2,
        description="Decay rates of the two moment estimates.",
    )
    eps: float = Field(default=1e-8, gt=0.0, description="Added to the denominator of the update.")
