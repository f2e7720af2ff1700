# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is split across ranks: queries stay local, keys and values are gathered.

torch's own ``context_parallel`` dispatches only to CUDA attention kernels (torch 2.13:
``torch/distributed/tensor/experimental/_context_parallel/_attention.py``), so this module registers one more
attention function with transformers instead. It works on any backend, costs one all-gather of K and V per
layer, and gives every causal decoder whose only mixing across positions is attention. State-space and
convolution layers mix positions without attention and cannot be split this way: `models.sharding_error` finds
that out by comparing with the whole forward before training starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from nemo_rl_ext.distill.parallel import Ranks

ATTENTION = "nemo_rl_ext_cp_all_gather"


@dataclass(frozen=True, kw_only=True)
class _Split:
    ranks: Ranks
    valid: Tensor
    """``[batch, whole sequence]`` bool: true where a token is not padding."""


_active: list[_Split] = []


@contextmanager
def split_sequence(ranks: Ranks, valid: Tensor) -> Iterator[None]:
    """Within it, causal attention layers treat their input as this rank's shard of a longer sequence.

    It must span the backward pass too: gradient checkpointing runs the layers again there.
    """
    _active.append(_Split(ranks=ranks, valid=valid))
    try:
        yield
    finally:
        _active.pop()


class _GatherSequence(torch.autograd.Function):
    """``[..., shard, dim]`` -> ``[..., sequence, dim]``; gradients are summed over ranks, then cut again."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        shard = shard.contiguous()
        parts = [torch.empty_like(shard) for _ in range(ranks.cp_size)]
        dist.all_gather(parts, shard, group=ranks.cp_group)
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Reduce-scatter written as all-reduce + slice: gloo has no reduce-scatter for every version in use.
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.ranks.cp_group)
        return ctx.ranks.shard(grad, dim=-2), None


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if not _active or not causal:  # whole sequences, or a vision tower
        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return whole
    split = _active[-1]
    # One collective for both, so that every rank's backward pass meets them in one order.
    both: Tensor = _GatherSequence.apply(torch.stack([key, value]), split.ranks)  # type: ignore[no-untyped-call]
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(both[0], groups), repeat_kv(both[1], groups)
    length = query.shape[2]
    positions = torch.arange(key.shape[2], device=query.device)
    mine = positions[split.ranks.cp_rank * length :][:length]
    allowed = positions[None, :] <= mine[:, None]
    if sliding_window is not None:
        allowed &= positions[None, :] > mine[:, None] - sliding_window
    allowed = allowed[None, None] & split.valid[:, None, None, :]
    # A padded query sees no valid key in an empty row; its own position keeps the softmax finite.
    allowed = allowed | (positions[None, :] == mine[:, None])[None, None]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, dropout_p=dropout, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the attention function known to transformers; safe to call again."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
