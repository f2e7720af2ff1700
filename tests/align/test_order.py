# SPDX-License-Identifier: Apache-2.0
"""Whose run is it: where another order explains the runs as well and nothing proves this one, the turn is neutral."""

import dataclasses

import numpy as np
import pytest

from nemo_rl_ext.align.evidence import EngineRequest, Evidence
from nemo_rl_ext.align.families.family import Seen
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.limits import ANY, Limits
from nemo_rl_ext.align.order import rivals
from nemo_rl_ext.align.runs import find_runs
from nemo_rl_ext.align.turn import verify_turn
from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.align.video_grids import VideoTiler
from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.receipts.receipt import ItemReceipt
from nemo_rl_ext.rollout.fitting import TurnFitting, TurnRequest

SIZES = ((663, 1053), (715, 1100))
"""(height, width) of two pictures that could have each other's runs."""


@pytest.fixture
def released(make_family):
    return make_family(minimum=1024, maximum=13312)


@pytest.fixture
def runs(released):
    """The engine's runs of both in a context of 902."""
    return [grid.num_tokens() for grid in released.joint_grids(SIZES, 902)]


def test_two_images_that_could_have_each_others_runs_are_neutral(released, make_image, prompt, runs):
    items = [make_image(size, seed) for seed, size in enumerate(SIZES)]
    assert runs[0] != runs[1]
    for lengths in (runs, runs[::-1]):
        report = verify_turn(prompt(*lengths), items, family=released)
        assert [item.reason for item in report.media] == [Reason.ORDER_SUSPECT] * 2
        assert [item.verdict for item in report.media] == [Verdict.AMBIGUOUS] * 2


def test_the_request_proves_its_order_and_refutes_the_other(released, make_image, prompt, runs):
    family, items = released, [make_image(size, seed) for seed, size in enumerate(SIZES)]
    request = EngineRequest(max_model_len=902, sizes=SIZES)
    assert not verify_turn(prompt(*runs), items, family=family, request=request).neutral
    assert verify_turn(prompt(*runs[::-1]), items, family=family, request=request).neutral


def test_who_wrote_the_request_knows_its_order(released, make_image, prompt, runs):
    items = [make_image(size, seed) for seed, size in enumerate(SIZES)]
    report = verify_turn(prompt(*runs), items, family=released, ordered=True)
    assert [item.verdict for item in report.media] == [Verdict.REPAIRED] * 2


def test_known_content_proves_the_order(released, make_image, prompt, runs):
    family = released
    items = [
        dataclasses.replace(make_image(size, seed), digest=f"{seed}" * 64) for seed, size in enumerate(SIZES)
    ]
    evidence = [Evidence(served=item.digest) for item in items]
    assert not verify_turn(prompt(*runs), items, family=family, evidence=evidence).neutral


def test_alike_runs_need_no_other_proof(make_family, make_image, prompt):
    items = [make_image((480, 640), seed) for seed in range(3)]
    assert not verify_turn(prompt(165, 165, 165), items, family=make_family()).neutral


def clip(name, size, count, total):
    frames = tuple(round(index * (total - 1) / (count - 1)) for index in range(count))
    return MediaItem(kind="video", size=size, source=name, frame_indices=frames, fps=24.0, total_frames=total)


def written(item, length, start=6, context=5, end=7):
    ids = []
    for first in range(0, item.num_frames, 2):
        label = " and ".join(
            f"{'frame' if place else 'Frame'} {first + place + 1} sampled at {index * 41 / 1000:.2f} seconds"
            for place, index in enumerate(item.frame_indices[first : first + 2])
        )
        ids += [ord(char) for char in ("\n" if first else "") + label + ": "]
        ids += [start, *[context] * length, end]
    return [*ids, 33]


def test_two_clips_in_the_other_order_are_not_decoded_at_each_others_times(make_family):
    family = dataclasses.replace(
        make_family(), video=VideoTiler(16, 2, 48, True, 2), decoder=lambda ids: "".join(map(chr, ids))
    )
    one, other = clip("a.mp4", (96, 128), 8, 120), clip("b.mp4", (128, 96), 10, 120)
    length = family.static_grids([one])[0].num_tokens()
    swapped = verify_turn([*written(other, length), *written(one, length)], [one, other], family=family)
    assert [item.reason for item in swapped.media] == [Reason.ORDER_SUSPECT] * 2
    right = verify_turn([*written(one, length), *written(other, length)], [one, other], family=family)
    assert [item.verdict for item in right.media] == [Verdict.MATCHED] * 2


def may(possible):
    return (ANY,) if possible else ()


def test_a_circle_of_three_is_found_and_a_chain_is_not():
    seen = [(Seen(lengths=(n,)), None) for n in (1, 2, 3)]
    circle = {(0, 1), (1, 2), (2, 0)}
    assert set(rivals(seen, lambda i, j: may((i, j) in circle or i == j), [False] * 3)) == {0, 1, 2}
    assert rivals(seen, lambda i, j: may((i, j) in circle), [True, False, False]) == {}
    assert rivals(seen, lambda i, j: may((i, j) in {(0, 1), (1, 2)}), [False] * 3) == {}


def test_one_request_has_one_set_of_limits():
    """Each exchange would be possible on its own, but not both under the same limits."""
    seen = [(Seen(lengths=(n,)), None) for n in (1, 2)]
    own = {(0, 0): Limits(max_low=5, max_high=5), (1, 1): Limits(max_low=5, max_high=5)}

    def under(low, high):
        exchanged = {(0, 1): Limits(max_low=low, max_high=low), (1, 0): Limits(max_low=high, max_high=high)}
        return rivals(seen, lambda i, j: ({**own, **exchanged}[i, j],), [False] * 2)

    assert under(3, 4) == {}
    assert under(3, 3) == {0: 1, 1: 0}
    assert Limits(min_low=9).meet(Limits(max_high=8)) is None


def test_a_replay_holds_when_the_pixels_are_compared_afterwards(make_image, make_family, prompt):
    """The trainer's tensors are on the engine's grids already; the receipt names pixels and no geometry."""
    family, sizes = make_family(), ((744, 738), (471, 458))
    items = [
        dataclasses.replace(make_image(size, seed), identify=pixel_digest) for seed, size in enumerate(sizes)
    ]
    grids = family.joint_grids(sizes, 400)
    ids, sources = (
        np.array(prompt(*[grid.num_tokens() for grid in grids])),
        [MediaSource(ref=str(i)) for i in (0, 1)],
    )
    runs = [(run.offset, run.length) for run in find_runs(ids, family.grammar)]
    served = [item.identified().digest for item in items]
    assert verify_turn(ids, items, family=family, static_grids=grids, ordered=True).neutral, "two grids fit"

    def judged(said):
        receipt = tuple(
            ItemReceipt(kind="image", served=digest, range=run, runs=(run,))
            for digest, run in zip(said, runs, strict=True)
        )
        turn = TurnRequest(
            row_id="r",
            turn=0,
            token_ids=ids,
            media=tuple(sources),
            receipt=receipt,
            ordered=True,
            max_model_len=400,
        )
        fitting = TurnFitting(
            family=family, render=family.render, measure=lambda source: items[int(source.ref)]
        )
        return fitting.judge(turn, tuple(items), grids).report

    report = judged(served)
    assert [item.verdict for item in report.media] == [Verdict.MATCHED] * 2
    assert all(item.content_proven for item in report.media)
    assert judged([served[0], "f" * 64]).reasons() == (Reason.CONTENT_CHANGED,)
