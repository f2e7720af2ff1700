# SPDX-License-Identifier: Apache-2.0
from nemo_rl_ext.receipts.receipt import Receipt, prompt_digest
from nemo_rl_ext.rollout.gym_conversation import read_conversation

A, B, C = "data:image/png;base64,A", "data:image/png;base64,B", "data:image/png;base64,C"


def image(url):
    return {"type": "input_image", "image_url": url}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def answer(prompt, sampled):
    return {"prompt_token_ids": prompt, "generation_token_ids": sampled}


def conversation(row_input, output, **response):
    return read_conversation(
        {"responses_create_params": {"input": row_input}},
        {"responses_create_params": {"input": row_input}, "response": {"output": output, **response}},
    )


def test_images_go_to_the_turn_that_saw_them():
    read = conversation(
        [user(image(A), {"type": "input_text", "text": "look"})],
        [
            answer([1, 2], [3]),
            {"type": "function_call_output", "output": B},
            {"type": "function_call_output", "output": '{"x": 1}'},
            user(image({"url": C})),
            answer([1, 2, 3, 4, 5], [6]),
        ],
    )
    assert [turn.sources for turn in read.turns] == [(A,), (B, C)]
    assert [list(turn.prompt_ids) for turn in read.turns] == [[1, 2], [4, 5]]
    assert read.initial_unchanged and read.has_media and not read.has_video


def test_an_answer_without_tokens_is_no_turn():
    read = conversation([user(image(A))], [answer([1], []), user(image(B)), answer([1, 2], [3])])
    assert [turn.sources for turn in read.turns] == [(A, B)]


def test_an_agent_that_changed_the_images_is_seen():
    row = [user(image(A))]
    assert not conversation(row, [answer([1], [2])], agent_input=[user(image(B))]).initial_unchanged
    assert not conversation(row, [answer([1], [2])], seed_obs=[user(image(A), image(B))]).initial_unchanged
    assert conversation(row, [answer([1], [2])], agent_input=[user(image(A))], seed_obs=[]).initial_unchanged


def test_text_has_no_media_and_a_video_is_the_trainers():
    assert not conversation([user({"type": "input_text", "text": "hi"})], [answer([1], [2])]).has_media
    assert not conversation("plain", [answer([1], [2])]).has_media
    read = conversation([user({"type": "input_video", "video_url": "file:///v.mp4"})], [answer([1], [2])])
    assert read.has_video and read.has_media and read.turns[0].sources == ()


def test_a_tool_s_part_list_is_read_as_a_message_s():
    tool = {"type": "function_call_output", "output": [{"type": "input_text", "text": "see"}, image(B)]}
    read = conversation([user(image(A))], [answer([1, 2], [3]), tool, answer([1, 2, 3, 4], [5])])
    assert [turn.sources for turn in read.turns] == [(A,), (B,)]
    assert read.turns[1].shown(1) == (B,)


def test_a_bare_url_is_an_image_where_the_engine_made_one_of_it():
    tool = {"type": "function_call_output", "output": B}
    items = [answer([1, 2], [3]), tool, user(image(C)), answer([1, 2, 3, 4], [5])]
    turn = conversation([user(image(A))], items).turns[1]
    assert turn.shown(2) == (B, C)
    assert turn.shown(1) == (C,)


def test_a_receipt_travels_with_its_turn_and_a_broken_one_is_none():
    receipt = Receipt(prompt_tokens=2, prompt=prompt_digest([1, 2]))
    item = answer([1, 2], [3]) | {"media_receipt": receipt.as_dict()}
    (turn,) = conversation([user(image(A))], [item]).turns
    assert turn.receipt == receipt and list(turn.request_ids) == [1, 2]
    item["media_receipt"] = {"prompt": 3}
    assert conversation([user(image(A))], [item]).turns[0].receipt is None
