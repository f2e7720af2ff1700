# SPDX-License-Identifier: Apache-2.0
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
