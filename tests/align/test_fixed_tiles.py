# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest
import torch

from nemo_rl_ext.align.families.fixed_tile import FixedTileFamily
from nemo_rl_ext.align.fixed_tiles import FixedTiler, uses_fixed_tiles
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.turn import align_turn
from nemo_rl_ext.align.verdict import MediaAlignmentError, Reason

TILER = FixedTiler(tile_size=512, patch_size=16, merge_size=2, max_num_tiles=12, use_thumbnail=True)
SMALL = FixedTiler(tile_size=64, patch_size=16, merge_size=2, max_num_tiles=12, use_thumbnail=True)


@pytest.fixture
def family(grammar):
    return FixedTileFamily(grammar=grammar, tiler=SMALL, mean=(0.5,) * 3, std=(0.5,) * 3)


def static_of(family, items):
    grids = family.static_grids(items)
    return family.pack(
        items, grids, [family.render(item, grid) for item, grid in zip(items, grids, strict=True)]
    )


def test_the_predicate_is_the_absence_of_patch_limits():
    assert uses_fixed_tiles({"force_image_size": 512, "vision_config": {"args": {}}})
    assert not uses_fixed_tiles({"force_image_size": 512, "vision_config": {"args": {"min_num_patches": 16}}})


def test_tiles_of_a_wide_image_with_its_thumbnail():
    grid = TILER.grid((512, 1536))
    assert grid == Grid(32, 96)
    assert TILER.num_tiles(grid) == 4
    assert TILER.num_tokens(grid) == 1024
    assert TILER.num_tiles(TILER.grid((512, 512), 1)) == 1


def test_a_run_length_gives_back_its_tiles():
    rng = np.random.default_rng(0)
    for _ in range(500):
        size = tuple(rng.integers(50, 3000, 2).tolist())
        limit = int(rng.integers(1, 13))
        grid = TILER.grid(size, limit)
        assert grid in TILER.feasible_grids(size, TILER.num_tokens(grid))
        assert TILER.feasible_grids(size, TILER.num_tokens(grid) + 1) == ()


def test_a_rows_own_limit_is_honoured(family, make_image, prompt):
    item = dataclasses.replace(make_image((128, 400)), max_num_tiles=3)
    static = static_of(family, [item])
    assert static.values["num_patches"].tolist() == [4]
    aligned = align_turn(prompt(4 * 4), [item], family=family, static=static)
    assert aligned.tensors is static
    unlimited = static_of(family, [make_image((128, 400))])
    assert unlimited.values["num_patches"].item() > 4
    repaired = align_turn(prompt(4 * 4), [make_image((128, 400))], family=family, static=unlimited)
    assert repaired.report.reasons() == (Reason.RESIZED,)
    assert torch.equal(repaired.tensors.values["pixel_values"], static.values["pixel_values"])


def test_an_infeasible_run_of_whole_tiles_is_neutral_and_any_other_is_refused(family, make_image, prompt):
    aligned = align_turn(prompt(4 * 7), [make_image((64, 64))], family=family)
    assert aligned.report.neutral
    assert aligned.tensors.values["pixel_values"].shape[0] == 7
    with pytest.raises(MediaAlignmentError, match="whole number of tiles"):
        align_turn(prompt(9), [make_image((64, 64))], family=family)


@pytest.mark.engine
@pytest.mark.parametrize("thumbnail", [True, False])
def test_tiles_and_pixels_equal_vllms(grammar, make_image, thumbnail):
    processors = pytest.importorskip("vllm.transformers_utils.processors.nano_nemotron_vl")
    internvl = pytest.importorskip("vllm.transformers_utils.processors.internvl")
    from PIL import Image

    tiler = dataclasses.replace(TILER, use_thumbnail=thumbnail)
    rng = np.random.default_rng(1)
    for _ in range(3000):
        size = tuple(rng.integers(8, 4000, 2).tolist())
        limit = int(rng.integers(1, 13))
        tiles, width, height = internvl.calculate_internvl_targets(
            orig_width=size[1],
            orig_height=size[0],
            target_ratios=internvl.get_internvl_target_ratios(1, limit),
            image_size=512,
            use_thumbnail=thumbnail,
        )
        grid = tiler.grid(size, limit)
        assert (grid.height * 16, grid.width * 16, tiler.num_tiles(grid)) == (height, width, tiles)
    family = FixedTileFamily(
        grammar=grammar, tiler=tiler, mean=(0.48, 0.46, 0.41), std=(0.27, 0.26, 0.28), dtype=torch.bfloat16
    )
    for size in ((300, 900), (512, 512), (700, 200)):
        item = make_image(size)
        theirs = processors.dynamic_preprocess(
            Image.fromarray(item.pixels()[0]),
            image_size=512,
            max_num_tiles=12,
            use_thumbnail=thumbnail,
            norm_mean=torch.tensor(family.mean).reshape(1, 3, 1, 1),
            norm_std=torch.tensor(family.std).reshape(1, 3, 1, 1),
            dtype=torch.bfloat16,
        )
        assert torch.equal(family.render(item, tiler.grid(size)), theirs)
