# SPDX-License-Identifier: Apache-2.0
"""Which rows each step trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nemo_rl_ext.manifest.rows import ManifestRow


def steps_of(
    rows: Sequence[ManifestRow], *, per_step: int, first: int, last: int, shuffle: bool, seed: int
) -> Iterator[tuple[int, list[ManifestRow]]]:
    """Rows of each step, pass after pass over the manifest, reproducible from any step on."""
    for step in range(first, last):
        places = range(step * per_step, (step + 1) * per_step)
        yield step, [rows[_place(place, len(rows), shuffle, seed)] for place in places]


def _place(place: int, count: int, shuffle: bool, seed: int) -> int:
    epoch, index = divmod(place, count)
    if not shuffle:
        return index
    return int(np.random.default_rng([seed, epoch]).permutation(count)[index])
