# SPDX-License-Identifier: Apache-2.0
"""Loss masks: rows are zeroed in place, never dropped, whatever the layout."""

import logging

import pytest
import torch

from nemo_rl_ext.guards.masks import LossMaskGuard, LossMaskShareError

LENGTHS = [31, 32, 0, 40, 1]
GONE = [0, 2, 4]


def make_mask(lengths=LENGTHS, width=48, dtype=torch.float32):
    mask = torch.zeros(len(lengths), width, dtype=dtype)
    for row, n in enumerate(lengths):
        mask[row, 5 : 5 + n] = 1
    return mask


def expected_from(mask, gone=GONE):
    out = mask.clone()
    out[gone] = 0
    return out


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_a_row_of_31_under_a_threshold_of_32_is_zeroed_in_place_and_kept(dtype):
    mask = make_mask(dtype=dtype)
    expected, storage = expected_from(mask), mask.data_ptr()
    outcome = LossMaskGuard(min_tokens=32).padded(mask)
    assert torch.equal(mask, expected) and mask.dtype == dtype and mask.data_ptr() == storage
    assert outcome.zeroed == (0, 4) and outcome.empty == (2,) and outcome.kept == (1, 3)
    assert outcome.num_rows == 5 and outcome.tokens_removed == 32


def test_weighted_masks_count_tokens_not_weight():
    mask = make_mask() * 0.01
    LossMaskGuard(min_tokens=32).padded(mask)
    assert [int((row != 0).sum()) for row in mask] == [0, 32, 0, 40, 0]


@pytest.mark.parametrize("batched", [False, True])
def test_packed_masks_agree_with_padded_and_leave_the_tail_alone(batched):
    padded = make_mask()
    tail = torch.ones(7)
    packed = torch.cat([*padded, tail])
    expected = torch.cat([*expected_from(padded), tail])
    view = packed[None] if batched else packed
    cu_seqlens = torch.arange(0, 6, dtype=torch.int32) * padded.shape[1]
    outcome = LossMaskGuard(min_tokens=32).packed(view, cu_seqlens)
    assert torch.equal(packed, expected) and outcome.zeroed == (0, 4)


def test_packed_rows_of_no_tokens_are_empty_rows():
    mask = torch.ones(40)
    outcome = LossMaskGuard(min_tokens=32).packed(mask, [0, 0, 40, 40])
    assert outcome.empty == (0, 2) and mask.sum() == 40


def test_ragged_masks_are_zeroed_each_in_its_own_tensor():
    masks = [row[: n + 6].clone() for row, n in zip(make_mask(), LENGTHS, strict=True)]
    lengths = [len(m) for m in masks]
    outcome = LossMaskGuard(min_tokens=32).ragged(masks)
    assert [int(m.sum()) for m in masks] == [0, 32, 0, 40, 0] and [len(m) for m in masks] == lengths
    assert outcome.zeroed == (0, 4)
    assert LossMaskGuard(min_tokens=32).ragged([]).num_rows == 0


def test_masks_that_are_views_of_a_batch_change_the_batch():
    batch = torch.ones(2, 3, 8)
    LossMaskGuard(min_tokens=9).padded(batch[1])
    assert batch[0].sum() == 24 and batch[1].sum() == 0


def test_warning_and_counters_name_rows(caplog):
    guard = LossMaskGuard(min_tokens=32)
    with caplog.at_level(logging.WARNING, "nemo_rl_ext.guards"):
        guard.padded(make_mask(), row_ids=["a", "b", "c", "d", "e"])
        guard.padded(make_mask([40, 40]))
    assert len(caplog.records) == 1
    assert "2 of 5 rows have fewer than 32 loss tokens (row: tokens a: 31, e: 1)" in caplog.text
    assert guard.metrics() == {
        "guards/loss_mask_rows": 7.0,
        "guards/loss_mask_rows_zeroed": 2.0,
        "guards/loss_mask_rows_empty": 1.0,
        "guards/loss_mask_tokens_removed": 32.0,
    }


def test_a_threshold_that_removes_too_much_is_an_error():
    guard = LossMaskGuard(min_tokens=32, max_removed_fraction=0.25, limit_after_rows=8)
    guard.padded(make_mask([31, 31]))  # too early to judge
    guard.padded(make_mask([40] * 6))  # 2 of 8
    with pytest.raises(
        LossMaskShareError, match=r"min_tokens=32 removed the loss of 3 of 9 rows \(33%\).*25%"
    ):
        guard.padded(make_mask([31]))


def test_rows_that_were_empty_before_are_no_fault_of_the_threshold():
    guard = LossMaskGuard(min_tokens=32, max_removed_fraction=0.0, limit_after_rows=1)
    assert guard.padded(make_mask([0, 0, 40])).empty == (0, 1)


def test_wrong_shapes_and_settings_are_named():
    guard = LossMaskGuard(min_tokens=1)
    with pytest.raises(ValueError, match=r"expected a mask of \[rows, tokens\], got shape \[3\]"):
        guard.padded(torch.ones(3))
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most 3 tokens"):
        guard.packed(torch.ones(3), [0, 4])
    with pytest.raises(ValueError, match="min_tokens must be at least 1"):
        LossMaskGuard(min_tokens=0)
    with pytest.raises(ValueError, match="max_removed_fraction must lie in"):
        LossMaskGuard(min_tokens=1, max_removed_fraction=2)
