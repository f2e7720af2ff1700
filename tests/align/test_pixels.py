# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.pixels import neutral_grids, patchify, resize_and_normalize


@pytest.mark.parametrize("limit", [0, 16, 1024, 13312])
def test_neutral_grids_have_exactly_the_tokens_of_the_run(limit):
    for tokens in [*range(300), 1999, 2010, 2550, 40_800]:
        grids = neutral_grids(tokens, merge_size=2, max_num_patches=limit)
        assert sum(grid.num_tokens(2) for grid in grids) == tokens
        assert all(grid.num_patches <= (limit or 10**9) for grid in grids)
        if not limit:
            assert len(grids) <= 6
            assert all(max(grid) <= 3 * min(grid) or grid.num_patches < 64 for grid in grids)


def test_patches_are_row_major_and_channel_first():
    pixels = torch.arange(3 * 32 * 48, dtype=torch.float32).reshape(1, 3, 32, 48)
    patches = patchify(pixels, 16)
    assert patches.shape == (6, 3 * 256)
    assert torch.equal(patches[4].reshape(3, 16, 16), pixels[0, :, 16:32, 16:32])


def test_an_image_of_the_right_size_keeps_its_values(make_image):
    frames = make_image((64, 96)).pixels()
    out = resize_and_normalize(
        frames, Grid(4, 6), patch_size=16, mean=(0.0,) * 3, std=(1.0,) * 3, dtype=torch.float32
    )
    assert torch.allclose(out[0] * 255, torch.from_numpy(frames[0]).permute(2, 0, 1).float(), atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_channel_planes_get_the_values_of_the_engines_memory_order(threads):
    """The engine resizes with the channels last in memory; the planes that we resize must not differ in one bit."""
    rng = np.random.default_rng(threads)
    mean, std = (0.48, 0.45, 0.4), (0.26, 0.27, 0.28)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            frames = rng.integers(0, 256, (rng.integers(1, 4), *rng.integers(5, 400, 2), 3), dtype=np.uint8)
            grid = Grid(*(int(side) for side in rng.integers(1, 30, 2)))
            theirs = torch.from_numpy(frames).permute(0, 3, 1, 2).to(torch.float32)
            assert theirs.is_contiguous(memory_format=torch.channels_last)
            theirs = torch.nn.functional.interpolate(
                theirs,
                size=(grid.height * 16, grid.width * 16),
                mode="bicubic",
                align_corners=False,
                antialias=True,
            )
            theirs = (theirs / 255.0 - torch.tensor(mean).reshape(1, 3, 1, 1)) / torch.tensor(std).reshape(
                1, 3, 1, 1
            )
            ours = resize_and_normalize(frames, grid, patch_size=16, mean=mean, std=std, dtype=torch.float32)
            assert ours.is_contiguous()
            assert torch.equal(ours, theirs), (frames.shape, grid)
    finally:
        torch.set_num_threads(before)
