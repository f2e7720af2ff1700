# SPDX-License-Identifier: Apache-2.0
"""Our binning of references against NeMo-RL's binning of decoded images, on fuzzed conversations."""

import nemo_rl.environments.nemo_gym as nemo_gym
from hypothesis import given, settings
from hypothesis import strategies as st
from nemo_rl.data.multimodal_utils import extract_input_image_sources_from_responses_messages
from PIL import Image

from nemo_rl_ext.rollout.gym_conversation import read_conversation

REFERENCES = [f"data:image/png;base64,{name}" for name in "ABCD"]

images = st.builds(
    lambda kind, key, nested, ref: {"type": kind, key: {"url": ref} if nested else ref},
    st.sampled_from(["input_image", "image", "image_url"]),
    st.sampled_from(["image", "image_url", "url"]),
    st.booleans(),
    st.sampled_from(REFERENCES),
)
parts = st.one_of(
    images, st.just({"type": "input_text", "text": "t"}), st.just("junk"), st.just({"type": "input_image"})
)
messages = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "tool"]),
    st.one_of(st.lists(parts, max_size=3), st.just("plain"), st.none()),
)
tools = st.builds(
    lambda output: {"type": "function_call_output", "output": output},
    st.sampled_from([*REFERENCES, '{"x": 1}', "note"]),
)
steps = st.lists(st.one_of(messages, tools, st.sampled_from(["answer", "empty"])), max_size=8)


def as_output(steps):
    output, ids = [], []
    for step in steps:
        if step == "answer":
            prompt = [*ids, 1, 2]
            output.append({"prompt_token_ids": prompt, "generation_token_ids": [7]})
            ids = [*prompt, 7]
        elif step == "empty":
            output.append({"role": "assistant", "prompt_token_ids": ids, "generation_token_ids": []})
        else:
            output.append(step)
    return output


@settings(max_examples=300)
@given(prompt=st.lists(messages, max_size=3), steps=steps)
def test_bins_are_nemo_rls(prompt, steps):
    output = as_output(steps)
    opened = []

    def remember(reference):
        opened.append(reference)
        return reference

    original, nemo_gym.resolve_to_image = nemo_gym.resolve_to_image, remember
    try:
        wanted = nemo_gym._index_per_turn_images(output, input_messages=prompt)
    finally:
        nemo_gym.resolve_to_image = original
    read = read_conversation(
        {"responses_create_params": {"input": prompt}},
        {"responses_create_params": {"input": prompt}, "response": {"output": output}},
    )
    assert [list(turn.sources) for turn in read.turns] == wanted


@settings(max_examples=200)
@given(prompt=st.lists(messages, max_size=3), agent=st.lists(messages, max_size=3), same=st.booleans())
def test_initial_media_are_unchanged_exactly_when_nemo_rl_omits_them(prompt, agent, same):
    agent = prompt if same else agent
    result = {
        "response": {"output": as_output(["answer"]), "agent_input": agent},
        "responses_create_params": {"input": prompt},
    }
    row = {"responses_create_params": {"input": prompt}}
    read = read_conversation(row, result)

    class StandIn:
        cfg: dict = {}
        _processor = None

    class Tokenizer:
        def batch_decode(self, ids):
            return [""] * len(ids)

    for item in result["response"]["output"]:
        item["generation_log_probs"] = [0.0]
    processed = nemo_gym.NemoGym.__ray_metadata__.modified_class._postprocess_nemo_gym_to_nemo_rl_result(
        StandIn(), row, result, Tokenizer(), include_initial_multimodal_data=False
    )
    assert processed["_initial_multimodal_data_omitted"] == read.initial_unchanged


def test_a_decoded_image_counts_as_a_source():
    image = Image.new("RGB", (4, 4))
    message = {"role": "user", "content": [{"type": "image", "image": image}]}
    assert extract_input_image_sources_from_responses_messages([message]) == [image]
    read = read_conversation(
        {"responses_create_params": {"input": [message]}},
        {"responses_create_params": {"input": [message]}, "response": {"output": as_output(["answer"])}},
    )
    assert read.turns[0].sources == (image,) and read.initial_unchanged
