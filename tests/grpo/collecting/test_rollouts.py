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


def advantages(rewards, *, normalize=True, leave_one_out=True, masked=()):
    return group(rewards, masked).advantages(normalize=normalize, leave_one_out=leave_one_out)


def test_advantages_are_relative_to_the_rest_of_the_group():
    assert advantages([1.0, 0.0, 1.0, 0.0], normalize=False) == pytest.approx([2 / 3, -2 / 3] * 2)
    assert advantages([1.0, 0.0, 1.0, 0.0], normalize=False, leave_one_out=False).tolist() == [0.5, -0.5] * 2
    deviation = 1 / 3**0.5
    assert advantages([1.0, 0.0, 1.0, 0.0]) == pytest.approx(
        [2 / 3 / deviation, -2 / 3 / deviation] * 2, rel=1e-5
    )
    whole = advantages([1.0, 0.0], leave_one_out=False)
    assert whole == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-5)


def test_rewards_without_deviation_are_not_sharpened():
    assert advantages([1.0, 0.0]).tolist() == [1.0, -1.0], "one other has no deviation"
    assert advantages([1.0, 0.0, 0.0, 0.0])[0] == 1.0, "the others are equal"


def test_a_group_without_difference_teaches_nothing():
    assert advantages([1.0, 1.0, 1.0]).tolist() == [0.0, 0.0, 0.0]
    assert group([1.0, 1.0]).is_flat and group([1.0, None, 1.0]).is_flat
    assert group([1.0, 0.0], masked={0, 1}).is_flat
    assert not group([1.0, 0.0]).is_flat


def test_a_masked_rollout_counts_and_one_without_a_reward_does_not():
    assert advantages([1.0, 0.0], masked={1}, normalize=False)[0] == 1.0
    with_unscored = advantages([1.0, None, 0.0], normalize=False)
    assert with_unscored.tolist() == [1.0, 0.0, -1.0]
    assert not advantages([1.0, None]).any()


def test_static_tensors_of_several_turns_join_in_order():
    def part(value):
        return MediaTensors(grids=(Grid(2, 2),), values={"pixel_values": torch.full((4, 3), value)})

    joined = merge_static([part(1.0), None, part(2.0)])
    assert joined.grids == (Grid(2, 2),) * 2
    assert np.unique(joined.values["pixel_values"]).tolist() == [1.0, 2.0]
    assert merge_static([None]) is None
