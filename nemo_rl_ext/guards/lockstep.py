# SPDX-License-Identifier: Apache-2.0
"""Modality lockstep: every data-parallel rank runs the same towers in the same micro-batch.

A rank whose micro-batch has no image skips the vision tower, and with it the tower's collectives; its peers wait
for it there. The planner tells which micro-batches lack what, orders rows so that fewer do, and names the dummy
media that close the rest. `zero_weighted` ties the dummies into the graph without changing a value or a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Modalities = frozenset[str]


@dataclass(frozen=True, kw_only=True)
class LockstepPlan:
    """What every rank does in every micro-batch. All ranks compute the same plan from the same input."""

    order: tuple[tuple[int, ...], ...]
    """[ranks][rows]: position of each row in the rank's own input. A permutation: no row is lost or moved to
    another rank."""
    dummies: tuple[tuple[Modalities, ...], ...]
    """[ranks][micro-batches]: modalities for which the rank attaches dummy media."""
    towers: tuple[Modalities, ...]
    """[micro-batches]: modalities whose towers run, on every rank."""
    num_lacking_before: int
    """Dummies that the given order would have needed."""

    @property
    def num_dummies(self) -> int:
        """Dummy media items over all ranks and micro-batches."""
        return sum(len(kinds) for rank in self.dummies for kinds in rank)

    @property
    def reordered(self) -> bool:
        """Whether any rank runs its rows in another order than given."""
        return any(list(rows) != sorted(rows) for rows in self.order)

    def inverse(self, rank: int) -> tuple[int, ...]:
        """For per-row results in planned order: where the rank's row i went."""
        places = [0] * len(self.order[rank])
        for place, row in enumerate(self.order[rank]):
            places[row] = place
        return tuple(places)

    def metrics(self) -> dict[str, float]:
        """`guards/lockstep_*` counts."""
        return {
            "guards/lockstep_dummies": float(self.num_dummies),
            "guards/lockstep_lacking_before": float(self.num_lacking_before),
            "guards/lockstep_reordered": float(self.reordered),
        }


def plan_lockstep(
    rows: Sequence[Sequence[Collection[str]]], *, micro_batch_size: int, reorder: bool = True
) -> LockstepPlan:
    """Plan a batch: `rows[rank][row]` is the set of modalities that the row carries (empty for text).

    With `reorder`, rows move within their rank when that needs fewer dummies. Gradients accumulated over the
    micro-batches do not depend on the order.

    Raises:
        ValueError: when ranks have different numbers of rows, and so of micro-batches: no order can fix that.
    """
    if micro_batch_size < 1:
        raise ValueError(f"lockstep: micro_batch_size must be at least 1, got {micro_batch_size}")
    counts = [len(rank) for rank in rows]
    if len(set(counts)) > 1:
        raise ValueError(
            f"lockstep: expected the same number of rows on every rank, got {counts}; a rank with fewer is a "
            "collective behind. Keep rows and zero their loss (guards.masks) instead of dropping them"
        )
    kinds = [[frozenset(row) for row in rank] for rank in rows]
    given = [list(range(len(rank))) for rank in rows]
    towers, lacking = _lacking(kinds, given, micro_batch_size)
    before = sum(len(missing) for rank in lacking for missing in rank)
    order = given
    if reorder and before:
        candidate = _ordered(kinds, micro_batch_size)
        new_towers, new_lacking = _lacking(kinds, candidate, micro_batch_size)
        if sum(len(missing) for rank in new_lacking for missing in rank) < before:
            order, towers, lacking = candidate, new_towers, new_lacking
    return LockstepPlan(
        order=tuple(map(tuple, order)),
        dummies=tuple(map(tuple, lacking)),
        towers=tuple(towers),
        num_lacking_before=before,
    )


def _lacking(
    kinds: list[list[Modalities]], order: list[list[int]], size: int
) -> tuple[list[Modalities], list[list[Modalities]]]:
    """(towers per micro-batch, missing modalities per rank and micro-batch)."""
    present = [
        [
            frozenset().union(*(kinds[rank][i] for i in rows[at : at + size]))
            for at in range(0, len(rows), size)
        ]
        for rank, rows in enumerate(order)
    ]
    towers = [frozenset().union(*step) for step in zip(*present, strict=True)]
    return towers, [[need - has for need, has in zip(towers, rank, strict=True)] for rank in present]


def _ordered(kinds: list[list[Modalities]], size: int) -> list[list[int]]:
    """Give each modality the first so many micro-batches, the same number on every rank, and fill them.

    A row then has a deadline: the last micro-batch in which all of its modalities run.
    """
    num_steps = -(-len(kinds[0]) // size)
    names = sorted(frozenset().union(*(row for rank in kinds for row in rank)))
    limits = {n: max(-(-sum(n in row for row in rank) // size) for rank in kinds) for n in names}
    while not all(_fits(rank, limits, size) for rank in kinds):
        # Rows that carry several modalities compete for the earliest steps: give the tightest one more.
        tightest = min((n for n in names if limits[n] < num_steps), key=limits.__getitem__)
        limits[tightest] += 1
    return [_fill(rank, limits, size, num_steps) for rank in kinds]


def _deadline(row: Modalities, limits: dict[str, int], num_steps: int) -> int:
    return min((limits[name] for name in row), default=num_steps + 1)


def _fits(rank: list[Modalities], limits: dict[str, int], size: int) -> bool:
    num_steps = -(-len(rank) // size)
    deadlines = [_deadline(row, limits, num_steps) for row in rank]
    return all(sum(d <= t for d in deadlines) <= t * size for t in range(num_steps + 1))


def _fill(rank: list[Modalities], limits: dict[str, int], size: int, num_steps: int) -> list[int]:
    left = list(range(len(rank)))
    deadlines = [_deadline(row, limits, num_steps) for row in rank]
    order: list[int] = []
    for step in range(num_steps):
        slots = min(size, len(left))
        chosen: list[int] = []
        for name in sorted(limits, key=limits.__getitem__):
            with_it = [i for i in left if name in rank[i]]
            missing = step < limits[name] and not any(name in rank[i] for i in chosen)
            if missing and with_it and len(chosen) < slots:
                row = min(with_it, key=lambda i: (len(rank[i]), deadlines[i], i))
                chosen.append(row)
                left.remove(row)
        while len(chosen) < slots:
            # Text first, so that media rows last for every step; unless media rows would come too late.
            urgent = any(
                sum(deadlines[i] <= t for i in left) > (t - step - 1) * size
                for t in range(step + 1, num_steps + 1)
            )
            by_urgency = (lambda i: (deadlines[i], i)) if urgent else (lambda i: (-deadlines[i], i))
            row = min(left, key=by_urgency)
            chosen.append(row)
            left.remove(row)
        order.extend(chosen)
    return order


def zero_weighted(output: torch.Tensor, *dummy_features: torch.Tensor) -> torch.Tensor:
    """`output`, with the towers that made `dummy_features` in its graph and no influence on any value.

    The dummies' parameters get gradients of exactly zero, so that backward hooks and reduce-scatters of a sharded
    tower run as on the other ranks. The features have to be finite, as 0 * inf is not 0: feed `dummy_pixels`.
    """
    for features in dummy_features:
        output = output + (features * 0.0).sum().to(output.dtype)
    return output


def dummy_pixels(
    *, patch_size: int, merge_size: int, like: torch.Tensor | None = None, num_frames: int = 1
) -> torch.Tensor:
    """The smallest media item: zeros `[num_frames, 3, height, width]` of one merged token per frame.

    `like` gives dtype and device; float32 on the CPU otherwise. A video tubelet needs `temporal_patch_size`
    frames.
    """
    import torch

    side = patch_size * merge_size
    shape = (num_frames, 3, side, side)
    return torch.zeros(shape) if like is None else like.new_zeros(shape)
