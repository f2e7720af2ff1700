# SPDX-License-Identifier: Apache-2.0
"""A whole step against the same step written out row by row, on the tiny checkpoint."""

import dataclasses
import itertools
import math

import pytest
import torch

from nemo_rl_ext.grpo.collecting.player import Sampling
from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup, Rollout
from nemo_rl_ext.grpo.training.batch import collate
from nemo_rl_ext.grpo.training.config import LossConfig
from nemo_rl_ext.grpo.training.gaps import measure_gaps
from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.grpo.training.rows import row_of, training_rows
from nemo_rl_ext.grpo.training.trainer import Objective, train_step
from nemo_rl_ext.grpo.training.weight_history import WeightHistory, snapshot
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.models.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from nemo_rl_ext.rollout.metrics import AlignmentMetrics
from nemo_rl_ext.rollout.segments import Segment

ROW = ManifestRow.from_json({"responses_create_params": {"input": "which?"}})
FIRST = len(SPECIAL_TOKENS)
SAMPLING = Sampling(temperature=0.7, max_new_tokens=4, banned_token_ids=tuple(range(FIRST)))


@pytest.fixture(scope="module")
def policy(tiny_checkpoint) -> Policy:
    return Policy.from_pretrained(tiny_checkpoint)


def segment(generator, *lengths, spans=None):
    """Answers of these lengths, each after two tokens of a prompt, with log-probs as an engine may have drawn them."""

    def ids(number):
        return torch.randint(FIRST, VOCAB_SIZE, (number,), generator=generator)

    log = []
    for length in lengths:
        log += [
            {"role": "user", "token_ids": ids(2)},
            {
                "role": "assistant",
                "token_ids": ids(length),
                "generation_logprobs": -math.log(VOCAB_SIZE - FIRST)
                + 0.3 * torch.randn(length, generator=generator),
                "weight_versions": spans or ((0, 0, length),),
            },
        ]
    return Segment(message_log=log)


def groups():
    """Two prompts of four rollouts: one with two sequences, one with mixed weights, a masked and an unscored one."""
    generator = torch.Generator().manual_seed(3)
    rollouts = [
        Rollout(row_id="a", segments=[segment(generator, 3), segment(generator, 2, 1)], reward=1.0),
        Rollout(row_id="a", segments=[segment(generator, 4, spans=((0, 0, 2), (1, 2, 4)))], reward=0.0),
        Rollout(row_id="a", segments=[segment(generator, 1)], reward=0.25, masked=True),
        Rollout(row_id="a", segments=[segment(generator, 2)], reward=None, masked=True),
        *(Rollout(row_id="b", segments=[segment(generator, n)], reward=n / 4) for n in (1, 2, 3, 4)),
    ]
    return [PromptGroup(row=ROW, rollouts=part, step=0) for part in (rollouts[:4], rollouts[4:])]


def objective(loss, **changes):
    settings = dict(normalize_rewards=True, use_leave_one_out_baseline=True, rollouts_per_update=None)
    return Objective(loss=loss, micro_batch_size=2, **(settings | changes))


def step(policy, of, reference=None):
    """The metrics of a step, and its updates' gradients; the policy is not updated."""
    gradients = []

    def record():
        gradients.append(torch.cat([value.grad.flatten() for value in with_gradient(policy)]))
        return 0.0

    policy.optimizer_step = record
    try:
        found = train_step(
            policy, groups(), sampling=SAMPLING, objective=of, metrics=AlignmentMetrics(), reference=reference
        )
    finally:
        del policy.optimizer_step
    return found, gradients


def with_gradient(policy):
    return [value for value in policy.trainable.values() if value.grad is not None]


def written_out(policy, of, update):
    """Loss and gradient of the rollouts of one update, one row after the other, as the formulas are in the papers."""
    loss, terms = of.loss, []
    numbered = list(enumerate(r for group in groups() for r in group.rollouts))
    advantages = [
        a for g in groups() for a in g.advantages(normalize=True, leave_one_out=of.use_leave_one_out_baseline)
    ]
    for number, rollout in numbered[update]:
        tokens = []
        for part in rollout.segments if not rollout.masked else ():
            row = row_of(part)
            logprobs = policy.forward_logprobs(
                collate([row], pad_token_id=0), banned_token_ids=SAMPLING.banned_token_ids, temperature=0.7
            )[0]
            for place in row.sampled.nonzero().flatten().tolist():
                now, engine = logprobs[place - 1], row.engine_logprobs[place].item()
                before, gain = now.item(), advantages[number]
                value = -gain * torch.exp(now - before)  # within the clip: the policy is the old one
                if loss.use_importance_sampling_correction:
                    weight = math.exp(before - engine)
                    if loss.truncated_importance_sampling_ratio is not None:
                        weight = min(weight, loss.truncated_importance_sampling_ratio)
                    value = value * weight
                if loss.reference_policy_kl_penalty:
                    # The reference is the policy itself: no divergence, and no gradient of one.
                    value = value + 0.0 * now
                tokens.append(value)
        if tokens:
            terms.append(tokens)
    if loss.token_level_loss:
        total = sum(itertools.chain(*terms)) / sum(map(len, terms))
    else:
        total = sum(sum(tokens) / len(tokens) for tokens in terms) / len(terms)
    policy.zero_grad()
    total.backward()
    gradient = torch.cat([value.grad.flatten() for value in with_gradient(policy)])
    policy.zero_grad()
    return total.item(), gradient


CORRECTIONS = (
    {},
    {"use_importance_sampling_correction": True},
    {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.05,
    },
)


@pytest.mark.parametrize("token_level", [True, False], ids=["tokens", "rollouts"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=["plain", "corrected", "truncated"])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_step_is_what_its_formula_says(policy, token_level, correction, penalty):
    loss = LossConfig(token_level_loss=token_level, reference_policy_kl_penalty=penalty, **correction)
    of = objective(loss)
    found, (gradient,) = step(policy, of, snapshot(policy))
    expected, expected_gradient = written_out(policy, of, slice(0, 8))
    assert found["train/loss"] == pytest.approx(expected, abs=1e-6)
    cosine = torch.nn.functional.cosine_similarity(gradient.double(), expected_gradient.double(), dim=0)
    assert cosine > 1 - 1e-6
    assert gradient.norm().item() == pytest.approx(expected_gradient.norm().item(), rel=1e-5)
    assert found["train/num_tokens"] == 20 and found["train/num_sequences"] == 9
    assert found["train/clip_fraction"] == 0 and found["train/probs_ratio"] == pytest.approx(1.0)


def test_several_updates_take_their_own_rollouts_and_the_policy_before_the_first(policy):
    of = objective(LossConfig(reference_policy_kl_penalty=0.0), rollouts_per_update=4)
    _, gradients = step(policy, of)
    assert len(gradients) == 2
    for number, gradient in enumerate(gradients):
        _, expected = written_out(policy, of, slice(4 * number, 4 * number + 4))
        assert torch.nn.functional.cosine_similarity(gradient.double(), expected.double(), dim=0) > 1 - 1e-6


def test_later_updates_are_clipped_against_the_policy_before_the_step(tiny_checkpoint):
    policy = Policy.from_pretrained(tiny_checkpoint, lr=5e-3)
    of = objective(LossConfig(reference_policy_kl_penalty=0.01), rollouts_per_update=1)
    found = train_step(
        policy,
        groups(),
        sampling=SAMPLING,
        objective=of,
        metrics=AlignmentMetrics(),
        reference=snapshot(policy),
    )
    assert found["train/clip_fraction"] > 0
    assert found["train/probs_ratio_min"] < 1 < found["train/probs_ratio_max"]
    assert found["train/kl_penalty"] > 0


def test_a_gap_is_measured_on_the_weights_that_drew_each_token(policy):
    """The answer with an update in it counts up to the update; the share says what was left out."""
    history = WeightHistory(2)
    history.keep(0, policy)
    metrics = AlignmentMetrics()
    media = ({"pixel_values": torch.zeros(0)},)
    rows = [dataclasses.replace(row, media=media) for row in training_rows(groups(), normalize=True)]

    def half_a_nat_above(part):
        width = max(len(row.token_ids) for row in part)
        padded = [
            torch.nn.functional.pad(row.engine_logprobs, (0, width - len(row.token_ids))) for row in part
        ]
        return torch.stack(padded)[:, 1:] + 0.5

    measure_gaps(policy, rows, forward=half_a_nat_above, micro_batch_size=4, metrics=metrics, history=history)
    found = metrics.flush()
    # Generations 0 and 1 of both prompts: 3 + 3 and 4 tokens, two of them after the update, then 1 and 2.
    assert found["alignment/logprob_gap_share"] == pytest.approx(11 / 13)
    assert found["alignment/logprob_gap_matched_mean"] == pytest.approx(0.5, abs=1e-6)
