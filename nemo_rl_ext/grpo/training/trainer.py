# SPDX-License-Identifier: Apache-2.0
"""One training step: prompt groups in, exact token-mean gradient, log-prob gaps and metrics out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_rl_ext.grpo.collecting.player import Sampling
from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup
from nemo_rl_ext.grpo.training.batch import PolicyBatch, collate
from nemo_rl_ext.grpo.training.config import LossConfig
from nemo_rl_ext.grpo.training.loss import clipped_policy_loss
from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.grpo.training.rows import TrainingRow, training_rows
from nemo_rl_ext.grpo.training.weight_history import WeightHistory
from nemo_rl_ext.rollout.metrics import AlignmentMetrics

GAP_GENERATIONS = 2
"""Generations per prompt whose engine-against-trainer log-prob gap is measured."""


def train_step(
    policy: Policy,
    groups: Sequence[PromptGroup],
    *,
    sampling: Sampling,
    loss: LossConfig,
    normalize_rewards: bool,
    micro_batch_size: int,
    metrics: AlignmentMetrics,
    history: WeightHistory | None = None,
) -> dict[str, float]:
    """Update the policy once on all rollouts of a step.

    The loss is the mean over all unmasked sampled tokens of the step (or over sequences), whatever the micro-batch
    size. Masked rows run through the forward with weight 0, so their media are counted against their tokens too.
    With a `history` of weights the engine-against-trainer gap is measured on the weights that sampled each row.

    Raises:
        ValueError: the forward's own count check, when media do not fit a row's tokens.
    """
    rows = training_rows(groups, normalize=normalize_rewards, allowed_token_ids=sampling.allowed_token_ids)
    batch = collate(rows, pad_token_id=0)
    width = batch.input_ids.shape[1] - 1
    engine = torch.stack([_padded(row.engine_logprobs[1:], width) for row in rows])
    weights = torch.stack([_padded(row.sampled[1:].float(), width) for row in rows])
    weights *= torch.tensor([[0.0 if row.masked else 1.0] for row in rows])
    num_tokens = int((weights > 0).sum())
    if not loss.token_level_loss:
        weights /= tokens_of_rollout(rows, weights).clamp(min=1.0)
    scale = max(float(weights.sum()), 1.0)
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float32)

    if history is not None:
        _measure_gaps(policy, rows, sampling, micro_batch_size, metrics, history)
    policy.zero_grad()
    loss_sum, clipped = 0.0, 0
    for part, micro in batch.micro_batches(micro_batch_size):
        logprobs = _forward(policy, rows[part], micro, sampling)
        sums = clipped_policy_loss(
            logprobs,
            engine[part],
            advantages[part],
            weights[part],
            clip_min=loss.ratio_clip_min,
            clip_max=loss.ratio_clip_max,
        )
        (sums.loss / scale).backward()
        loss_sum += sums.loss.item()
        clipped += sums.num_clipped
    grad_norm = policy.optimizer_step() if num_tokens else 0.0
    return {
        "train/loss": loss_sum / scale,
        "train/grad_norm": grad_norm,
        "train/clip_fraction": clipped / max(num_tokens, 1),
        "train/num_tokens": float(num_tokens),
        "train/num_sequences": float(len(rows)),
    }


def tokens_of_rollout(rows: Sequence[TrainingRow], weights: torch.Tensor) -> torch.Tensor:
    """Trained tokens of each row's whole rollout, `[rows, 1]`: a conversation in several sequences counts once."""
    rollouts = torch.tensor([row.rollout for row in rows])
    totals = torch.zeros(int(rollouts.max()) + 1, dtype=weights.dtype)
    return totals.index_add_(0, rollouts, weights.sum(-1))[rollouts][:, None]


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - len(values)))


def _forward(
    policy: Policy, rows: Sequence[TrainingRow], batch: PolicyBatch, sampling: Sampling
) -> torch.Tensor:
    try:
        return policy.forward_logprobs(
            batch,
            banned_token_ids=sampling.banned_token_ids,
            temperature=sampling.temperature,
            logprobs_mode=sampling.logprobs_mode,
        )
    except ValueError as error:
        raise ValueError(f"{error}; rows {sorted({row.where for row in rows})}") from error


def _measure_gaps(
    policy: Policy,
    rows: Sequence[TrainingRow],
    sampling: Sampling,
    micro_batch_size: int,
    metrics: AlignmentMetrics,
    history: WeightHistory,
) -> None:
    """Engine against trainer on equal weights, for the first generations of every prompt with media.

    The rollouts of a group share their prompt and its media, so a few of them say as much as all. A row that was
    sampled with mixed weights is left out.
    """
    for version in history.versions():
        measured = [row for row in rows if row.generation < GAP_GENERATIONS and _is_measured(row, version)]
        for start in range(0, len(measured), micro_batch_size):
            part = measured[start : start + micro_batch_size]
            batch = collate(part, pad_token_id=0)
            with history.applied(policy, version):
                logprobs = _forward(policy, part, batch, sampling)
            for row, ours in zip(part, logprobs, strict=True):
                sampled = row.sampled[1:]
                gap = (ours[: len(sampled)] - row.engine_logprobs[1:])[sampled].abs()
                metrics.add_gap(
                    repaired=row.repaired,
                    video=row.has_video,
                    mean=gap.mean().item(),
                    maximum=gap.max().item(),
                    num_tokens=len(gap),
                )


def _is_measured(row: TrainingRow, version: int) -> bool:
    has_samples = bool(row.sampled[1:].any())
    return not row.masked and bool(row.media) and has_samples and row.versions == {version}
