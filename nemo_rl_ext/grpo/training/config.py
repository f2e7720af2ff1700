# SPDX-License-Identifier: Apache-2.0
"""``loss_fn`` and ``policy.optimizer``: what a training step takes of the configuration."""

from pydantic import Field

from nemo_rl_ext.config.block import Block


class LossConfig(Block):
    """``loss_fn``: the clipped policy gradient."""

    ratio_clip_min: float = Field(
        default=0.2,
        ge=0.0,
        lt=1.0,
        description="Ratios are clipped below at 1 - this.",
    )
    ratio_clip_max: float = Field(default=0.2, ge=0.0, description="Ratios are clipped above at 1 + this.")
    token_level_loss: bool = Field(
        default=True,
        description="Average over all unmasked tokens of the step; false averages per sequence first.",
    )


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
