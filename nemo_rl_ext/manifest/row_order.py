# SPDX-License-Identifier: Apache-2.0
"""Which rows each step trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

Row = TypeVar("Row")


class RowOrder:
    """An endless stream of row indices: one seeded permutation per epoch, one after the other; or the rows' own order.

    It is a function of the position alone, so a resumed run continues with the very next row, and neither ranks nor
    accumulation change which rows a step has. A permutation is made once per epoch.
    """

    def __init__(self, num_rows: int, seed: int, *, shuffle: bool = True) -> None:
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self.num_rows)
        if not self.shuffle:
            return index
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)
            self._epoch = epoch
        return int(self._order[index])


def steps_of(
    rows: Sequence[Row], *, per_step: int, first: int, last: int, shuffle: bool, seed: int
) -> Iterator[tuple[int, list[Row]]]:
    """Rows of each step, pass after pass over the manifest, reproducible from any step on."""
    order = RowOrder(len(rows), seed, shuffle=shuffle)
    for step in range(first, last):
        yield step, [rows[order[place]] for place in range(step * per_step, (step + 1) * per_step)]
