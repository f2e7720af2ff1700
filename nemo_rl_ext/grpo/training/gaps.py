# SPDX-License-Identifier: Apache-2.0
"""Engine against trainer on equal weights: the log-prob gap of a step's rows with media."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.grpo.training.rows import TrainingRow
from nemo_rl_ext.grpo.training.weight_history import WeightHistory, applied
from nemo_rl_ext.rollout.metrics import AlignmentMetrics

GAP_GENERATIONS = 2
"""Generations per prompt whose gap is measured."""

Forward = Callable[[Sequence[TrainingRow]], torch.Tensor]
"""The policy's log-probs of some rows, float `[rows, tokens - 1]`."""


def measure_gaps(
    policy: Policy,
    rows: Sequence[TrainingRow],
    *,
    forward: Forward,
    micro_batch_size: int,
    metrics: AlignmentMetrics,
    history: WeightHistory,
) -> None:
    """Measure the gap of the first generations of every prompt with media, each token on the weights that drew it.

    The rollouts of a group share their prompt and its media, so a few of them say as much as all. Tokens that were
    drawn after an update in mid-answer are left out: the engine went on with keys and values of the old weights, so no
    one version has their log-probs. The share that is measured is counted too.
    """
    wanted = [row for row in rows if row.generation < GAP_GENERATIONS and not row.masked and row.media]
    metrics.add_gap_candidates(sum(int(row.sampled[1:].sum()) for row in wanted))
    for version, weights in history.items():
        measured = [row for row in wanted if bool((row.drawn_by[1:] == version).any())]
        for start in range(0, len(measured), micro_batch_size):
            part = measured[start : start + micro_batch_size]
            with applied(policy, weights):
                logprobs = forward(part)
            for row, ours in zip(part, logprobs, strict=True):
                chosen = row.drawn_by[1:] == version
                gap = (ours[: len(chosen)] - row.engine_logprobs[1:])[chosen].abs()
                metrics.add_gap(
                    repaired=row.repaired,
                    video=row.has_video,
                    mean=gap.mean().item(),
                    maximum=gap.max().item(),
                    num_tokens=len(gap),
                )
