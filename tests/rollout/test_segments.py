# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest

from nemo_rl_ext.align.runs import Grammar
from nemo_rl_ext.receipts.receipt import ItemReceipt, Receipt, prompt_digest
from nemo_rl_ext.rollout import segments
from nemo_rl_ext.rollout.segments import EngineTurn, PromptBuffer, to_segments

GRAMMAR = Grammar(6, 5, 7)


def run(length):
    return [6, *[5] * length, 7]


def item(served, start, length):
    return ItemReceipt(
        kind="image", pixels=served, served=served, range=(start - 1, length + 2), runs=((start, length),)
    )


def receipt(prompt, *items):
    return Receipt(prompt_tokens=len(prompt), prompt=prompt_digest(prompt), items=items)


def turn(prompt, answer, num_media, receipt=None):
    return EngineTurn(
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(answer, np.int32),
        logprobs=-np.ones(len(answer), np.float32),
        num_media=num_media,
        receipt=receipt,
    )


def roles(segment):
    return [(message["role"], message["token_ids"].tolist()) for message in segment.message_log]


def test_turns_that_continue_form_one_segment():
    first = [20, *run(3), 21]
    second = [*first, 30, 31, 22, *run(2), 23]
    (segment,) = to_segments(
        [
            turn(first, [30, 31], 1, receipt(first, item("a", 2, 3))),
            turn(second, [32], 2, receipt(second, item("a", 2, 3), item("b", 11, 2))),
        ],
        (GRAMMAR,),
    )
    assert roles(segment) == [
        ("user", first),
        ("assistant", [30, 31]),
        ("user", [22, *run(2), 23]),
        ("assistant", [32]),
    ]
    assert [(u.message, u.first_media, u.last_media, u.receipt) for u in segment.user_turns] == [
        (0, 0, 1, (item("a", 2, 3),)),
        (2, 1, 2, (item("b", 2, 2),)),
    ]
    assert segment.resizes == ()


def test_a_resized_earlier_image_starts_a_segment_on_its_own_prompt():
    first = [20, *run(9), 21]
    second = [20, *run(4), 21, 30, 31, 22, *run(4), 23]
    one, two = to_segments([turn(first, [30, 31], 1), turn(second, [32], 2)], (GRAMMAR,))
    assert roles(one) == [("user", first), ("assistant", [30, 31])]
    assert roles(two) == [("user", second), ("assistant", [32])]
    assert [(u.first_media, u.last_media) for u in two.user_turns] == [(0, 2)]
    assert [str(resize) for resize in two.resizes] == ["media 0 had 9 tokens in turn 0 and 4 in turn 1"]


def test_other_pixels_under_equal_ids_start_a_segment():
    """The file of the first turn's image was rewritten between two turns."""
    first = [20, *run(3), 21]
    second = [*first, 30, 31, 22]
    turns = [
        turn(first, [30, 31], 1, receipt(first, item("a", 2, 3))),
        turn(second, [32], 1, receipt(second, item("b", 2, 3))),
    ]
    one, two = to_segments(turns, (GRAMMAR,))
    assert [u.receipt for u in two.user_turns] == [(item("b", 2, 3),)]
    assert roles(two)[0] == ("user", second)


def test_a_receipt_of_another_prompt_is_not_used():
    first = [20, *run(3), 21]
    (segment,) = to_segments([turn(first, [30], 1, receipt([20, *run(4)], item("a", 2, 4)))], (GRAMMAR,))
    assert segment.user_turns[0].receipt is None


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_replaced_prefix_starts_a_segment(cut):
    first = [20, *run(3), 21]
    second = [*first, 30, 31, 22][cut:]
    segments = to_segments([turn(first, [30, 31], 1), turn(second, [32], 1)], (GRAMMAR,))
    assert len(segments) == 2
    assert roles(segments[1])[0] == ("user", second)


def test_every_sampled_token_is_trained_exactly_once():
    rng = np.random.default_rng(0)
    for _ in range(200):
        turns, prompt, num_media = [], [20], 0
        for _ in range(rng.integers(1, 5)):
            media = int(rng.integers(0, 3))
            num_media += media
            for length in rng.integers(1, 5, media):
                prompt = [*prompt, *run(length), 21]
            if rng.random() < 0.3:
                prompt = [*prompt[:1], *prompt[2:]]
            answer = rng.integers(30, 40, rng.integers(0, 4)).tolist()
            turns.append(turn(prompt, answer, num_media))
            prompt = [*prompt, *answer, 22]
        segments = to_segments(turns, (GRAMMAR,))
        sampled = [
            m["token_ids"].tolist() for s in segments for m in s.message_log if m["role"] == "assistant"
        ]
        assert sampled == [t.token_ids.tolist() for t in turns]
        for segment in segments:
            ids = [token for message in segment.message_log[:-1] for token in message["token_ids"].tolist()]
            last = segment.user_turns[-1].turn
            assert ids == turns[last].prompt_token_ids.tolist()


def long_conversation(num_turns, buffer=None, restart=None):
    """Turns of 50 new tokens and an answer of 4, with receipts; turn `restart` begins anew."""
    rng = np.random.default_rng(0)
    prompt, turns = np.empty(0, np.int32), []
    for index in range(num_turns):
        if index == restart:
            prompt = np.empty(0, np.int32)
        prompt = np.concatenate((prompt, rng.integers(20, 99, 50).astype(np.int32)))
        answer = rng.integers(20, 99, 4).astype(np.int32)
        held = prompt.copy() if buffer is None else buffer.add(prompt.copy(), answer)
        turns.append(turn([], answer, 0, receipt(prompt)))
        turns[-1] = dataclasses.replace(turns[-1], prompt_token_ids=held)
        prompt = np.concatenate((prompt, answer))
    return turns


def memory(turns):
    """Bytes of all arrays that the prompts are, or are views of."""
    owners = {}
    for each in turns:
        array = each.prompt_token_ids
        while array.base is not None:
            array = array.base
        owners[id(array)] = array.nbytes
    return sum(owners.values())


@pytest.mark.parametrize("restart", [None, 1, 40])
def test_a_buffers_prompts_are_the_prompts_and_take_a_multiple_of_the_longest(restart):
    alone = long_conversation(64, restart=restart)
    shared = long_conversation(64, PromptBuffer(), restart=restart)
    for one, other in zip(alone, shared, strict=True):
        assert np.array_equal(one.prompt_token_ids, other.prompt_token_ids)
    longest = max(each.prompt_token_ids.nbytes for each in alone)
    assert memory(alone) > 10 * longest
    assert memory(shared) < 5 * longest
    parts = [to_segments(turns, (GRAMMAR,)) for turns in (alone, shared)]
    assert [list(map(roles, part)) for part in parts][0] == [list(map(roles, part)) for part in parts][1]
    assert len(parts[1]) == (1 if restart is None else 2)


def test_prompts_of_one_group_start_as_one_array_and_go_their_own_ways():
    first, buffers = np.arange(20, 60, dtype=np.int32), [PromptBuffer(), PromptBuffer()]
    answers = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    assert all(b.add(first, answer) is first for b, answer in zip(buffers, answers, strict=True))
    for buffer, answer in zip(buffers, answers, strict=True):
        following = np.concatenate((first, answer, [77]))
        assert np.array_equal(buffer.add(following.astype(np.int32), answer), following)
    assert np.array_equal(first, np.arange(20, 60))


def test_a_receipt_of_other_ids_in_a_long_conversation_is_no_evidence(caplog):
    turns = long_conversation(4, PromptBuffer())
    turns[2] = dataclasses.replace(turns[2], receipt=receipt(turns[1].prompt_token_ids.tolist()))
    (segment,) = to_segments(turns, (GRAMMAR,))
    assert [user.receipt for user in segment.user_turns] == [(), (), None, ()]
    assert "belongs to another prompt" in caplog.text


def test_hashing_and_comparing_grow_with_the_ids_and_not_with_the_turns(monkeypatch):
    """Every id is hashed once, however many prompts repeat it."""
    turns = long_conversation(64, PromptBuffer())
    hashed = []
    update = segments.PromptDigest.update

    def counting(self, token_ids):
        hashed.append(len(token_ids))
        update(self, token_ids)

    monkeypatch.setattr(segments.PromptDigest, "update", counting)
    to_segments(turns, (GRAMMAR,))
    assert sum(hashed) == len(turns[-1].prompt_token_ids)
