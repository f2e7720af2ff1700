# SPDX-License-Identifier: Apache-2.0
"""What the engine said of each medium, against its ids and against what the trainer holds."""

import dataclasses

import numpy as np
import pytest
import torch

from nemo_rl_ext.align.evidence import EngineRequest, Evidence
from nemo_rl_ext.align.grids import DynamicTiler, Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import align_turn, verify_turn
from nemo_rl_ext.align.verdict import GridSource, Reason, Verdict

ONE, OTHER, THIRD = "11" * 32, "22" * 32, "33" * 32


def said(item, grid, **more):
    return Evidence(grid=grid, served=item.digest, **more)


@pytest.fixture
def pair(make_image):
    """Two images of different shape, known by their content."""
    return [
        dataclasses.replace(make_image((480, 640), 1, "a.png"), digest=ONE),
        dataclasses.replace(make_image((1024, 300), 2, "b.png"), digest=OTHER),
    ]


def reasons(report):
    return [item.reason for item in report.media]


def test_a_receipt_proves_grid_and_content(make_family, pair, prompt):
    grids = [Grid(22, 30), Grid(48, 12)]
    evidence = [said(item, grid) for item, grid in zip(pair, grids, strict=True)]
    report = verify_turn(prompt(165, 144), pair, family=make_family(), evidence=evidence)
    assert not report.neutral
    assert [item.grid for item in report.media] == grids
    assert [item.grid_source for item in report.media] == [GridSource.RECEIPT] * 2
    assert all(item.content_proven for item in report.media)


def test_a_receipt_settles_a_tie_and_without_it_the_turn_is_neutral(make_family, make_image, prompt):
    item = dataclasses.replace(make_image((500, 512)), digest=ONE)
    for grid in (Grid(28, 30), Grid(30, 28)):
        report = verify_turn(prompt(210), [item], family=make_family(), evidence=[said(item, grid)])
        assert report.media[0].grid == grid
    assert verify_turn(prompt(210), [item], family=make_family()).reasons() == (Reason.AMBIGUOUS_GRID,)


def test_a_captured_grid_must_be_one_that_the_image_can_have(make_family, make_image, prompt):
    """272 tokens and a grid of 272 tokens, for an image that no budget gives it to."""
    report = verify_turn(prompt(272), [make_image((600, 610))], family=make_family(), captured=[Grid(16, 68)])
    assert report.reasons() == (Reason.CAPTURE_DISAGREES,)
    assert "has 272 tokens, too, but no budget gives it to height 600 x width 610" in str(report)


def test_a_file_that_changed_under_its_name_is_neutral(make_family, pair, prompt):
    evidence = [Evidence(grid=Grid(22, 30), served=THIRD), said(pair[1], Grid(48, 12))]
    report = verify_turn(prompt(165, 144), pair, family=make_family(), evidence=evidence)
    assert report.neutral
    assert reasons(report)[0] is Reason.CONTENT_CHANGED
    assert "a.png" in str(report)


def test_media_of_equal_size_in_another_order_are_seen(make_family, make_image, prompt):
    items = [dataclasses.replace(make_image((480, 640), i), digest=d) for i, d in enumerate((ONE, OTHER))]
    evidence = [said(items[1], Grid(22, 30)), said(items[0], Grid(22, 30))]
    report = verify_turn(prompt(165, 165), items, family=make_family(), evidence=evidence)
    assert reasons(report) == [Reason.ORDER_SUSPECT] * 2
    assert "the engine had image-1.png here, and this one at place 1" in str(report)


def test_a_medium_that_was_replaced_by_a_repetition_is_gone(make_family, pair, prompt):
    evidence = [said(pair[0], Grid(22, 30)), said(pair[0], Grid(48, 12))]
    report = verify_turn(prompt(165, 144), pair, family=make_family(), evidence=evidence)
    assert reasons(report) == [Reason.RESIZED, Reason.MEDIA_GONE]


@pytest.mark.parametrize(
    ("count", "reason", "text"),
    [
        (1, Reason.MEDIA_GONE, "b.png is not among them"),
        (3, Reason.MEDIA_ADDED, "the request's medium 2 is new"),
    ],
)
def test_media_that_an_agent_dropped_or_added_are_named(make_family, pair, prompt, count, reason, text):
    evidence = [said(pair[0], None), said(pair[1], None), Evidence(served=THIRD)][:count]
    report = verify_turn(prompt(*[165, 144, 144][:count]), pair, family=make_family(), evidence=evidence)
    assert report.reason is reason
    assert text in report.detail


def test_an_identity_that_a_client_gave_proves_nothing(make_family, make_image, prompt):
    item = dataclasses.replace(make_image((500, 512)), digest=ONE)
    evidence = [Evidence(grid=Grid(28, 30), served=ONE, named=True)]
    report = verify_turn(prompt(210), [item], family=make_family(), evidence=evidence)
    assert report.reasons() == (Reason.AMBIGUOUS_GRID,)
    assert not report.media[0].content_proven


def test_features_on_other_tokens_than_the_run_are_the_engines_fault(
    make_family, make_image, prompt, grammar
):
    """A stray context token before an image takes its first feature, and the run's last token keeps none."""
    ids = [20, grammar.context_id, *prompt(165)]
    evidence = [Evidence(grid=Grid(22, 30), runs=((1, 1), (5, 164)))]
    item = make_image((480, 640))
    report = verify_turn(
        prompt(165), [item], family=make_family(), evidence=[Evidence(runs=((1, 1), (3, 164)))]
    )
    assert report.reason is Reason.FEATURES_MISPLACED
    assert verify_turn(ids, [item], family=make_family(), evidence=evidence).neutral
    right = [Evidence(grid=Grid(22, 30), runs=((3, 165),))]
    assert not verify_turn(prompt(165), [item], family=make_family(), evidence=right).neutral


def test_what_was_not_identified_yet_is_when_it_is_decoded(make_family, prompt):
    """Identity costs a decode, so it is taken where one happens anyhow, once."""
    pixels, loads = np.zeros((480, 640, 3), np.uint8), []

    def load():
        loads.append(1)
        return pixels[None]

    item = MediaItem(size=(480, 640), source="a.png", load=load, identify=lambda array: str(array.shape))
    right = [Evidence(grid=Grid(22, 30), served="(480, 640, 3)")]
    aligned = align_turn(prompt(165), [item], family=make_family(), evidence=right)
    assert aligned.report.media[0].grid_source is GridSource.RECEIPT
    assert aligned.report.media[0].content_proven
    assert len(loads) == 1
    wrong = [Evidence(grid=Grid(22, 30), served=THIRD)]
    aligned = align_turn(prompt(165), [item], family=make_family(), evidence=wrong)
    assert aligned.report.reasons() == (Reason.CONTENT_CHANGED,)
    assert not aligned.tensors.values["pixel_values"].any()


def test_whatever_a_processor_raises_is_that_items_fault(make_family, pair, prompt):
    def broken(item, grid):
        raise ZeroDivisionError("division by zero")

    aligned = align_turn(prompt(165, 144), pair, family=make_family(), render=broken, row_id="r")
    assert aligned.report.media[0].verdict is Verdict.UNALIGNABLE
    assert aligned.report.media[0].reason is Reason.DECODE_FAILED
    assert "division by zero" in str(aligned.report)


# What the whole request says, without a receipt.


def test_text_that_was_taken_off_the_budget_never_makes_a_wrong_proof(make_family, make_image, prompt):
    """The engine gave both images 32x30; a budget that nobody took anything off gives the second 30x32."""
    family = make_family()
    sizes = ((775, 747), (1410, 1426))
    items = [make_image(size, seed) for seed, size in enumerate(sizes)]
    request = EngineRequest(max_model_len=512, sizes=sizes)
    compared = 0
    for text in range(40):
        engine = family.tiler.joint_grids(sizes, 508 - text)
        lengths = [grid.num_tokens() for grid in engine]
        report = verify_turn(prompt(*lengths), items, family=family, request=request, ordered=True)
        for judged, grid in zip(report.media, engine, strict=True):
            assert judged.grid in (None, grid)
        compared += report.neutral
    assert compared, "ties are among them"


def test_lengths_of_the_whole_request_count(make_family, make_image, prompt):
    """An earlier turn's run rules budgets out that this turn's runs alone leave open."""
    family, rng, settled = make_family(), np.random.default_rng(0), 0
    for _ in range(400):
        side = int(rng.integers(200, 900))
        sizes = ((side, side + 8), tuple(int(s) for s in rng.integers(200, 1500, 2)))
        engine = family.tiler.joint_grids(sizes, int(rng.integers(60, 500)))
        lengths = tuple(grid.num_tokens() for grid in engine)
        item, ids = make_image(sizes[0]), prompt(lengths[0])
        alone = verify_turn(ids, [item], family=family, request=EngineRequest(max_model_len=512, sizes=sizes))
        whole = verify_turn(
            ids, [item], family=family, request=EngineRequest(max_model_len=512, sizes=sizes, lengths=lengths)
        )
        assert whole.media[0].grid in (None, engine[0])
        settled += alone.neutral and not whole.neutral
    assert settled


def test_every_outcome_of_a_shared_budget_is_found():
    rng = np.random.default_rng(3)
    for _ in range(60):
        tiler = DynamicTiler(16, 2, *[(16, 1024), (1024, 13312), (4, 64), (16, 0)][int(rng.integers(4))])
        sizes = [tuple(map(int, size)) for size in rng.integers(16, 2500, (int(rng.integers(1, 5)), 2))]
        top = int(rng.integers(10, 1500))
        found = {tuple(map(tuple, outcome)) for outcome in tiler.shared_outcomes(sizes, top).tolist()}
        assert found == {joint for b in range(1, top + 1) if (joint := tiler.joint_grids(sizes, b))}


def test_neutral_tensors_still_count(make_family, pair, prompt):
    aligned = align_turn(prompt(165, 144), pair, family=make_family(), evidence=[Evidence()])
    assert aligned.report.reason is Reason.MEDIA_GONE
    assert int((aligned.tensors.values["imgs_sizes"] // 16).prod(1).sum()) // 4 == 165 + 144
    assert torch.count_nonzero(aligned.tensors.values["pixel_values"]) == 0
