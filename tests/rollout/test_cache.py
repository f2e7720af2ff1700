# SPDX-License-Identifier: Apache-2.0
import torch

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.rollout.cache import RenderCache


class OnesFamily:
    """Renders 4 bytes per patch and counts how often it is asked."""

    def __init__(self):
        self.calls = 0

    def render(self, item, grid):
        self.calls += 1
        return torch.ones(grid.num_patches)


def item(name):
    return MediaItem(size=(32, 32), source=name, content_hash=name)


def test_equal_content_on_an_equal_grid_is_rendered_once():
    family = OnesFamily()
    cache = RenderCache(family, 1000)
    assert cache(item("a"), Grid(2, 2)) is cache(item("a"), Grid(2, 2))
    cache(item("a"), Grid(2, 4))
    cache(item("b"), Grid(2, 2))
    assert (family.calls, cache.hits, cache.misses) == (3, 1, 3)


def test_the_cache_stays_within_its_bytes_and_forgets_the_oldest():
    family = OnesFamily()
    cache = RenderCache(family, 40)
    for name in "abc":
        cache(item(name), Grid(2, 2))
    assert cache.num_bytes <= 40
    cache(item("c"), Grid(2, 2))
    assert family.calls == 3
    cache(item("a"), Grid(2, 2))
    assert family.calls == 4


def test_zero_bytes_keep_nothing():
    family = OnesFamily()
    cache = RenderCache(family, 0)
    cache(item("a"), Grid(2, 2))
    cache(item("a"), Grid(2, 2))
    assert family.calls == 2
