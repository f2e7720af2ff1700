# SPDX-License-Identifier: Apache-2.0
import pytest
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


def test_the_cache_stays_within_its_bytes():
    family = OnesFamily()
    cache = RenderCache(family, 40)
    for name in "abc":
        cache(item(name), Grid(2, 2))
    assert cache.num_bytes <= 40
    cache(item("c"), Grid(2, 2))
    assert family.calls == 3
    cache(item("a"), Grid(2, 2))
    cache(item("b"), Grid(2, 2))
    assert family.calls > 3, "one of them was forgotten"


def test_zero_bytes_keep_nothing():
    family = OnesFamily()
    cache = RenderCache(family, 0)
    cache(item("a"), Grid(2, 2))
    cache(item("a"), Grid(2, 2))
    assert family.calls == 2


def test_a_value_that_is_replaced_gives_its_room_back_and_one_that_never_fits_is_not_kept():
    cache = RenderCache(OnesFamily(), 40)
    cache.keep("a", torch.ones(6))
    cache.keep("a", torch.ones(4))
    cache.keep("b", torch.ones(6))
    assert (cache.kept("a").numel(), cache.kept("b").numel(), cache.num_bytes) == (4, 6, 40)
    cache.keep("c", torch.ones(11))
    assert cache.kept("c") is None and cache.num_bytes == 40


@pytest.mark.parametrize("num_images", [8, 10, 11, 12, 16])
def test_images_that_are_one_too_many_do_not_empty_the_cache(num_images):
    """16 rollouts of a prompt group, one after the other, with room for ten of their images."""
    family = OnesFamily()
    cache = RenderCache(family, 160)
    for _ in range(16):
        for index in range(num_images):
            cache(item(str(index)), Grid(2, 2))
    assert cache.num_bytes <= 160
    assert cache.hits == 15 * num_images if num_images <= 10 else cache.hits > 0.3 * 16 * num_images
