# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup, Rollout, merge_static
from nemo_rl_ext.manifest.rows import ManifestRow

ROW = ManifestRow.from_json({"responses_create_params": {"input": "which?"}})


def group(rewards, masked=()):
    rollouts = [
        Rollout(row_id="r", segments=[], reward=reward, masked=index in masked)
        for index, reward in enumerate(rewards)
    ]
    return PromptGroup(row=ROW, rollouts=rollouts, step=0)


def test_advantages_are_relative_to_the_group():
    advantages = group([1.0, 0.0, 1.0, 0.0]).advantages(normalize=False)
    assert advantages.tolist() == [0.5, -0.5, 0.5, -0.5]
    assert group([1.0, 0.0]).advantages(normalize=True) == pytest.approx([0.70700, -0.70700], abs=1e-3)


def test_a_group_without_difference_teaches_nothing():
    assert group([1.0, 1.0]).advantages(normalize=True).tolist() == [0.0, 0.0]
    assert group([1.0, 1.0]).is_flat and group([1.0, 0.0, 1.0], masked={1}).is_flat
    assert not group([1.0, 0.0]).is_flat


def test_a_masked_rollout_keeps_its_place_and_changes_nobodys_advantage():
    plain = group([1.0, 0.0]).advantages(normalize=True)
    with_masked = group([1.0, 9.0, 0.0], masked={1}).advantages(normalize=True)
    assert with_masked[[0, 2]].tolist() == plain.tolist()
    assert with_masked[1] == 0.0
    assert not group([1.0, 0.0], masked={0}).advantages(normalize=True).any()


def test_static_tensors_of_several_turns_join_in_order():
    def part(value):
        return MediaTensors(grids=(Grid(2, 2),), values={"pixel_values": torch.full((4, 3), value)})

    joined = merge_static([part(1.0), None, part(2.0)])
    assert joined.grids == (Grid(2, 2),) * 2
    assert np.unique(joined.values["pixel_values"]).tolist() == [1.0, 2.0]
    assert merge_static([None]) is None
