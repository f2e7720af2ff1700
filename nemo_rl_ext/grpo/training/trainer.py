# SPDX-License-Identifier: Apache-2.0
"""One training step: prompt groups in; one or more updates of the policy, log-prob gaps and metrics out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl_ext.grpo.collecting.player import Sampling
from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup
from nemo_rl_ext.grpo.training.batch import PolicyBatch, collate
from nemo_rl_ext.grpo.training.config import LossConfig
from nemo_rl_ext.grpo.training.gaps import measure_gaps
from nemo_rl_ext.grpo.training.loss import Sampled, TokenLoss, kept_rollouts, token_loss, token_weights
from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.grpo.training.rows import TrainingRow, training_rows
from nemo_rl_ext.grpo.training.weight_history import WeightHistory, Weights, applied
from nemo_rl_ext.rollout.metrics import AlignmentMetrics


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a step optimises: `loss_fn`, and the keys of `grpo` and `policy` that belong to it.

    `rollouts_per_update` is `policy.train_global_batch_size`; None takes one update per step.
    """

    loss: LossConfig
    normalize_rewards: bool
    use_leave_one_out_baseline: bool
    rollouts_per_update: int | None
    micro_batch_size: int


def train_step(
    policy: Policy,
    groups: Sequence[PromptGroup],
    *,
    sampling: Sampling,
    objective: Objective,
    metrics: AlignmentMetrics,
    history: WeightHistory | None = None,
    reference: Weights | None = None,
) -> dict[str, float]:
    """Update the policy on all rollouts of a step.

    The gradient is that of the exact mean over each update's unmasked sampled tokens (or rollouts), whatever the
    micro-batch size. Masked rows run through the forward with weight 0, so their media are counted against their
    tokens too. With a `history` of weights the engine-against-trainer gap is measured on the weights that sampled each
    row; `reference` is needed for a KL penalty.

    Raises:
        ValueError: the forward's own count check, when media do not fit a row's tokens.
    """
    rows = training_rows(
        groups,
        normalize=objective.normalize_rewards,
        leave_one_out=objective.use_leave_one_out_baseline,
        allowed_token_ids=sampling.allowed_token_ids,
    )
    forward = functools.partial(_forward, policy, sampling)
    if history is not None:
        measure_gaps(
            policy,
            rows,
            forward=lambda part: forward(part, collate(part, pad_token_id=0)),
            micro_batch_size=objective.micro_batch_size,
            metrics=metrics,
            history=history,
        )
    batch = collate(rows, pad_token_id=0)
    updates = _updates(rows, objective.rollouts_per_update)
    sampled = _sampled(rows, batch, updates, objective.loss)

    def without_gradient() -> torch.Tensor:
        with torch.no_grad():
            parts = batch.micro_batches(objective.micro_batch_size)
            return torch.cat([forward(rows[part], micro) for part, micro in parts])

    if objective.loss.reference_policy_kl_penalty:
        if reference is None:
            raise ValueError("loss_fn.reference_policy_kl_penalty needs the reference's weights")
        with applied(policy, reference):
            sampled = dataclasses.replace(sampled, reference=without_gradient())
    if len(updates) > 1 or objective.loss.truncated_importance_sampling_type == "seq-mask-tis":
        # Before the only update of a step the old policy is the policy itself, and its forward gives both.
        rollouts = torch.tensor([row.rollout for row in rows])
        old = without_gradient()
        kept = kept_rollouts(old, sampled.engine, sampled.mask, rollouts, objective.loss)
        sampled = dataclasses.replace(sampled, old=old, kept=kept)

    tokens: list[TokenLoss] = []
    norms: list[float] = []
    for update in updates:
        policy.zero_grad()
        micro_batches = batch.rows(update.start, update.stop).micro_batches(objective.micro_batch_size)
        for part, micro in micro_batches:
            logprobs = forward(rows[update][part], micro)
            found = token_loss(logprobs, sampled[update][part], objective.loss)
            found.total.backward()
            tokens.append(dataclasses.replace(found, loss=found.loss.detach()))
        if sampled.mask[update].any():
            norms.append(policy.optimizer_step())
    return _metrics(tokens, norms, num_updates=len(updates)) | {"train/num_sequences": float(len(rows))}


def _updates(rows: Sequence[TrainingRow], rollouts_per_update: int | None) -> list[slice]:
    """The rows of each update, in order; those of one rollout stay together."""
    if rollouts_per_update is None:
        return [slice(0, len(rows))]
    numbers = [row.rollout // rollouts_per_update for row in rows]
    starts = [i for i, number in enumerate(numbers) if not i or number != numbers[i - 1]]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)]


def _sampled(
    rows: Sequence[TrainingRow], batch: PolicyBatch, updates: Sequence[slice], loss: LossConfig
) -> Sampled:
    width = batch.input_ids.shape[1] - 1
    mask = torch.stack([_padded(row.sampled[1:], width) for row in rows])
    mask &= torch.tensor([[not row.masked] for row in rows])
    rollouts = torch.tensor([row.rollout for row in rows])
    return Sampled(
        engine=torch.stack([_padded(row.engine_logprobs[1:], width) for row in rows]),
        mask=mask,
        weights=torch.cat(
            [token_weights(mask[u], rollouts[u], token_level=loss.token_level_loss) for u in updates]
        ),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
    )


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - len(values)))


def _forward(
    policy: Policy, sampling: Sampling, rows: Sequence[TrainingRow], batch: PolicyBatch
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


def _metrics(tokens: Sequence[TokenLoss], norms: Sequence[float], *, num_updates: int) -> dict[str, float]:
    """Means over the step's trained tokens, under NeMo-RL's names, with the extremes of both ratios."""
    fields = [field.name for field in dataclasses.fields(TokenLoss)]
    joined = {name: torch.cat([getattr(part, name) for part in tokens]).double() for name in fields}
    num_tokens = len(joined["loss"])
    found = {
        "train/loss": float((joined["loss"] * joined["weights"]).sum() / num_updates),
        "train/grad_norm": sum(norms) / max(len(norms), 1),
        "train/num_tokens": float(num_tokens),
        "train/clip_fraction": float(joined["clipped"].sum()) / max(num_tokens, 1),
    }
    if num_tokens:
        found["train/kl_penalty"] = float((joined["kl"] * joined["weights"]).sum() / num_updates)
        found["train/approx_entropy"] = float(joined["entropy"].mean())
        found["train/is_oob_ratio"] = float(joined["outside"].mean())
        for name, values in (
            ("probs_ratio", joined["ratio"]),
            ("sampling_importance_ratio", joined["importance"]),
        ):
            found[f"train/{name}"] = float(values.mean())
            found[f"train/{name}_min"], found[f"train/{name}_max"] = float(values.min()), float(values.max())
    return found
