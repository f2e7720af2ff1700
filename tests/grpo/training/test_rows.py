# SPDX-License-Identifier: Apache-2.0
import torch

from nemo_rl_ext.grpo.training.batch import collate
from nemo_rl_ext.grpo.training.rows import row_of
from nemo_rl_ext.rollout.packed import pack
from nemo_rl_ext.rollout.segments import Segment


def segment(pixels, answer=3):
    user = {"role": "user", "token_ids": torch.tensor([1, 2]), "pixel_values": pack("pixel_values", pixels)}
    logprobs = torch.tensor([-0.5])
    log = [
        user,
        {"role": "assistant", "token_ids": torch.tensor([answer]), "generation_logprobs": logprobs},
    ]
    return Segment(message_log=log)


def test_a_message_log_becomes_one_row():
    row = row_of(segment(torch.zeros(4, 768)), advantage=0.5)
    assert row.token_ids.tolist() == [1, 2, 3]
    assert row.sampled.tolist() == [False, False, True]
    assert row.engine_logprobs.tolist() == [0.0, 0.0, -0.5]
    assert [set(values) for values in row.media] == [{"pixel_values"}]
    assert row.advantage == 0.5 and not row.masked


def test_rows_that_share_tensors_bring_them_to_the_batch_once():
    shared, other = torch.zeros(4, 768), torch.zeros(4, 768)
    rows = [row_of(segment(pixels)) for pixels in (shared, other, shared)]
    assert collate(rows, pad_token_id=0).media_of_row == ((0,), (1,), (0,))


def test_a_token_belongs_to_the_weights_before_the_first_update_of_its_answer():
    log = [
        {"role": "user", "token_ids": torch.tensor([1, 2])},
        {
            "role": "assistant",
            "token_ids": torch.tensor([3, 4, 5]),
            "weight_versions": ((7, 0, 2), (8, 2, 3)),
        },
        {"role": "user", "token_ids": torch.tensor([6])},
        {"role": "assistant", "token_ids": torch.tensor([9, 9]), "weight_versions": ((8, 0, 2),)},
        {"role": "assistant", "token_ids": torch.tensor([9]), "weight_versions": ((8, 0, 0),)},
    ]
    segment = Segment(message_log=log)
    assert row_of(segment).drawn_by.tolist() == [-1, -1, 7, 7, -1, -1, 8, 8, -1]
    assert segment.weight_versions() == {7, 8}
