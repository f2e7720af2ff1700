# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from nemo_rl_ext.grpo.collecting.endpoint import Completions, seed_of_turn
from nemo_rl_ext.grpo.collecting.player import Sampling
from nemo_rl_ext.grpo.collecting.prompts import PromptRenderer
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.models.tokenizer import build_byte_tokenizer


class Asked(Exception):
    """What stands in for the engine's answer."""


class EngineStandIn:
    """The network edge: it has the request that would be sent, and answers nothing."""

    def generate(self, requests):
        raise Asked(requests[0])


def completions(tokenizer):
    return Completions(
        engine=EngineStandIn(),
        renderer=PromptRenderer(tokenizer),
        sampling=Sampling(temperature=1.0, max_new_tokens=4),
        media_policy=MediaPolicy(),
        model_name="m",
    )


AGENTS_REQUEST = {
    "messages": [
        {"role": "user", "content": "Which half?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "zoom", "arguments": '{"factor": 2}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "zoomed"},
    ],
    "tools": [{"type": "function", "function": {"name": "zoom"}}],
}


def test_an_agents_tools_and_calls_reach_the_prompt():
    tokenizer = build_byte_tokenizer()
    with pytest.raises(Asked) as caught:
        completions(tokenizer).create(AGENTS_REQUEST)
    assert tokenizer.decode(caught.value.args[0].prompt_token_ids) == (
        '<|im_start|>system\n<tool>{"name": "zoom"}</tool><|im_end|>\n<|im_start|>user\nWhich half?<|im_end|>\n'
        '<|im_start|>assistant\n<tool_call>{"name": "zoom", "arguments": {"factor": 2}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nzoomed<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_agents_request_is_refused_where_the_template_leaves_a_call_out():
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("message.get('tool_calls')", "[]")
    with pytest.raises(ValueError, match="leaves out a call of 'zoom'"):
        completions(tokenizer).create(AGENTS_REQUEST)


def test_every_turn_of_a_rollout_draws_with_noise_of_its_own():
    """An agent sends one seed with all turns; with it, two turns of an l/r answer agreed in every rollout."""
    first, second = np.array([20, 21, 22]), np.array([20, 21, 22, 30, 23])
    seeds = [seed_of_turn(7, prompt) for prompt in (first, second)]
    assert len(set(seeds)) == 2
    assert seeds == [seed_of_turn(7, prompt.tolist()) for prompt in (first, second)]
    assert seed_of_turn(8, first) != seeds[0]
    assert seed_of_turn(None, first) is None


def test_turns_of_many_rollouts_are_independent():
    """Over 2,000 rollouts the first draws of two turns agree as often as two fair draws do."""
    prompts = np.array([20, 21]), np.array([20, 21, 30, 22])
    draws = [
        [np.random.default_rng(seed_of_turn(seed, prompt)).random() < 0.5 for seed in range(2000)]
        for prompt in prompts
    ]
    agreement = np.mean(np.equal(*draws))
    assert abs(agreement - 0.5) < 4 * np.sqrt(0.25 / 2000)
