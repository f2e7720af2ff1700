# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from nemo_rl_ext.grpo.training.batch import collate
from nemo_rl_ext.grpo.training.rows import row_of
from nemo_rl_ext.grpo.training.trainer import tokens_of_rollout
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


def test_a_conversation_in_several_sequences_counts_once_in_a_sequence_level_loss():
    rows = [row_of(segment(torch.zeros(4, 768)), rollout=number) for number in (0, 1, 1)]
    weights = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    shares = (weights / tokens_of_rollout(rows, weights)).sum(-1)
    assert shares.tolist() == pytest.approx([1.0, 1 / 3, 2 / 3])
