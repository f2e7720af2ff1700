# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from nemo_rl_ext.grpo.collecting.prompts import PromptRenderer, require_prompts
from nemo_rl_ext.manifest.row_media import media_by_turn
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.models.tokenizer import EOS_ID, IMAGE_ID, build_byte_tokenizer


@pytest.fixture(scope="module")
def renderer():
    return PromptRenderer(build_byte_tokenizer())


ROW = ManifestRow.from_json(
    {
        "id": "r",
        "responses_create_params": {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": "a.png"},
                        {"type": "input_text", "text": "?"},
                    ],
                }
            ]
        },
        "turns": [
            [
                {
                    "role": "tool",
                    "content": [
                        {"type": "input_image", "image_url": "b.png"},
                        {"type": "input_text", "text": "2?"},
                    ],
                }
            ]
        ],
    }
)


def test_the_first_prompt_has_one_context_token_per_image(renderer):
    ids = renderer.first(ROW)
    assert (ids == IMAGE_ID).sum() == 1
    assert renderer.tokenizer.decode(ids).startswith("<|im_start|>user\n<image>\n?<|im_end|>")
    assert renderer.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("ended", [True, False])
def test_a_later_prompt_continues_the_sampled_ids_token_for_token(renderer, ended):
    first = renderer.first(ROW)
    sampled = np.array([*renderer.tokenizer("l").input_ids, *([EOS_ID] if ended else [])], np.int32)
    second = renderer.following(ROW, 1, first, sampled)
    assert np.array_equal(second[: len(first) + len(sampled)], np.concatenate((first, sampled)))
    text = renderer.tokenizer.decode(second)
    assert text == (
        "<|im_start|>user\n<image>\n?<|im_end|>\n<|im_start|>assistant\nl<|im_end|>\n"
        "<|im_start|>tool\n<image>\n2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_media_token_typed_by_a_user_stays_text(renderer):
    text = "what is {type<image>|bold} and <img><image></img>?"
    hostile = ManifestRow.from_json(
        {"responses_create_params": {"input": [{"role": "user", "content": text}]}}
    )
    ids = renderer.first(hostile)
    assert not np.isin(ids, renderer.tokenizer.convert_tokens_to_ids(["<image>", "<img>", "</img>"])).any()
    assert text in renderer.tokenizer.decode(ids)


def test_media_are_listed_by_turn_and_name_their_row(renderer):
    turns = media_by_turn(ROW)
    assert [[source.ref for source in turn] for turn in turns] == [["a.png"], ["b.png"]]
    assert "r" in turns[0][0].where


def test_a_tokenizer_without_a_chat_template_is_refused():
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        PromptRenderer(tokenizer)


def test_tools_calls_and_their_answers_stand_in_every_turns_prompt():
    renderer = PromptRenderer(build_byte_tokenizer())
    row = ManifestRow.from_json(WITH_TOOLS)
    first = renderer.first(row)
    second = renderer.following(row, 1, first, np.array([EOS_ID], np.int32))
    text = renderer.tokenizer.decode(second)
    assert text.startswith('<|im_start|>system\n<tool>{"name": "zoom"}</tool><|im_end|>\n')
    assert '<tool_call>{"name": "zoom", "arguments": {"at": "<image>"}}</tool_call>' in text
    assert text.endswith("<|im_start|>tool\nfound<|im_end|>\n<|im_start|>assistant\n")
    assert not (second == IMAGE_ID).any(), "arguments stay text"
    require_prompts([row], lambda: renderer)


def test_rows_whose_tools_the_template_leaves_out_are_refused_at_the_start():
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("if tools", "if false")
    row = ManifestRow.from_json(WITH_TOOLS, file="rows.jsonl", line=7)
    with pytest.raises(ValueError, match="rows.jsonl:7: .* leaves out the tool 'zoom'"):
        require_prompts([ROW, row], lambda: PromptRenderer(tokenizer))


WITH_TOOLS = {
    "responses_create_params": {
        "input": [
            {"role": "user", "content": "?"},
            {"type": "function_call", "call_id": "1", "name": "zoom", "arguments": '{"at": "<image>"}'},
            {"type": "function_call_output", "call_id": "1", "output": "seen"},
        ],
        "tools": [{"type": "function", "name": "zoom"}],
    },
    "turns": [[{"role": "tool", "content": "found"}]],
}
