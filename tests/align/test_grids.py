# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from nemo_rl_ext.align.grids import DynamicTiler, Grid

RELEASED = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=1024, max_num_patches=13312)
TINY = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=16, max_num_patches=1024)


def random_sizes(rng, count):
    """Sizes of all shapes, a tenth of them with aspect ratios up to several thousand."""
    sides = np.exp(rng.uniform(np.log(1), np.log(4000), (count, 2))).astype(int)
    thin = rng.random(count) < 0.1
    sides[thin, 0] = rng.integers(1, 12, thin.sum())
    sides[thin, 1] = rng.integers(2000, 60_000, thin.sum())
    flip = rng.random(count) < 0.5
    sides[flip] = sides[flip][:, ::-1]
    return [(int(height), int(width)) for height, width in sides]


def test_sixteen_frames_of_the_crash_row():
    size = (1080, 2400)
    assert RELEASED.static_grid(size) == Grid(68, 150)
    assert RELEASED.static_grid(size).num_tokens() * 16 == 40800
    joint = RELEASED.joint_grids([size] * 16, 32768 - 4)
    assert joint == (Grid(60, 134),) * 16
    assert sum(grid.num_tokens() for grid in joint) == 32160
    assert RELEASED.feasible_grids(size, 2010) == (Grid(60, 134),)


def test_three_images_share_a_context_of_512():
    sizes = [(480, 640), (1024, 300), (1024, 300)]
    assert [grid.num_tokens() for grid in TINY.joint_grids(sizes, 508)] == [165, 144, 144]
    assert [TINY.static_grid(size).num_tokens() for size in sizes] == [252, 232, 232]


@pytest.mark.parametrize("tiler", [RELEASED, TINY, DynamicTiler(14, 2, 4, 0), DynamicTiler(16, 4, 64, 2000)])
def test_feasible_grids_equal_an_exhaustive_scan(tiler):
    rng = np.random.default_rng(3)
    for size in [*random_sizes(rng, 12), (512, 512), (480, 640), (1, 1)]:
        limit = tiler.max_budget(size)
        scan: dict[int, set[Grid]] = {}
        for budget in range(tiler.min_num_patches, limit + 1):
            grid = tiler.grid(size, budget)
            scan.setdefault(grid.num_tokens(tiler.merge_size), set()).add(grid)
        scan.pop(0, None)
        for tokens, grids in scan.items():
            assert tiler.feasible_grids(size, tokens) == tuple(sorted(grids)), (size, tokens)
        missing = set(range(1, max(scan) + 2)) - set(scan)
        assert all(tiler.feasible_grids(size, tokens) == () for tokens in list(missing)[:50])


def test_no_budget_above_the_largest_changes_anything():
    tiler = DynamicTiler(16, 2, 16, 0)
    rng = np.random.default_rng(4)
    for size in random_sizes(rng, 200):
        top = tiler.max_budget(size)
        assert tiler.grid(size, top) == tiler.grid(size, top * 3) == tiler.grid(size, 10**9)


def test_token_counts_are_not_monotone_in_the_budget():
    counts = [RELEASED.grid((1080, 2400), budget).num_tokens() for budget in range(1024, 13312)]
    assert any(after < before for before, after in zip(counts, counts[1:], strict=False))


def test_extreme_aspect_ratios_have_a_grid():
    for size in [(1, 100_000), (100_000, 1), (8, 20_000)]:
        grid = RELEASED.static_grid(size)
        assert grid.num_tokens() >= 1
        assert RELEASED.feasible_grids(size, grid.num_tokens())


def test_near_square_images_can_be_ambiguous():
    ambiguous = [
        (size, tokens)
        for size in [(500, 516), (516, 500), (300, 310), (400, 410)]
        for tokens in range(1, 257)
        if len(TINY.feasible_grids(size, tokens)) > 1
    ]
    assert ambiguous
    for size, tokens in ambiguous:
        first, second = TINY.feasible_grids(size, tokens)[:2]
        assert (first.height, first.width) == (second.width, second.height)


@pytest.mark.parametrize("tokens", [0, -1, 10**9])
def test_impossible_token_counts_have_no_grid(tokens):
    assert TINY.feasible_grids((480, 640), tokens) == ()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="at least one pixel"):
        TINY.grid((0, 10), 100)
    with pytest.raises(ValueError, match="merge_size must be at least 1"):
        DynamicTiler(16, 0, 16, 1024)


@pytest.mark.engine
def test_equals_vllm_and_transformers():
    """One grid per (size, budget) from all three, and one set of grids per request from the joint budget."""
    image_processing = pytest.importorskip(
        "transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni"
    )
    processors = pytest.importorskip("vllm.transformers_utils.processors.nano_nemotron_vl")
    from PIL import Image

    class SizeOnly(Image.Image):
        """An image that is only asked for its size; nothing is allocated."""

        def __init__(self, size):
            super().__init__()
            self._size = (size[1], size[0])

    rng = np.random.default_rng(5)
    compared = extreme = 0
    for tiler in (RELEASED, TINY):
        engine = processors.DynamicResolutionImageTiler(
            max_model_len=16384,
            patch_size=16,
            min_num_patches=tiler.min_num_patches,
            max_num_patches=tiler.max_num_patches,
            downsample_ratio=0.5,
            norm_mean=[0.5] * 3,
            norm_std=[0.5] * 3,
        )
        for size in random_sizes(rng, 12_000):
            budget = int(rng.integers(tiler.min_num_patches, tiler.max_num_patches + 1))
            try:
                params, _ = engine.process_media(SizeOnly(size), budget)
            except ZeroDivisionError:
                extreme += 1
                assert tiler.grid(size, budget).num_tokens() >= 1
                continue
            theirs = image_processing.get_patch_grid_size(*size, 16, 2, tiler.min_num_patches, budget)
            assert tiler.grid(size, budget) == (params.patch_size[1], params.patch_size[0]) == theirs
            compared += 1
        for _ in range(300):
            sizes = [size for size in random_sizes(rng, int(rng.integers(1, 9))) if min(size) > 32]
            tokens = int(rng.integers(16, 20_000))
            params = engine.compute_params([SizeOnly(size) for size in sizes], tokens)
            assert tiler.joint_grids(sizes, tokens) == tuple(
                (p.patch_size[1], p.patch_size[0]) for p in params
            )
    assert compared >= 20_000
    assert extreme > 0
