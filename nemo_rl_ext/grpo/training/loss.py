# SPDX-License-Identifier: Apache-2.0
"""The clipped policy gradient, summed so that micro-batches add up to the exact mean over the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Sums over the sampled tokens of some rows; divide by the step's count."""

    loss: torch.Tensor
    num_tokens: int
    num_clipped: int


def clipped_policy_loss(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip_min: float,
    clip_max: float,
) -> LossSums:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with GRPO's group-relative advantages, token by token.

    `logprobs` and `engine_logprobs` are float [rows, tokens] of the policy and of the engine that sampled,
    `advantages` float [rows], and `weights` float [rows, tokens]: 0 where a token was not sampled or its row is
    masked. Returns the weighted sum, not the mean.
    """
    active = weights > 0
    # where() before exp: a masked token may hold an infinite ratio, whose gradient would be NaN even times 0.
    ratio = torch.exp(torch.where(active, logprobs - engine_logprobs, torch.zeros_like(logprobs)))
    clipped = ratio.clamp(1.0 - clip_min, 1.0 + clip_max)
    gain = advantages[:, None]
    surrogate = torch.minimum(ratio * gain, clipped * gain)
    return LossSums(
        loss=-(surrogate * weights).sum(),
        num_tokens=int(active.sum()),
        num_clipped=int((active & (ratio.detach() != clipped.detach())).sum()),
    )
