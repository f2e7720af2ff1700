# SPDX-License-Identifier: Apache-2.0
"""Neutral media: as many features as context tokens, every key of NeMo-RL's own, one size where one is needed."""

import pytest
import torch

from nemo_rl_ext.integration.neutral import NeutralMedia
from nemo_rl_ext.rollout.packed import pack
from nemo_rl_ext.rollout.provenance import ROLLOUT_MATCHED_MEDIA_KEY, media_of


@pytest.fixture
def neutral(family):
    return NeutralMedia(family=family, counters=("num_patches",), one_size=True)


def messages(rows, *runs):
    return [{"role": "user", "token_ids": torch.tensor(rows.prompt(lengths))} for lengths in runs]


@pytest.mark.parametrize(
    "runs",
    [[[50]], [[37]], [[300]], [[2010]], [[50, 18]], [[50], [18]], [[], [7]], [[2003]], [[4099, 4099]], [[1]]],
    ids=str,
)
def test_a_row_gets_one_size_and_the_count_of_every_message(neutral, rows, runs):
    log = messages(rows, *runs)
    neutral.fill_row(log)
    sizes = set()
    for message, lengths in zip(log, runs, strict=True):
        media = media_of(message)
        if not lengths:
            assert not media and ROLLOUT_MATCHED_MEDIA_KEY not in message
            continue
        assert message[ROLLOUT_MATCHED_MEDIA_KEY]
        found = media["imgs_sizes"].as_tensor().tolist()
        sizes |= set(map(tuple, found))
        assert sum(h * w for h, w in found) // (16 * 16 * 4) == sum(lengths)
        assert len(media["pixel_values"].as_tensor()) == len(media["num_patches"].as_tensor()) == len(found)
    assert len(sizes) == 1


def test_the_largest_common_rectangle_is_used_where_there_is_one(neutral):
    assert [neutral.tokens_of_one_size(counts) for counts in ([300, 120], [37], [50, 0], [0])] == [
        30,
        1,
        25,
        1,
    ]


def test_media_of_a_row_are_replaced_and_none_are_left_stale(neutral, rows):
    (message,) = messages(rows, [])
    message["pixel_values"] = pack("pixel_values", torch.zeros(1, 3, 32, 32))
    neutral.fill_row([message])
    assert not media_of(message)


def test_ids_without_context_tokens_need_no_media(neutral, rows):
    assert neutral.of_turn(rows.prompt([])) is None
    values = neutral.of_turn(rows.prompt([3])).values
    assert values["num_patches"].tolist() == [1] * len(values["imgs_sizes"])
