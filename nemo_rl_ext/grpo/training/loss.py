# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's clipped policy gradient, token by token, so that micro-batches add up to the exact mean over an update.

The names are those of NeMo-RL's `ClippedPGLossFn`, whose loss and gradient these are (tests/nemo_rl/test_objective.py).
Three policies meet in it: the one that is trained, the same one as it was before the step's first update (`old`), and
the engine that sampled, whose log-probs may be those of older weights and of another implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl_ext.grpo.training.config import LossConfig


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What a loss needs to know of some rows beside the policy's own log-probs.

    Log-probs are float `[rows, tokens]`. `mask` is bool `[rows, tokens]`, true where a trained token was sampled;
    `weights` float of that shape, by which a token's loss enters the mean over the update, 0 outside the mask.
    `advantages` is float `[rows]`. `old` is None where the policy has not been updated since, `reference` where there
    is no KL penalty. `kept` is bool `[rows]`, false for rows of rollouts that seq-mask-tis drops; None keeps all.
    """

    engine: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    def __getitem__(self, rows: slice) -> Sampled:
        return Sampled(
            engine=self.engine[rows],
            mask=self.mask[rows],
            weights=self.weights[rows],
            advantages=self.advantages[rows],
            old=None if self.old is None else self.old[rows],
            reference=None if self.reference is None else self.reference[rows],
            kept=None if self.kept is None else self.kept[rows],
        )


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The loss of each token and what it was made of, all `[tokens]` of the mask; only `loss` has a gradient.

    `ratio` is the policy's to the old one and `clipped` says where the clip changed it; `importance` is the old
    policy's ratio to the engine before any truncation and `outside` says where that lies out of bounds; `entropy` is
    NeMo-RL's estimate; `kl` the penalty as it enters the loss.
    """

    loss: torch.Tensor
    weights: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    importance: torch.Tensor
    outside: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """The weighted sum: these rows' part of the update's loss."""
        return (self.loss * self.weights).sum()


def token_loss(logprobs: torch.Tensor, sampled: Sampled, config: LossConfig) -> TokenLoss:
    """The loss of every sampled token of some rows, from the policy's log-probs float `[rows, tokens]`.

    PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with dual clip (Ye et al. 2020), weighed by the old policy's
    ratio to the engine, plus the KL penalty, as NeMo-RL combines them.
    """
    # Only sampled tokens: a masked one may hold an infinite ratio, whose gradient would be NaN even times 0.
    mask = sampled.mask
    row = mask.nonzero()[:, 0]
    logprobs, engine, gain = logprobs[mask], sampled.engine[mask], sampled.advantages[row]
    detached = logprobs.detach()
    old = detached if sampled.old is None or config.force_on_policy_ratio else sampled.old[mask]

    if config.disable_ppo_ratio and not config.force_on_policy_ratio:
        ratio = clipped = logprobs
    else:
        ratio = torch.exp(logprobs - old)
        low, high = 1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max
        clipped = ratio if config.force_on_policy_ratio else ratio.clamp(low, high)
    surrogate = torch.maximum(-gain * ratio, -gain * clipped)
    if config.ratio_clip_c is not None:
        bound = -gain * config.ratio_clip_c
        surrogate = torch.where(gain < 0, torch.minimum(surrogate, bound), surrogate)

    importance = _finite(torch.exp(old - engine))
    weight, outside = _truncated(importance, config)
    if config.truncated_importance_sampling_type == "seq-mask-tis" and sampled.kept is not None:
        outside = ~sampled.kept[row]
        weight = torch.where(outside, 0.0, importance)
    loss = surrogate * weight if config.use_importance_sampling_correction else surrogate

    kl = torch.zeros_like(detached)
    if sampled.reference is not None:
        kl = _kl_penalty(logprobs, sampled.reference[mask], engine, config)
        loss = loss + kl
    return TokenLoss(
        loss=loss,
        weights=sampled.weights[mask],
        ratio=ratio.detach(),
        clipped=ratio.detach() != clipped.detach(),
        importance=importance,
        outside=outside,
        entropy=-torch.exp(detached - engine) * detached,
        kl=kl.detach(),
    )


def kept_rollouts(
    old: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor, rollouts: torch.Tensor, config: LossConfig
) -> torch.Tensor | None:
    """Which rows belong to rollouts that seq-mask-tis keeps, bool `[rows]`; None under any other correction.

    A rollout is kept when the geometric mean of the old policy's ratio to the engine, over all of its tokens, lies
    within the bounds. `rollouts` is int `[rows]`, the rollout that each row is a part of.
    """
    low, high = config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio
    if config.truncated_importance_sampling_type != "seq-mask-tis" or low is None or high is None:
        return None
    logs = torch.where(mask, _finite(old - engine), 0.0).sum(-1)
    mean = torch.exp(
        _per_rollout(logs, rollouts) / _per_rollout(mask.sum(-1).float(), rollouts).clamp(min=1.0)
    )
    return (mean >= low) & (mean <= high)


def token_weights(mask: torch.Tensor, rollouts: torch.Tensor, *, token_level: bool) -> torch.Tensor:
    """By what each token enters the mean over an update, float `[rows, tokens]`; they sum to 1.

    `mask` is bool `[rows, tokens]` over an update's rows, `rollouts` int `[rows]`. At token level every token counts
    the same, else every rollout does, however many rows its conversation was split into.
    """
    weights = mask.float()
    if token_level:
        return weights / weights.sum().clamp(min=1.0)
    tokens = _per_rollout(weights.sum(-1), rollouts)
    num_rollouts = len(rollouts[tokens > 0].unique())
    return weights / tokens.clamp(min=1.0)[:, None] / max(num_rollouts, 1)


def _per_rollout(values: torch.Tensor, rollouts: torch.Tensor) -> torch.Tensor:
    """Each row's sum over all rows of its rollout, `[rows]`."""
    _, number = rollouts.unique(return_inverse=True)
    return torch.zeros(len(rollouts), dtype=values.dtype).index_add_(0, number, values)[number]


def _truncated(importance: torch.Tensor, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weights `[tokens]` within their bounds, and which of them were outside."""
    high = config.truncated_importance_sampling_ratio
    if high is None:
        return importance, torch.zeros_like(importance, dtype=torch.bool)
    low = config.truncated_importance_sampling_ratio_min or 0.0
    outside = (importance < low) | (importance > high)
    if config.truncated_importance_sampling_type == "tis":
        return importance.clamp(low, high), outside
    return torch.where(outside, 0.0, importance), outside


def _kl_penalty(
    logprobs: torch.Tensor, reference: torch.Tensor, engine: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    """The weighted KL divergence from the reference per token `[tokens]` (Schulman 2020, "Approximating KL").

    The samples come from the policy, so its ratio, whose value is 1 unless it is taken to the engine, carries the
    gradient through the sampling; a clamp stops that one as well.
    """
    basis = engine if config.use_on_policy_kl_approximation else logprobs.detach()
    weight = _finite(torch.exp(logprobs - basis))
    raw = reference - logprobs
    log_ratio = raw
    if (limit := config.kl_input_clamp_value) is not None:
        log_ratio = raw.clamp(-limit, limit)
        weight = torch.where(raw == log_ratio, weight, weight.detach())
    if config.reference_policy_kl_type == "k1":
        kl = -log_ratio
    elif config.reference_policy_kl_type == "k2":
        kl = log_ratio.square() / 2
    else:
        kl = torch.exp(log_ratio) - 1 - log_ratio
    kl = weight * kl
    if (limit := config.kl_output_clamp_value) is not None:
        kl = kl.clamp(-limit, limit)
    return config.reference_policy_kl_penalty * kl


def _finite(values: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
