# SPDX-License-Identifier: Apache-2.0
"""Tensor moves around the policy's forward: rows packed to the left, log-probs back at their columns."""

from __future__ import annotations

import torch

from nemo_rl_ext.grpo.training.batch import PolicyBatch


def pack_rows(batch: PolicyBatch, pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Real tokens moved to the left, surplus padding cut and the rest made `pad_id`.

    Returns ids `[batch, longest]`, the column that each came from, and lengths `[batch]`.
    """
    mask = batch.attention_mask
    lengths = mask.sum(-1)
    columns = torch.arange(mask.shape[1])
    first = torch.where(mask, columns, mask.shape[1]).amin(-1)
    last = torch.where(mask, columns, -1).amax(-1)
    broken = torch.nonzero((last - first + 1 != lengths) | (lengths == 0)).flatten().tolist()
    if broken:
        raise ValueError(
            f"attention_mask: expected one block of real tokens per row, rows {broken} have holes or none"
        )
    order = (columns[None, : int(lengths.max())] + first[:, None]).clamp(max=mask.shape[1] - 1)
    ids = batch.input_ids.gather(1, order)
    return torch.where(columns[None, : ids.shape[1]] < lengths[:, None], ids, pad_id), order, lengths


def restrict(logits: torch.Tensor, allowed: tuple[tuple[int, ...] | None, ...]) -> torch.Tensor:
    if not allowed:
        return logits
    refused = torch.zeros((len(allowed), logits.shape[-1]), dtype=torch.bool)
    for row, token_ids in enumerate(allowed):
        if token_ids is not None:
            refused[row] = True
            refused[row, list(token_ids)] = False
    return logits.masked_fill(refused[:, None, :], float("-inf"))


def unpack(
    logprobs: torch.Tensor, real: torch.Tensor, columns: torch.Tensor, batch: PolicyBatch
) -> torch.Tensor:
    """Log-probs of packed rows back at the columns of the batch, 0 where nothing was asked."""
    rows, seq = batch.input_ids.shape
    asked = real
    if batch.sampled_mask is not None:
        # Token at column c is predicted at c - 1; a row's first token has no prediction and is not `real`.
        predicted_at = (columns[:, 1:] - 1).clamp(min=0)
        asked = real & batch.sampled_mask.gather(1, predicted_at)
        impossible = torch.nonzero(asked & torch.isinf(logprobs))
        if len(impossible):
            row, position = impossible[0].tolist()
            token = int(batch.input_ids[row, columns[row, position + 1]])
            raise ValueError(
                f"row {row} of the batch: sampled token id {token} at position "
                f"{int(columns[row, position + 1])} is not in the row's allowed_token_ids; the engine cannot "
                "have drawn it"
            )
    # where() before scatter, so that -inf outside the asked positions never meets a gradient.
    values = torch.where(asked, logprobs, torch.zeros_like(logprobs))
    out = torch.zeros((rows, seq), dtype=values.dtype)
    out = out.scatter_add(1, (columns[:, 1:] - 1).clamp(min=0), values)
    return out[:, : seq - 1]
