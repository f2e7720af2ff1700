# SPDX-License-Identifier: Apache-2.0
"""Advised numbers against the engine's arithmetic: with them no grid differs, one more and one does."""

import dataclasses
import random

import pytest
from PIL import Image

from nemo_rl_ext.align.families.registry import default_family
from nemo_rl_ext.align.grids import RESERVED_TOKENS, DynamicTiler
from nemo_rl_ext.manifest.advice import RowImages, advise
from nemo_rl_ext.manifest.check import CheckConfig, check_manifest
from nemo_rl_ext.manifest.forecast import EngineModel
from nemo_rl_ext.manifest.shared_context import limit_for_any, needed_patches

RELEASED = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=1024, max_num_patches=13312)
TINY = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=16, max_num_patches=1024)


def row(*sizes, text=0, kind="images"):
    return RowImages(kind=kind, sizes=sizes, text_tokens=text)


def is_static(tiler, sizes, text, max_model_len, rng):
    """In every part of the request, with some of the text deducted or none: `joint_grids` is held against vLLM."""
    static = {size: tiler.static_grid(size) for size in sizes}
    parts = [list(sizes), *([size for size in sizes if rng.random() < 0.5] for _ in range(3))]
    return all(
        tiler.joint_grids(part, max_model_len - RESERVED_TOKENS - deducted)
        == tuple(static[size] for size in part)
        for part in parts
        for deducted in {0, text // 2, text}
    )


def random_sizes(rng, count):
    sizes = [(int(2 ** rng.uniform(5, 11.5)), int(2 ** rng.uniform(5, 11.5))) for _ in range(count)]
    return tuple(
        size if rng.random() < 0.7 else (size[0], size[0] + rng.choice((0, 1, -1))) for size in sizes
    )


@pytest.mark.parametrize("tiler", [RELEASED, TINY], ids=["released", "tiny"])
@pytest.mark.parametrize("max_model_len", [512, 2048, 8192, 16_384])
def test_no_grid_differs_with_the_advised_numbers(tiler, max_model_len):
    rng = random.Random(max_model_len)
    num_advised = num_any = 0
    for _ in range(60):
        rows = [row(*random_sizes(rng, rng.randrange(1, 9)), text=rng.randrange(201)) for _ in range(3)]
        hopeless = [r for r in rows if advise([r], tiler, max_model_len).num_hopeless]
        rows = [r for r in rows if r not in hopeless]
        advice = advise([*rows, *hopeless], tiler, max_model_len)
        assert advice.num_hopeless == len(hopeless)
        for limit in (advice.limit, advice.any_limit):
            if limit is None:
                continue
            pinned = dataclasses.replace(tiler, max_num_patches=limit)
            assert all(is_static(pinned, r.sizes, r.text_tokens, max_model_len, rng) for r in rows), limit
        num_advised += advice.limit is not None
        num_any += advice.any_limit is not None
        assert all(
            is_static(tiler, r.sizes, r.text_tokens, advice.max_model_len, rng) for r in (*rows, *hopeless)
        )
        resized = [not is_static(tiler, r.sizes, r.text_tokens, max_model_len, rng) for r in rows]
        assert sum(resized) + len(hopeless) <= advice.num_resized, "a row is re-sized that was not announced"
    assert num_advised or max_model_len < 8192
    assert num_any or max_model_len < 8192


@pytest.mark.parametrize("tiler", [RELEASED, TINY], ids=["released", "tiny"])
def test_the_numbers_are_the_best_there_are(tiler):
    rng = random.Random(5)
    for _ in range(20):
        sizes, text = random_sizes(rng, rng.randrange(2, 6)), rng.randrange(50)
        needed = needed_patches(sizes, tiler)
        context = advise([row(*sizes, text=text)], tiler, 999_999).max_model_len
        assert 4 * (context - RESERVED_TOKENS - text) >= needed > 4 * (context - 1 - RESERVED_TOKENS - text)
        static = tuple(map(tiler.static_grid, sizes))
        below = [tiler.joint_grids(sizes, tokens) != static for tokens in range(needed // 4 - 8, needed // 4)]
        each = [
            tiler.grid(size, budget) != tiler.static_grid(size)
            for size in sizes
            for budget in range(max(needed - 8, tiler.min_num_patches), needed)
        ]
        assert any(below) or any(each), "a smaller context would have done"
        advice = advise([row(*sizes, text=text)], tiler, context - 40)
        if advice.limit and advice.limit < tiler.max_num_patches:
            more = dataclasses.replace(tiler, max_num_patches=advice.limit + 1)
            assert needed_patches(sizes, more) > 4 * (context - 40 - RESERVED_TOKENS - text)


def test_any_images_whatever_their_sizes_keep_their_grids():
    """Slivers and near-squares around the minimum, where rounding passes a limit that is only a little above it."""
    rng = random.Random(1)
    for tiler in (RELEASED, TINY, dataclasses.replace(RELEASED, max_num_patches=0)):
        for _ in range(40):
            count, text = rng.randrange(1, 17), rng.randrange(100)
            context = (
                RESERVED_TOKENS
                + text
                + count * rng.randrange(tiler.min_num_patches // 4, tiler.min_num_patches)
            )
            limit = limit_for_any(count, text, tiler, context)
            if limit is None:
                continue
            pinned = dataclasses.replace(tiler, max_num_patches=limit)
            for _ in range(4):
                side, aspect = rng.randrange(16, 900), min(2 ** rng.uniform(0, 9), limit / 8)
                sizes = [(side, max(1, int(side * aspect)))] * count
                assert is_static(pinned, sizes, text, context, rng), (pinned, sizes, context)
    assert limit_for_any(8, 0, RELEASED, 16_384) == 4 * (16_384 - 4) // 8
    assert limit_for_any(17, 0, RELEASED, 4096) is None


def test_resolution_and_kinds():
    advice = advise(
        [
            row((1080, 2400), kind="one image"),
            row(*[(1080, 2400)] * 8, kind="several images"),
            row(kind="text"),
        ],
        RELEASED,
        16_384,
    )
    assert (advice.num_rows, advice.num_resized, advice.max_images) == (2, 1, 8)
    assert advice.any_limit == 8190
    assert advice.limit == 8431, "a grid of 8,184 patches, which the limits up to here leave"
    assert advice.resolution["several images"].num_images == 8
    assert advice.resolution["one image"].worst == pytest.approx((8160 / 10_200) ** 0.5)


def test_a_check_advises(write_manifest, make_row, tmp_path):
    Image.new("RGB", (2400, 1080)).save(tmp_path / "large.png")
    images = ["large.png"] * 3
    rows = [make_row(*images, "?"), make_row("a.png", "?"), make_row("text")]
    engine = EngineModel(family=default_family(min_num_patches=16, max_num_patches=1024), max_model_len=512)
    report = check_manifest(write_manifest(rows), CheckConfig(engine=engine))
    advice = report.advice
    assert advice is not None and (advice.num_rows, advice.num_resized, advice.max_images) == (2, 1, 3)
    assert set(advice.resolution) == {"one image", "several images"}
    pinned = default_family(min_num_patches=16, max_num_patches=advice.limit)
    report = check_manifest(
        write_manifest(rows), CheckConfig(engine=dataclasses.replace(engine, family=pinned))
    )
    assert report.advice.num_resized == 0 and report.summary()["share_rows_resized"] == 0
    longer = dataclasses.replace(engine, max_model_len=advice.max_model_len)
    assert check_manifest(write_manifest(rows), CheckConfig(engine=longer)).advice.num_resized == 0
    assert check_manifest(write_manifest([make_row("text")])).advice is None


def test_rows_that_no_limit_helps_get_no_limit():
    advice = advise([row(*[(900, 900)] * 16)], RELEASED, 2048)
    assert (advice.num_hopeless, advice.limit, advice.any_limit) == (1, None, None)
    assert advice.resolution == {} and advice.max_model_len > 4096
