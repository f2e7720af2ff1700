# SPDX-License-Identifier: Apache-2.0
import copy
import pickle

import pytest
import torch

from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.rollout.packed import pack
from nemo_rl_ext.rollout.provenance import (
    ROLLOUT_MATCHED_MEDIA_KEY,
    attach_rollout_media,
    consume_marks,
    media_of,
    reattach_static_media,
)


def tensors(value):
    return MediaTensors(
        grids=(Grid(2, 2),),
        values={"pixel_values": torch.full((1, 3, 32, 32), value), "imgs_sizes": torch.tensor([[32, 32]])},
    )


def static_log():
    return [
        {"role": "system", "token_ids": torch.tensor([1])},
        {
            "role": "user",
            "token_ids": torch.tensor([2, 3]),
            "pixel_values": pack("pixel_values", torch.zeros(1, 3, 64, 64)),
        },
    ]


def rollout(*, repaired):
    """A rollout as it comes back from an actor: both views hold the same dict for the prompt."""
    user = {"role": "user", "token_ids": torch.tensor([2, 3])}
    if repaired:
        attach_rollout_media(user, tensors(1.0))
    answer = {"role": "assistant", "token_ids": torch.tensor([4])}
    system = {"role": "system", "token_ids": torch.tensor([1])}
    return {"input_message_log": [system, user], "message_log": [system, user, answer]}


HOPS = {
    "none": lambda value: value,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "both": lambda value: copy.deepcopy(pickle.loads(pickle.dumps(value))),
}


@pytest.mark.parametrize("hop", HOPS)
def test_a_repaired_turn_survives_the_reattach_of_both_views(hop):
    result = HOPS[hop](rollout(repaired=True))
    assert result["input_message_log"][1] is result["message_log"][1]
    reattach_static_media(result, static_log())
    for view in ("input_message_log", "message_log"):
        assert result[view][1]["pixel_values"].as_tensor().unique().tolist() == [1.0]
        assert "imgs_sizes" in result[view][1]


def test_an_unmarked_turn_gets_the_prompts_own_tensors_by_reference():
    static, group = static_log(), [rollout(repaired=False) for _ in range(4)]
    for result in group:
        reattach_static_media(result, static)
    assert {id(result["message_log"][1]["pixel_values"]) for result in group} == {
        id(static[1]["pixel_values"])
    }


def test_the_mark_is_consumed_once_and_never_reaches_a_forward():
    result = rollout(repaired=True)
    reattach_static_media(result, static_log())
    assert not any(ROLLOUT_MATCHED_MEDIA_KEY in message for view in result.values() for message in view)


def test_a_stale_key_of_the_static_media_does_not_survive_beside_a_repair():
    user = {"role": "user", "num_frames": pack("num_frames", torch.ones(3))}
    attach_rollout_media(user, tensors(1.0))
    assert set(media_of(user)) == {"pixel_values", "imgs_sizes"}


def test_a_media_less_repair_stays_media_less():
    result = rollout(repaired=False)
    attach_rollout_media(result["message_log"][1], None)
    reattach_static_media(result, static_log())
    assert not media_of(result["message_log"][1])


def test_a_tool_turn_with_static_media_is_attached_although_the_input_view_ends_before_it():
    result = rollout(repaired=False)
    tool = {"role": "user", "token_ids": torch.tensor([9])}
    result["message_log"].append(tool)
    static = [
        *static_log(),
        {"role": "user", "pixel_values": pack("pixel_values", torch.full((1, 3, 32, 32), 3.0))},
    ]
    reattach_static_media(result, static)
    assert tool["pixel_values"].as_tensor().unique().tolist() == [3.0]


def test_tool_turns_beyond_the_prompt_keep_their_media():
    result = rollout(repaired=False)
    tool = {"role": "user", "token_ids": torch.tensor([9])}
    attach_rollout_media(tool, tensors(2.0))
    result["message_log"] += [tool]
    reattach_static_media(result, static_log())
    assert tool["pixel_values"].as_tensor().unique().tolist() == [2.0]


def test_marks_survive_slicing_a_group_out_of_a_buffer():
    group = pickle.loads(pickle.dumps([rollout(repaired=index % 2 == 1) for index in range(4)]))[1:3]
    for result in group:
        reattach_static_media(result, static_log())
    values = [result["message_log"][1]["pixel_values"].as_tensor().unique().tolist() for result in group]
    assert values == [[1.0], [0.0]]


def test_a_rollout_that_lost_a_prompt_turn_is_refused():
    result = {"message_log": [{"role": "assistant"}]}
    with pytest.raises(ValueError, match="0 user turns where static media of 1 turns"):
        reattach_static_media(result, static_log())


def test_consuming_counts_the_marked_messages():
    result = rollout(repaired=True)
    assert consume_marks(result["message_log"]) == 1
    assert consume_marks(result["message_log"]) == 0
