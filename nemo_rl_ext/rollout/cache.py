# SPDX-License-Identifier: Apache-2.0
"""Rendered media by (content hash, grid), so that equal repairs are made once."""

from __future__ import annotations

from collections import OrderedDict

import torch

from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem


class RenderCache:
    """A least-recently-used store of rendered items, bounded in bytes; used as `align_turn`'s `render`."""

    def __init__(self, family: MediaFamily, max_bytes: int) -> None:
        self.family, self.max_bytes = family, max_bytes
        self.num_bytes = self.hits = self.misses = 0
        self._entries: OrderedDict[tuple[str, tuple[int, ...], Grid], torch.Tensor] = OrderedDict()

    def __call__(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        """The item on the grid, rendered or remembered; an item without a content hash is always rendered."""
        key = (item.content_hash, item.frame_indices, grid)
        if item.content_hash and (found := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            self.hits += 1
            return found
        self.misses += 1
        rendered = self.family.render(item, grid)
        size = rendered.numel() * rendered.element_size()
        if item.content_hash and size <= self.max_bytes:
            self._entries[key] = rendered
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self.num_bytes -= dropped.numel() * dropped.element_size()
        return rendered
