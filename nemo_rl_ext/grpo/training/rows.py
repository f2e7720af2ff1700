# SPDX-License-Identifier: Apache-2.0
"""The rows of a step: each training sequence of each rollout, with its media and its advantage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup
from nemo_rl_ext.grpo.training.batch import PolicyRow, TokenSet
from nemo_rl_ext.rollout.provenance import media_of
from nemo_rl_ext.rollout.segments import Segment


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingRow(PolicyRow):
    """One training sequence: ids, which of them were sampled and with what log-prob, and what the loss makes of them.

    `engine_logprobs` is float32 `[tokens]`, 0 where nothing was sampled. A masked row runs through the forward with
    weight 0. `generation` is its rollout's number in the prompt group, `rollout` its number in the step: a conversation
    that was split has several rows of one rollout. `drawn_by` is int64 `[tokens]`, the version of the weights whose
    log-prob a sampled token has; -1 where nothing was sampled or an update came in before it.
    """

    token_ids: torch.Tensor
    sampled: torch.Tensor
    engine_logprobs: torch.Tensor
    drawn_by: torch.Tensor
    advantage: float = 0.0
    masked: bool = False
    repaired: bool = False
    has_video: bool = False
    generation: int = 0
    rollout: int = 0
    where: str = ""


def training_rows(
    groups: Sequence[PromptGroup],
    *,
    normalize: bool,
    leave_one_out: bool = True,
    allowed_token_ids: TokenSet | None = None,
) -> list[TrainingRow]:
    """The rows of prompt groups, in order, each with its rollout's advantage (`PromptGroup.advantages`)."""
    rows: list[TrainingRow] = []
    numbers = itertools.count()
    for group in groups:
        advantages = group.advantages(normalize=normalize, leave_one_out=leave_one_out).tolist()
        for generation, (rollout, advantage) in enumerate(zip(group.rollouts, advantages, strict=True)):
            rollout_number = next(numbers)
            rows += [
                row_of(
                    segment,
                    allowed_token_ids=allowed_token_ids,
                    advantage=advantage,
                    masked=rollout.masked,
                    repaired=number in rollout.repaired_segments,
                    has_video=rollout.has_video,
                    generation=generation,
                    rollout=rollout_number,
                    where=group.row.where,
                )
                for number, segment in enumerate(rollout.segments)
            ]
    return rows


def row_of(segment: Segment, **about: Any) -> TrainingRow:
    """A segment's message log as one row; `about` are further fields of the row."""
    log = segment.message_log
    logprobs = [
        message.get("generation_logprobs", torch.zeros(len(message["token_ids"]), dtype=torch.float32))
        for message in log
    ]
    return TrainingRow(
        token_ids=torch.cat([message["token_ids"] for message in log]),
        sampled=torch.cat(
            [torch.full_like(m["token_ids"], m["role"] == "assistant", dtype=torch.bool) for m in log]
        ),
        engine_logprobs=torch.cat(logprobs),
        media=tuple(
            {key: value.as_tensor() for key, value in media.items()} for m in log if (media := media_of(m))
        ),
        drawn_by=torch.cat([_drawn_by(message) for message in log]),
        **about,
    )


def _drawn_by(message: dict[str, Any]) -> torch.Tensor:
    """The version that drew each token of a message up to the first update in it."""
    versions = torch.full((len(message["token_ids"]),), -1, dtype=torch.int64)
    for version, start, end in message.get("weight_versions", ())[:1]:
        versions[start:end] = version
    return versions
