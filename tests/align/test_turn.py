# SPDX-License-Identifier: Apache-2.0
import pickle

import numpy as np
import pytest
import torch

from nemo_rl_ext.align.families.nemotron import Layout
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.plan import EngineRequest
from nemo_rl_ext.align.turn import align_turn
from nemo_rl_ext.align.verdict import GridSource, MediaAlignmentError, Reason, Verdict

LAYOUTS = [Layout.REMOTE, Layout.NATIVE]


def features(tensors, layout):
    """What the forward would project, counted on the tensors themselves and not on their bookkeeping."""
    if tensors is None:
        return 0
    if layout is Layout.NATIVE:
        assert tensors.values["pixel_values"].shape[0] == int(tensors.values["image_grid_hw"].prod(1).sum())
        return int(tensors.values["image_grid_hw"].prod(1).sum()) // 4
    pixels, sizes = tensors.values["pixel_values"], tensors.values["imgs_sizes"]
    assert pixels.shape[0] == len(sizes) == len(tensors.values["num_frames"])
    assert list(pixels.shape[2:]) == sizes.amax(0).tolist()
    return int((sizes // 16).prod(1).sum()) // 4


def static_of(family, items):
    grids = family.static_grids(items)
    return family.pack(
        items, grids, [family.render(item, grid) for item, grid in zip(items, grids, strict=True)]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matched_turn_keeps_the_static_tensors_themselves(make_family, make_image, prompt, layout):
    family, items = make_family(layout), [make_image((96, 128)), make_image((200, 120), 1)]
    static = static_of(family, items)
    ids = prompt(*(grid.num_tokens() for grid in static.grids))
    aligned = align_turn(ids, items, family=family, static=static)
    assert aligned.tensors is static
    assert not aligned.changed
    assert [item.verdict for item in aligned.report.media] == [Verdict.MATCHED] * 2
    assert aligned.report.token_delta == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_over_budget_turn_is_repaired_to_the_engines_grids(make_family, make_image, prompt, layout):
    family = make_family(layout)
    items = [make_image((480, 640)), make_image((1024, 300), 1), make_image((1024, 300), 2)]
    static = static_of(family, items)
    aligned = align_turn(prompt(165, 144, 144), items, family=family, static=static, row_id="r7")
    assert aligned.changed
    assert aligned.report.repaired
    assert not aligned.report.neutral
    assert aligned.tensors.grids == (Grid(22, 30), Grid(48, 12), Grid(48, 12))
    assert features(aligned.tensors, layout) == 453
    assert aligned.report.token_delta == 716 - 453
    assert [item.grid_source for item in aligned.report.media] == [GridSource.UNIQUE] * 3
    assert aligned.report.reasons() == (Reason.RESIZED,) * 3


def test_repaired_pixels_are_the_image_on_the_new_grid(make_family, make_image, prompt):
    family, item = make_family(Layout.REMOTE), make_image((480, 640))
    aligned = align_turn(prompt(165), [item], family=family, static=static_of(family, [item]))
    expected = family.render(item, Grid(22, 30))
    assert torch.equal(aligned.tensors.values["pixel_values"][0], expected)
    assert aligned.tensors.values["imgs_sizes"].dtype == torch.int32


def test_smaller_images_are_padded_to_the_largest_with_zeros(make_family, make_image, prompt):
    family, items = make_family(Layout.REMOTE), [make_image((96, 128)), make_image((200, 120), 1)]
    aligned = align_turn(prompt(*(g.num_tokens() for g in family.static_grids(items))), items, family=family)
    pixels, sizes = aligned.tensors.values["pixel_values"], aligned.tensors.values["imgs_sizes"]
    for image, (height, width) in zip(pixels, sizes.tolist(), strict=True):
        assert not image[:, height:].any()
        assert not image[:, :, width:].any()
        assert image[:, :height, :width].any()


NEAR_SQUARE, TIED = (500, 516), 196


def tied_grids(family, item):
    grids = next(g for n in range(300) if len(g := family.feasible_grids(item, n)) > 1)
    return grids, grids[0].num_tokens()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_ambiguous_run_is_masked_and_never_guessed(make_family, make_image, prompt, layout):
    family, item = make_family(layout), make_image((300, 310))
    _, tokens = tied_grids(family, item)
    aligned = align_turn(prompt(tokens), [item], family=family, static=static_of(family, [item]))
    assert aligned.report.neutral
    assert aligned.report.reasons() == (Reason.AMBIGUOUS_GRID,)
    assert features(aligned.tensors, layout) == tokens
    assert not aligned.tensors.values["pixel_values"].any()


def test_a_captured_grid_settles_a_tie(make_family, make_image, prompt):
    family, item = make_family(), make_image((300, 310))
    grids, tokens = tied_grids(family, item)
    for grid in grids:
        aligned = align_turn(prompt(tokens), [item], family=family, captured=[grid])
        assert aligned.tensors.grids == (grid,)
        assert aligned.report.media[0].grid_source is GridSource.CAPTURED


def test_a_tie_is_settled_only_where_every_budget_that_gives_the_runs_names_one_grid(
    make_family, make_image, prompt
):
    family = make_family()
    settled = open_ = 0
    for max_model_len in range(40, 400):
        sizes = ((300, 310), (96, 128))
        items = [make_image(size, seed) for seed, size in enumerate(sizes)]
        grids = family.joint_grids(sizes, max_model_len)
        lengths = [grid.num_tokens() for grid in grids]
        if len(family.feasible_grids(items[0], lengths[0])) < 2:
            continue
        request = EngineRequest(max_model_len=max_model_len, sizes=sizes)
        aligned = align_turn(prompt(*lengths), items, family=family, request=request)
        possible = {
            joint[0]
            for budget in range(1, max_model_len + 1)
            if (joint := family.tiler.joint_grids(sizes, budget))
            and [grid.num_tokens() for grid in joint] == lengths
        }
        if len(possible) > 1:
            assert aligned.report.reasons()[0] is Reason.AMBIGUOUS_GRID
            open_ += 1
            continue
        assert aligned.report.media[0].grid_source is GridSource.REPLAYED
        assert aligned.tensors.grids == grids
        wrong = EngineRequest(max_model_len=sum(lengths) - 8, sizes=sizes)
        assert align_turn(prompt(*lengths), items, family=family, request=wrong).report.neutral
        settled += 1
    assert settled > 0
    assert open_ > 0


def test_a_capture_of_another_request_is_refused(make_family, make_image, prompt):
    item = make_image((480, 640))
    aligned = align_turn(prompt(165), [item], family=make_family(), captured=[Grid(24, 34)])
    assert aligned.report.reasons() == (Reason.CAPTURE_DISAGREES,)
    assert aligned.report.neutral


FAULTS = {
    "one run too few": (lambda p, g: p(165), Reason.RUN_COUNT),
    "one run too many": (lambda p, g: p(165, 144, 144), Reason.RUN_COUNT),
    "no run at all": (lambda p, g: [20, 21], Reason.RUN_COUNT),
    "a phantom": (lambda p, g: [*p(165, 144), g.context_id], Reason.BARE_CONTEXT),
    "a cut tail": (lambda p, g: p(165, 144)[:-6], Reason.TRUNCATED_RUN),
    "a cut head": (lambda p, g: p(165, 144)[5:], Reason.TRUNCATED_RUN),
    "an impossible length": (lambda p, g: p(165, 1000), Reason.INFEASIBLE_LENGTH),
    "an empty run": (lambda p, g: p(165, 0), Reason.EMPTY_RUN),
    "swapped runs": (lambda p, g: p(27, 165), Reason.ORDER_SUSPECT),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_proven_is_neutral_counted_and_named(
    name, layout, make_family, make_image, prompt, grammar
):
    damage, reason = FAULTS[name]
    family = make_family(layout)
    second = (1024, 300) if name != "swapped runs" else (1600, 60)
    items = [make_image((480, 640), name="a.jpg"), make_image(second, 1, name="b.jpg")]
    ids = damage(prompt, grammar)
    aligned = align_turn(ids, items, family=family, static=static_of(family, items), row_id="row-3", turn=1)
    assert aligned.report.neutral
    assert aligned.changed
    assert reason in aligned.report.reasons()
    assert features(aligned.tensors, layout) == ids.count(grammar.context_id)
    text = str(aligned.report)
    for part in ("row-3", "turn 1", "a.jpg", "b.jpg", "480", "640", reason.value, reason.advice):
        assert part in text


def test_a_broken_file_is_a_named_neutral_turn(make_family, prompt):
    def broken():
        raise ValueError("half.png: the file ends after 512 of 9000 bytes")

    item = MediaItem(size=(480, 640), source="half.png", load=broken)
    aligned = align_turn(prompt(165), [item], family=make_family(), row_id="r1")
    assert aligned.report.neutral
    assert aligned.report.reasons() == (Reason.DECODE_FAILED,)
    assert "512 of 9000" in str(aligned.report)
    assert features(aligned.tensors, Layout.REMOTE) == 165


def test_a_turn_without_media_and_runs_has_no_tensors(make_family):
    aligned = align_turn([1, 2, 3], [], family=make_family())
    assert aligned.tensors is None
    assert not aligned.changed
    assert not aligned.report.neutral


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_context_token_in_a_text_turn_gets_a_feature_and_is_named(make_family, grammar, layout):
    aligned = align_turn([1, grammar.context_id, 2], [], family=make_family(layout), row_id="r2")
    assert aligned.report.neutral
    assert aligned.report.reasons() == (Reason.BARE_CONTEXT,)
    assert features(aligned.tensors, layout) == 1


def test_static_tensors_of_other_media_never_match(make_family, make_image, prompt):
    family = make_family()
    items = [make_image((480, 640)), make_image((96, 128), 1)]
    ids = prompt(*(g.num_tokens() for g in family.static_grids(items)))
    aligned = align_turn(ids, items, family=family, static=static_of(family, items[:1]))
    assert aligned.changed
    assert features(aligned.tensors, Layout.REMOTE) == ids.count(family.grammar.context_id)


def test_reports_and_errors_survive_a_process_hop(make_family, make_image, prompt):
    report = align_turn(prompt(1000), [make_image((480, 640))], family=make_family(), row_id="r").report
    assert pickle.loads(pickle.dumps(report)) == report
    error = pickle.loads(pickle.dumps(MediaAlignmentError(str(report))))
    assert str(error) == str(report)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_ids_get_exactly_one_feature_per_context_token(make_family, make_image, grammar, layout):
    """Fuzzed ids and media: whatever comes in, the count check holds and the report accounts for every item."""
    rng = np.random.default_rng(11)
    family = make_family(layout)
    outcomes = set()
    for case in range(400):
        items = [
            make_image((int(rng.integers(1, 300)), int(rng.integers(1, 300))), case * 3 + i)
            for i in range(rng.integers(0, 4))
        ]
        lengths = [int(g.num_tokens() * rng.choice([1.0, 1.0, 0.7])) for g in family.static_grids(items)]
        ids = [1]
        for length in lengths:
            ids += [6, *[5] * length, 7, 9]
        if rng.random() < 0.5 and len(ids) > 4:
            begin, end = sorted(rng.integers(0, len(ids), 2))
            pieces = [ids[:begin], ids[begin:end], ids[end:]]
            ids = [token for index in rng.permutation(3)[: rng.integers(2, 4)] for token in pieces[index]]
        aligned = align_turn(np.array(ids), items, family=family)
        assert features(aligned.tensors, layout) == ids.count(5)
        assert len(aligned.report.media) == len(items)
        assert aligned.report.neutral == (
            not all(i.verdict.value in ("matched", "repaired") for i in aligned.report.media)
            or aligned.report.reason is not None
        )
        outcomes.update(aligned.report.reasons())
    assert {Reason.RESIZED, Reason.RUN_COUNT, Reason.TRUNCATED_RUN, Reason.INFEASIBLE_LENGTH} <= outcomes
