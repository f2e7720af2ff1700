# SPDX-License-Identifier: Apache-2.0
"""Rendered media by (content hash, grid), so that equal repairs are made once."""

from __future__ import annotations

import random
from collections.abc import Hashable

import torch
from cachetools import RRCache

from nemo_rl_ext.align.families.family import MediaFamily, MediaTensors
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem


class RenderCache:
    """Rendered items, bounded in bytes; used as `align_turn`'s `render`.

    What has to go is drawn by lot. The rollouts of a prompt group bring the same images in the same order, round
    after round: forgetting the least recently used would find none of them as soon as they are one too many (16
    rounds of 11 images where 10 fit: 0 of 176 found, by lot about 127; of 10 images 150 against about 131).

    `keep` and `kept` hold others' tensors within the same bound, under keys of their own.
    """

    def __init__(self, family: MediaFamily, max_bytes: int) -> None:
        self.family = family
        self.max_bytes = max_bytes
        self.hits = self.misses = 0
        self._entries: RRCache[Hashable, torch.Tensor | MediaTensors] = RRCache(
            max_bytes, choice=random.Random(0).choice, getsizeof=_num_bytes
        )

    @property
    def num_bytes(self) -> int:
        return int(self._entries.currsize)

    def kept(self, key: Hashable) -> torch.Tensor | MediaTensors | None:
        """What was kept under the key, or None."""
        return self._entries.get(key)

    def keep(self, key: Hashable, value: torch.Tensor | MediaTensors) -> None:
        """Keep a value in place of an earlier one; what is larger than the whole cache is not kept."""
        if _num_bytes(value) <= self._entries.maxsize:
            self._entries[key] = value

    def __call__(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        """The item on the grid, rendered or remembered; an item without a content hash is always rendered."""
        key = (item.content_hash, item.frame_indices, grid)
        if item.content_hash and isinstance(found := self.kept(key), torch.Tensor):
            self.hits += 1
            return found
        self.misses += 1
        rendered = self.family.render(item, grid)
        if item.content_hash:
            self.keep(key, rendered)
        return rendered


def _num_bytes(value: torch.Tensor | MediaTensors) -> int:
    return value.num_bytes if isinstance(value, MediaTensors) else value.nbytes
