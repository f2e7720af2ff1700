# SPDX-License-Identifier: Apache-2.0
"""Loss masks that keep count: a row with too few loss tokens is zeroed in place, never dropped.

A rank that drops a row runs one micro-batch, and so one set of collectives, fewer than its peers. Zeroing the
mask costs one forward and keeps every rank in step. Works on padded `[rows, tokens]`, packed and ragged masks,
and on sequence-sharded ones, where only the sum over the shards tells how many loss tokens a row has.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("nemo_rl_ext.guards.masks")


class LossMaskShareError(ValueError):
    """The threshold removes so many rows that it is a configuration error."""


@dataclass(frozen=True, kw_only=True)
class MaskOutcome:
    """What happened to one batch. Row numbers count within the batch."""

    num_rows: int
    zeroed: tuple[int, ...]
    """Rows that had loss tokens, but fewer than the threshold."""
    empty: tuple[int, ...]
    """Rows that had none to begin with."""
    tokens_removed: int

    @property
    def kept(self) -> tuple[int, ...]:
        """Rows that still carry loss."""
        gone = {*self.zeroed, *self.empty}
        return tuple(i for i in range(self.num_rows) if i not in gone)


class LossMaskGuard:
    """Zero sub-threshold loss masks in place, with a warning, counters and a limit.

        guard = LossMaskGuard(min_tokens=32)
        guard.padded(batch["loss_mask"], row_ids=batch["idx"])

    A loss token is a non-zero entry, so bool, integer and weighted float masks all work. Masks keep their device,
    dtype and storage. Empty rows are counted but no fault of the threshold.

    The limit looks at all rows so far, from `limit_after_rows` on. It raises on the rank whose rows passed it:
    run under `guards.failfast`, so that the other ranks do not wait for it.
    """

    def __init__(
        self, *, min_tokens: int, max_removed_fraction: float = 0.2, limit_after_rows: int = 64
    ) -> None:
        if min_tokens < 1:
            raise ValueError(f"loss mask guard: min_tokens must be at least 1, got {min_tokens}")
        if not 0 <= max_removed_fraction <= 1:
            raise ValueError(
                f"loss mask guard: max_removed_fraction must lie in [0, 1], got {max_removed_fraction}"
            )
        self.min_tokens = min_tokens
        self.max_removed_fraction = max_removed_fraction
        self.limit_after_rows = limit_after_rows
        self._counts = dict.fromkeys(("rows", "rows_zeroed", "rows_empty", "tokens_removed"), 0)

    def padded(
        self, mask: torch.Tensor, *, group: Any = None, row_ids: Sequence[Any] | None = None
    ) -> MaskOutcome:
        """A `[rows, tokens]` mask. With `group`, `tokens` is this rank's shard of every row and the group holds
        all shards (context-parallel, Ulysses): every rank of it takes the same decision."""
        self._check(mask, 2, "[rows, tokens]")
        return self._zero([mask], [(mask != 0).sum(1)], [None], group, row_ids)

    def packed(
        self,
        mask: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int],
        *,
        group: Any = None,
        row_ids: Sequence[Any] | None = None,
    ) -> MaskOutcome:
        """A packed `[tokens]` or `[1, tokens]` mask; `cu_seqlens` [rows + 1] are this rank's own boundaries.
        Tokens after the last boundary are padding and stay untouched."""
        import torch

        flat = mask[0] if mask.dim() == 2 and mask.shape[0] == 1 else mask
        self._check(flat, 1, "[tokens] or [1, tokens]")
        bounds = torch.as_tensor(cu_seqlens, device=flat.device).long()
        if (
            len(bounds) < 2
            or int(bounds[0]) != 0
            or bool((bounds.diff() < 0).any())
            or int(bounds[-1]) > len(flat)
        ):
            raise ValueError(
                f"loss mask guard: cu_seqlens must rise from 0 to at most {len(flat)} tokens, got {bounds.tolist()}"
            )
        owners = torch.repeat_interleave(torch.arange(len(bounds) - 1, device=flat.device), bounds.diff())
        return self.owned(flat, owners, len(bounds) - 1, group=group, row_ids=row_ids)

    def owned(
        self,
        mask: torch.Tensor,
        owners: torch.Tensor,
        num_rows: int,
        *,
        group: Any = None,
        row_ids: Sequence[Any] | None = None,
    ) -> MaskOutcome:
        """A flat `[tokens]` mask whose token t belongs to row `owners[t]`; for shards cut out of a packed row in
        any order (zigzag context parallelism). `owners` may be shorter than the mask: the rest is padding."""
        import torch

        self._check(mask, 1, "[tokens]")
        rows = mask[: len(owners)]
        counts = torch.zeros(num_rows, dtype=torch.long, device=mask.device)
        counts.scatter_add_(0, owners, (rows != 0).long())
        return self._zero([rows], [counts], [owners], group, row_ids)

    def ragged(
        self, masks: Sequence[torch.Tensor], *, group: Any = None, row_ids: Sequence[Any] | None = None
    ) -> MaskOutcome:
        """One mask tensor per row, each on its own device (dynamic batching before collation)."""
        for mask in masks:
            self._check(mask, 1, "[tokens]")
        rows = [m[None] for m in masks]
        return self._zero(rows, [(m != 0).sum(1) for m in rows], [None] * len(rows), group, row_ids)

    def metrics(self) -> dict[str, float]:
        """Counts so far as `guards/loss_mask_*`."""
        return {f"guards/loss_mask_{name}": float(count) for name, count in self._counts.items()}

    @staticmethod
    def _check(mask: torch.Tensor, num_dims: int, expected: str) -> None:
        if mask.dim() != num_dims:
            raise ValueError(f"loss mask guard: expected a mask of {expected}, got shape {list(mask.shape)}")

    def _zero(
        self,
        masks: Sequence[torch.Tensor],
        counts: Sequence[torch.Tensor],
        owners: Sequence[torch.Tensor | None],
        group: Any,
        row_ids: Sequence[Any] | None,
    ) -> MaskOutcome:
        import torch

        if group is not None and counts:
            home = counts[0].device
            joined = torch.cat([c.to(home) for c in counts])
            torch.distributed.all_reduce(joined, group=group)
            counts = [
                c.to(o.device) for c, o in zip(joined.split([len(c) for c in counts]), counts, strict=True)
            ]
        for mask, count, owner in zip(masks, counts, owners, strict=True):
            short = count < self.min_tokens
            gone = short[:, None] if owner is None else short[owner]
            mask.masked_fill_(gone, 0)
        totals = torch.cat([c.cpu() for c in counts]).tolist() if counts else []
        return self._account(
            totals, row_ids, quiet=group is not None and torch.distributed.get_rank(group) > 0
        )

    def _account(self, totals: list[int], row_ids: Sequence[Any] | None, *, quiet: bool) -> MaskOutcome:
        zeroed = tuple(i for i, n in enumerate(totals) if 0 < n < self.min_tokens)
        outcome = MaskOutcome(
            num_rows=len(totals),
            zeroed=zeroed,
            empty=tuple(i for i, n in enumerate(totals) if n == 0),
            tokens_removed=sum(totals[i] for i in zeroed),
        )
        counts = self._counts
        counts["rows"] += outcome.num_rows
        counts["rows_zeroed"] += len(zeroed)
        counts["rows_empty"] += len(outcome.empty)
        counts["tokens_removed"] += outcome.tokens_removed
        if zeroed and not quiet:
            named = ", ".join(f"{row_ids[i] if row_ids is not None else i}: {totals[i]}" for i in zeroed[:8])
            more = ", ..." if len(zeroed) > 8 else ""
            logger.warning(
                "%d of %d rows have fewer than %d loss tokens (row: tokens %s%s); kept with a zero loss mask",
                len(zeroed), len(totals), self.min_tokens, named, more,
            )  # fmt: skip
        share = counts["rows_zeroed"] / max(counts["rows"], 1)
        if counts["rows"] >= self.limit_after_rows and share > self.max_removed_fraction:
            raise LossMaskShareError(
                f"loss mask guard: min_tokens={self.min_tokens} removed the loss of {counts['rows_zeroed']} of "
                f"{counts['rows']} rows ({share:.0%}), more than max_removed_fraction="
                f"{self.max_removed_fraction:.0%}; expected a threshold that only catches stragglers. Lower "
                "min_tokens, or check how the masks are made"
            )
        return outcome
