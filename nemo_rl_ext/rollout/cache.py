# SPDX-License-Identifier: Apache-2.0
"""Rendered media by (content hash, grid), so that equal repairs are made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import torch

from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem

Value = TypeVar("Value")


class RecentlyUsed(Generic[Value]):
    """A store that forgets what was used least recently once its entries' sizes exceed `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.size = capacity, 0
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()

    def get(self, key: Hashable) -> Value | None:
        """What was kept under the key, or None."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, value: Value, size: int = 1) -> None:
        """Keep a value in place of an earlier one; what is larger than the whole store is not kept."""
        self.size -= self._entries.pop(key, (None, 0))[1]
        if size > self.capacity:
            return
        self._entries[key] = value, size
        self.size += size
        while self.size > self.capacity:
            _, (_, dropped) = self._entries.popitem(last=False)
            self.size -= dropped


class RenderCache:
    """Rendered items, bounded in bytes; used as `align_turn`'s `render`.

    `store` is where they are kept; others may keep tensors of theirs in it, under keys of their own, within the same
    bound.
    """

    def __init__(self, family: MediaFamily, max_bytes: int) -> None:
        self.family = family
        self.hits = self.misses = 0
        self.store: RecentlyUsed[Any] = RecentlyUsed(max_bytes)

    @property
    def num_bytes(self) -> int:
        return self.store.size

    def __call__(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        """The item on the grid, rendered or remembered; an item without a content hash is always rendered."""
        key = (item.content_hash, item.frame_indices, grid)
        found: torch.Tensor | None = self.store.get(key) if item.content_hash else None
        if found is not None:
            self.hits += 1
            return found
        self.misses += 1
        rendered = self.family.render(item, grid)
        if item.content_hash:
            self.store.put(key, rendered, rendered.numel() * rendered.element_size())
        return rendered
