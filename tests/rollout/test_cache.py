# SPDX-License-Identifier: Apache-2.0
import torch

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.rollout.cache import RecentlyUsed, RenderCache


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


def test_a_value_that_is_replaced_gives_its_room_back_and_one_that_never_fits_is_not_kept():
    store = RecentlyUsed(10)
    store.put("a", "first", 6)
    store.put("a", "second", 4)
    store.put("b", "other", 6)
    assert (store.get("a"), store.get("b"), store.size) == ("second", "other", 10)
    store.put("b", "too large", 11)
    assert (store.get("b"), store.size) == (None, 4)


def test_what_was_read_last_is_forgotten_last():
    store = RecentlyUsed(2)
    store.put("a", 1)
    store.put("b", 2)
    assert store.get("a") == 1
    store.put("c", 3)
    assert (store.get("a"), store.get("b"), store.get("c")) == (1, None, 3)
