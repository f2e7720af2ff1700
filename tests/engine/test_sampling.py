# SPDX-License-Identifier: Apache-2.0
"""What is sampled follows the recorded log-probs, turn by turn: on the engine directly and as Gym's agents ask."""

import dataclasses
import itertools

import numpy as np
import pytest

from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.grpo.collecting.endpoint import Completions
from nemo_rl_ext.grpo.collecting.player import Player
from nemo_rl_ext.grpo.engine.requests import GenerationRequest
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.policy import MediaPolicy

pytestmark = pytest.mark.engine

ROLLOUTS = 400


@pytest.fixture(scope="module")
def sampling(in_process):
    """One letter of two per turn, as in the demo, whose answers hide a shared seed best."""
    letters = [in_process.renderer.tokenizer(x, add_special_tokens=False).input_ids[0] for x in "lr"]
    return dataclasses.replace(in_process.sampling, max_new_tokens=1, allowed_token_ids=tuple(letters))


def residuals(sampling, token_ids, logprobs):
    """Each draw less its probability, in deviations; `[rollouts, turns]` of zero mean and unit variance."""
    left = np.asarray(token_ids) == sampling.allowed_token_ids[0]
    p = np.where(left, np.exp(logprobs), 1 - np.exp(logprobs))
    return (left - p) / np.sqrt(p * (1 - p))


def chi_squares(sampling, token_ids, logprobs):
    """Of the frequencies in each turn, and of the independence of two turns; one degree of freedom each."""
    of = residuals(sampling, np.array(token_ids), np.array(logprobs, dtype=np.float64))
    assert of.shape == (ROLLOUTS, 2)
    return [float(values.sum() ** 2 / ROLLOUTS) for values in (of[:, 0], of[:, 1], of[:, 0] * of[:, 1])]


def test_turns_of_the_own_player_are_drawn_from_the_recorded_distribution(in_process, sampling):
    row = ManifestRow.from_json(
        {
            "responses_create_params": {"input": "which?"},
            "turns": [[{"role": "user", "content": "and now?"}]],
        }
    )
    player = Player(
        engine=in_process.client,
        pool=in_process.pool,
        renderer=in_process.renderer,
        max_turns=2,
        receipts=False,
    )
    played = [
        conversation
        for step in range(ROLLOUTS // 40)
        for conversation in player.play([row], sampling, 40, step=step)[0]
    ]
    ids = [[int(turn.token_ids[0]) for turn in c.turns] for c in played]
    logprobs = [[float(turn.logprobs[0]) for turn in c.turns] for c in played]
    assert max(chi_squares(sampling, ids, logprobs)) < 12


def ask(in_process, sampling, seeds, *, shared):
    """Two turns per rollout, as an agent asks for them: its seed goes with every one of them."""
    completions = Completions(
        engine=in_process.client,
        renderer=in_process.renderer,
        sampling=sampling,
        media_policy=MediaPolicy(),
        model_name="m",
    )
    ids, logprobs = [], []
    for seed in seeds:
        messages = [{"role": "user", "content": "which?"}]
        drawn = []
        for turn in range(2):
            if shared:
                (result,) = in_process.client.generate(
                    [
                        GenerationRequest(
                            prompt_token_ids=in_process.renderer.chat(messages),
                            max_new_tokens=1,
                            seed=seed,
                            allowed_token_ids=sampling.allowed_token_ids,
                            banned_token_ids=sampling.banned_token_ids,
                        )
                    ]
                )
                drawn.append((int(result.outputs[0].token_ids[0]), float(result.outputs[0].logprobs[0])))
            else:
                (choice,) = completions.create({"messages": messages, "seed": seed})["choices"]
                drawn.append((choice["token_ids"][0], choice["logprobs"]["content"][0]["logprob"]))
            messages = [
                *messages,
                {"role": "assistant", "content": "l"},
                {"role": "user", "content": f"{turn}?"},
            ]
        ids.append([token for token, _ in drawn])
        logprobs.append([logprob for _, logprob in drawn])
    return ids, logprobs


def test_turns_of_an_agent_are_too_although_it_sends_one_seed_with_all(in_process, sampling):
    seeds = range(1000, 1000 + ROLLOUTS)
    assert max(chi_squares(sampling, *ask(in_process, sampling, seeds, shared=False))) < 12


def test_the_same_seed_in_every_turn_would_show(in_process, sampling):
    *_, independence = chi_squares(sampling, *ask(in_process, sampling, range(ROLLOUTS), shared=True))
    assert independence > 100


@pytest.mark.parametrize("filtering", [False, True], ids=["trained", "filtered"])
def test_a_later_turn_beyond_the_context_ends_the_conversation(in_process, filtering):
    from nemo_rl_ext.grpo.collecting.assembly import AlignmentOptions
    from nemo_rl_ext.grpo.collecting.collector import Collector

    rows = [
        ManifestRow.from_json(
            {
                "responses_create_params": {"input": "which?" if first else "x " * 600},
                "turns": [[{"role": "user", "content": "x " * 600}]],
            }
        )
        for first in (True, False)
    ]
    collector = Collector(
        player=Player(
            engine=in_process.client,
            pool=in_process.pool,
            renderer=in_process.renderer,
            max_turns=2,
            receipts=False,
        ),
        pool=in_process.pool,
        reward=lambda row, text: 1.0,
        sampling=in_process.sampling,
        options=AlignmentOptions(
            enabled=True, share_static=True, max_model_len=None, ordered=True, overlong_filtering=filtering
        ),
        num_generations=2,
    )
    outgrown, refused = (group.rollouts for group in collector.collect(rows, step=0))
    assert all(rollout.masked and rollout.reward is None for rollout in refused)
    assert {*itertools.chain(*(r.extra_reasons for r in refused))} == {Reason.GENERATION_FAILED}
    assert all(rollout.masked is filtering and rollout.reward == 0.0 for rollout in outgrown)
    expected = {Reason.CONTEXT_OUTGROWN} | ({Reason.OVERLONG_FILTERED} if filtering else set())
    assert {*itertools.chain(*(r.extra_reasons for r in outgrown))} == expected
