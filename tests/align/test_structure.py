# SPDX-License-Identifier: Apache-2.0
"""Damage by its own name: four things that all used to be a bare token or a truncated run, and tiny and thin images."""

import numpy as np
import pytest

from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import align_turn, verify_turn
from nemo_rl_ext.align.verdict import Reason


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_ids_as_they_were_sent_are_unexpanded(make_family, make_image, grammar, wrapped, count):
    one = [grammar.start_id, grammar.context_id, grammar.end_id] if wrapped else [grammar.context_id]
    items = [make_image((480, 640), seed) for seed in range(count)]
    for between in ([22], []):
        report = verify_turn([20, *(one + between) * count], items, family=make_family())
        assert report.reason is Reason.UNEXPANDED_IDS, between


def test_a_real_run_of_one_token_is_not_unexpanded(make_family, make_image, prompt):
    report = verify_turn(prompt(1), [make_image((32, 32))], family=make_family(minimum=1))
    assert not report.neutral


def test_a_run_inside_a_run_is_doubly_expanded(make_family, make_image, grammar):
    context = [grammar.context_id]
    ids = [20, *[grammar.start_id] * 2, *context * 252, grammar.end_id, *context * 251, grammar.end_id, 20]
    report = verify_turn(ids, [make_image((480, 640))], family=make_family())
    assert report.reason is Reason.DOUBLY_EXPANDED


def test_a_token_is_literal_in_text_and_sampled_in_an_answer(make_family, make_image, prompt, grammar):
    ids, family = [20, grammar.context_id, 20], make_family()
    assert align_turn(ids, (), family=family).report.reason is Reason.BARE_CONTEXT
    assert align_turn(ids, (), family=family, sampled=True).report.reason is Reason.SAMPLED_CONTEXT
    assert not align_turn([20, 21], (), family=family, sampled=True).report.neutral
    with_image = verify_turn([*prompt(252), grammar.context_id], [make_image((480, 640))], family=family)
    assert with_image.reason is Reason.BARE_CONTEXT


def test_the_four_have_four_advices():
    four = (Reason.BARE_CONTEXT, Reason.SAMPLED_CONTEXT, Reason.UNEXPANDED_IDS, Reason.DOUBLY_EXPANDED)
    assert len({reason.advice for reason in four}) == 4


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 9), (3, 9), (3, 3), (9, 1), (20_000, 2), (2, 20_000), (16, 4000)]
)
@pytest.mark.parametrize(("minimum", "maximum"), [(16, 1024), (1024, 13312), (4, 64)])
def test_no_grid_has_a_zero_side_and_tiny_images_are_themselves(make_family, prompt, size, minimum, maximum):
    pixels = np.random.default_rng(0).integers(0, 256, (1, *size, 3), dtype=np.uint8)
    family = make_family(minimum=minimum, maximum=maximum)
    item = MediaItem(size=size, source="thin.png", load=lambda: pixels)
    for limit in (16, 512, 16384):
        (grid,) = family.static_grids([item])
        assert min(grid) >= 2
        joint = family.joint_grids([size] * 3, limit)
        assert joint is None or all(min(one) >= 2 for one in joint)
    aligned = align_turn(prompt(grid.num_tokens()), [item], family=family)
    if not aligned.report.neutral:
        assert aligned.tensors.values["pixel_values"].shape[2:] == (grid.height * 16, grid.width * 16)


@pytest.mark.engine
def test_slivers_are_accepted_on_every_grid_that_the_engine_reaches(make_family, prompt):
    """A sliver's grid can be larger than its budget, so a crowded request gives it budgets above the limit."""
    processors = pytest.importorskip("vllm.transformers_utils.processors.nano_nemotron_vl")
    from PIL import Image

    class SizeOnly(Image.Image):
        def __init__(self, size):
            super().__init__()
            self._size = (size[1], size[0])

    rng, compared = np.random.default_rng(1), 0
    for minimum, maximum in ((16, 1024), (1024, 13312), (4, 64), (256, 3072)):
        family = make_family(minimum=minimum, maximum=maximum)
        engine = processors.DynamicResolutionImageTiler(
            max_model_len=512, patch_size=16, min_num_patches=minimum, max_num_patches=maximum,
            downsample_ratio=0.5, norm_mean=[0.5] * 3, norm_std=[0.5] * 3,
        )  # fmt: skip
        for _ in range(300):
            sizes = [
                (int(rng.integers(16, 41)), int(rng.integers(1000, 4001))) for _ in range(rng.integers(1, 4))
            ]
            sizes = [size if rng.random() < 0.5 else size[::-1] for size in sizes]
            try:
                params = engine.compute_params(
                    [SizeOnly(size) for size in sizes], int(rng.integers(16, 4000))
                )
            except (ZeroDivisionError, AttributeError, ValueError):
                continue
            for size, chosen in zip(sizes, params, strict=True):
                width, height = chosen.patch_size
                if height and width:
                    grids = family.tiler.feasible_grids(size, chosen.num_embeddings)
                    assert (height, width) in grids, (size, chosen.patch_size, grids)
                    compared += 1
    assert compared > 1000
