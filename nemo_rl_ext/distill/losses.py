# SPDX-License-Identifier: Apache-2.0
"""Distillation losses as sums over response tokens, never as means.

Every function returns a *sum* over the tokens it was given. The caller divides once, by the number of
response tokens in the whole step (all micro-batches, all ranks), so that no split of the batch can change the
result. A mean per micro-batch or per rank would weigh a token by how few neighbours it has.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_rl_ext.distill.config import LossConfig


@dataclass(kw_only=True)
class TokenSums:
    """Sums over response tokens; ``loss`` carries the gradient, the parts are for the metrics."""

    loss: Tensor
    kd: Tensor
    ce: Tensor
    hidden: Tensor
    tokens: Tensor

    def as_vector(self) -> Tensor:
        """``[5]`` float64, in field order: the one tensor that the ranks add up."""
        return torch.stack([getattr(self, f.name).detach().double() for f in fields(self)])


def kl_per_token(
    student: Tensor,
    teacher: Tensor,
    *,
    direction: Literal["forward", "reverse"] = "forward",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_k_tail: Literal["bucket", "renormalize"] = "bucket",
) -> Tensor:
    """KL divergence of each token, times ``temperature**2``.

    Both inputs are logits ``[tokens, vocab]``; the result is float32 ``[tokens]``. With ``top_k`` and the
    tail as one bucket the result is a lower bound of the full divergence that grows with k and meets it at k
    = vocab.
    """
    student_logp = F.log_softmax(student.float() / temperature, dim=-1)
    teacher_logp = F.log_softmax(teacher.float() / temperature, dim=-1)
    if top_k is not None and top_k < teacher.shape[-1]:
        kept = teacher.topk(top_k, dim=-1).indices
        student_logp = _restrict(student_logp, kept, top_k_tail)
        teacher_logp = _restrict(teacher_logp, kept, top_k_tail)
    of, other = (teacher_logp, student_logp) if direction == "forward" else (student_logp, teacher_logp)
    return (of.exp() * (of - other)).sum(-1) * temperature**2


def _restrict(logp: Tensor, kept: Tensor, tail: str) -> Tensor:
    """Log-probabilities of the ``kept`` ids ``[tokens, k]``; with a tail bucket ``[tokens, k + 1]``."""
    inside = logp.gather(-1, kept)
    if tail == "renormalize":
        return inside.log_softmax(-1)
    # The rest is summed from its own terms: 1 - sum(top k) loses every digit once the top k holds nearly all.
    rest = logp.scatter(-1, kept, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([inside, rest], dim=-1)


def distill_sums(
    *,
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    config: LossConfig,
    student_hidden: Tensor | None = None,
    teacher_hidden: Tensor | None = None,
) -> TokenSums:
    """Sum the objective over the tokens where ``mask`` is true.

    Logits are ``[batch, positions, vocab]``, ``labels`` and ``mask`` ``[batch, positions]`` with ``labels[b,
    i]`` the token that position i predicts; hidden states ``[batch, positions, hidden]`` are needed only for
    a hidden-state term. Labels where the mask is false are never read. With no token selected every sum is an
    exact zero that is still connected to the student, so that its backward pass runs as on any other rank.
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student logits have shape {tuple(student_logits.shape)}, the teacher's "
            f"{tuple(teacher_logits.shape)}; "
            "cut both to the shared vocabulary first"
        )
    selected = mask.nonzero(as_tuple=True)
    student, teacher, wanted = student_logits[selected], teacher_logits[selected], labels[selected]
    kd = ce = hidden = student_logits.new_zeros((), dtype=torch.float32)
    for start in range(0, wanted.shape[0], config.chunk_tokens):
        part = slice(start, start + config.chunk_tokens)
        arguments = (student[part], teacher[part], wanted[part], config)
        if torch.is_grad_enabled() and student.requires_grad:
            kd_part, ce_part = checkpoint(_chunk_sums, *arguments, use_reentrant=False)
        else:
            kd_part, ce_part = _chunk_sums(*arguments)
        kd, ce = kd + kd_part, ce + ce_part
    if config.hidden_weight > 0:
        if student_hidden is None or teacher_hidden is None:
            raise ValueError("hidden_weight is above 0 but no hidden states were given")
        if student_hidden.shape != teacher_hidden.shape:
            raise ValueError(
                f"the hidden-state term needs equal shapes: student {tuple(student_hidden.shape)}, "
                f"teacher {tuple(teacher_hidden.shape)}"
            )
        gap = student_hidden[selected].float() - teacher_hidden[selected].float()
        hidden = gap.square().mean(-1).sum() + student_hidden.sum() * 0.0
    total = config.kd_weight * kd + config.ce_weight * ce + config.hidden_weight * hidden
    # Adding an exact zero keeps the graph alive on a rank without response tokens: its backward pass must
    # make the same collective calls as its neighbours'.
    total = total + student_logits[..., :1].sum() * 0.0
    return TokenSums(loss=total, kd=kd, ce=ce, hidden=hidden, tokens=mask.sum())


def _chunk_sums(
    student: Tensor, teacher: Tensor, wanted: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    kd = student.new_zeros((), dtype=torch.float32)
    if config.kd_weight > 0:
        kd = kl_per_token(
            student,
            teacher,
            direction=config.direction,
            temperature=config.temperature,
            top_k=config.top_k,
            top_k_tail=config.top_k_tail,
        ).sum()
    # Also measured at weight 0: it is what a reader of the metrics knows how to read.
    reading_only = config.ce_weight == 0
    ce = F.cross_entropy((student.detach() if reading_only else student).float(), wanted, reduction="sum")
    return kd, ce
