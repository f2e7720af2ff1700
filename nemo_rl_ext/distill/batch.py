# SPDX-License-Identifier: Apache-2.0
"""Which rows a step trains on, and their padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.distill.data import Row
from nemo_rl_ext.distill.media import row_tensors
from nemo_rl_ext.rollout.packed import join_media


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Right-padded rows. All tensors are ``[batch, length]``.

    ``labels[b, i]`` is the token that position i predicts and ``mask[b, i]`` says whether it is a response
    token: both are shifted before anything is split over ranks, so that no shard needs its neighbour's first
    token.
    """

    ids: Tensor
    valid: Tensor
    labels: Tensor
    mask: Tensor
    media: dict[str, Tensor] = field(default_factory=dict)
    where: tuple[str, ...] = ()


def my_micro_batches(
    rows: Sequence[Row], *, dp_rank: int, dp_size: int, micro_batch_size: int
) -> list[list[Row]]:
    """This data-parallel rank's share of a global batch, in micro-batches."""
    share = -(-len(rows) // dp_size)
    mine = rows[dp_rank * share : (dp_rank + 1) * share]
    return [list(mine[i : i + micro_batch_size]) for i in range(0, len(mine), micro_batch_size)]


def collate(
    rows: Sequence[Row], *, pad_id: int, multiple: int, family: MediaFamily | None, device: torch.device
) -> MicroBatch:
    """Pad to the longest row, rounded up to ``multiple`` (the context-parallel size); make the media."""
    longest = max(len(row.ids) for row in rows)
    length = -(-longest // multiple) * multiple
    ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    valid = np.zeros((len(rows), length), dtype=bool)
    mask = np.zeros((len(rows), length), dtype=bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        valid[i, : len(row.ids)] = True
        mask[i, max(row.response_start - 1, 0) : len(row.ids) - 1] = True
    labels = np.roll(ids, -1, axis=1)
    media = join_media([row_tensors(row, family) for row in rows if row.media]) if family else {}

    def move(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        ids=move(ids),
        valid=move(valid),
        labels=move(labels),
        mask=move(mask),
        media={name: value.to(device) for name, value in media.items()},
        where=tuple(row.where for row in rows),
    )
