# SPDX-License-Identifier: Apache-2.0
"""vLLM's own `mm_placeholders` as evidence: what they prove, and what becomes of ranges that the ids contradict."""

import numpy as np
import pytest
import torch

from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
from nemo_rl_ext.align.grids import DynamicTiler
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.runs import Grammar
from nemo_rl_ext.align.turn import verify_turn
from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.receipts.evidence import belongs_to, evidence_of
from nemo_rl_ext.receipts.placeholders import receipt_of_placeholders
from nemo_rl_ext.rollout.gym_conversation import receipt_in

FAMILY = NemotronFamily(
    grammar=Grammar(start_id=6, context_id=5, end_id=7),
    tiler=DynamicTiler(patch_size=16, merge_size=2, min_num_patches=16, max_num_patches=1024),
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    layout=Layout.REMOTE,
    dtype=torch.float32,
)
IDS = [20, 6, *[5] * 4, 7, 21, 6, *[5] * 6, 7]
"""Two images of 64x64 and 64x96 pixels."""
PLACES = {"image": [{"offset": 1, "length": 6}, {"offset": 8, "length": 8}]}


def media(*sizes):
    return [MediaItem(size=size, source=f"{size}.png", content_hash=str(size)) for size in sizes]


def judged(items, places, ids=IDS):
    receipt = receipt_of_placeholders(ids, places)
    evidence = evidence_of(receipt.items, items, np.array(ids), FAMILY)
    return evidence, verify_turn(ids, items, family=FAMILY, evidence=evidence)


def test_the_engines_ranges_are_those_of_the_runs():
    evidence, report = judged(media((64, 64), (64, 96)), PLACES)
    assert [said.runs for said in evidence] == [((2, 4),), ((9, 6),)]
    assert [item.verdict for item in report.media] == [Verdict.MATCHED] * 2
    assert not any(item.content_proven for item in report.media), "a place says nothing of pixels"


def test_the_number_of_media_is_the_engines():
    assert judged(media((64, 64)), PLACES)[1].reason is Reason.MEDIA_ADDED
    assert judged(media((64, 64), (64, 96), (64, 64)), PLACES)[1].reason is Reason.MEDIA_GONE


@pytest.mark.parametrize("shift", [-1, 3])
def test_ranges_that_the_ids_contradict_are_no_evidence(shift):
    """The ids were replaced and the ranges left: each covers a part of a run, or none."""
    moved = {"image": [{"offset": 1, "length": 4}, {"offset": 8 + shift, "length": 5}]}
    evidence, report = judged(media((64, 64), (64, 96)), moved)
    assert [said.runs for said in evidence] == [None, None]
    assert not report.neutral, "the runs alone decide"


@pytest.mark.parametrize(
    "places",
    [
        {"image": [{"offset": 1, "length": 6}, {"offset": 5, "length": 8}]},
        {"image": [{"offset": 12, "length": 6}]},
        {"image": [{"offset": 1, "length": 0}]},
        {"image": [{"offset": -1, "length": 2}]},
        {"image": [{"length": 2}]},
        {"image": [3]},
    ],
)
def test_what_is_no_account_of_these_ids_is_refused(places):
    with pytest.raises(ValueError, match="mm_placeholders"):
        receipt_of_placeholders(IDS, places)
    assert receipt_in({"prompt_token_ids": IDS, "mm_placeholders": places}) is None


def test_results_of_agents_carry_it_beside_the_ids():
    receipt = receipt_in({"prompt_token_ids": IDS, "mm_placeholders": PLACES})
    assert belongs_to(receipt, np.array(IDS))
    assert [item.range for item in receipt.items] == [(1, 6), (8, 8)]
