# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch

from nemo_rl_ext.rollout.packed import PackedTensor, is_packed, pack


def test_rows_of_different_sizes_are_padded_to_the_largest():
    packed = PackedTensor([torch.ones(1, 3, 2, 4), None, torch.ones(2, 3, 4, 2)], 0, pad_to_max_shape=True)
    out = packed.as_tensor()
    assert out.shape == (3, 3, 4, 4)
    assert out.sum() == 3 * 8 + 2 * 3 * 8


def test_slices_copies_and_concatenations_share_their_tensors():
    rows = [torch.ones(1, 2), torch.zeros(1, 2)]
    packed = PackedTensor(rows, 0)
    joined = PackedTensor.concat([packed.slice([1]), copy.deepcopy(packed)])
    assert [id(row) for row in joined.tensors] == [id(rows[1]), id(rows[0]), id(rows[1])]
    assert len(joined) == 3


def test_only_empty_rows_make_no_tensor():
    assert PackedTensor([None, None], 0).as_tensor() is None


def test_values_of_different_packing_do_not_mix():
    with pytest.raises(ValueError, match="must agree"):
        PackedTensor.concat([PackedTensor([None], 0), PackedTensor([None], 1)])


def test_flat_patches_need_no_padding_and_images_do():
    assert not pack("pixel_values", torch.ones(4, 768)).pad_to_max_shape
    assert pack("pixel_values", torch.ones(1, 3, 32, 32)).pad_to_max_shape
    assert is_packed(pack("imgs_sizes", torch.ones(1, 2)))
    assert not is_packed(torch.ones(1))
