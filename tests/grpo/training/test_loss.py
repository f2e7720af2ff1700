# SPDX-License-Identifier: Apache-2.0
"""The loss on answers that NeMo-RL's code gave (tests/nemo_rl/test_objective.py compares and writes them)."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from nemo_rl_ext.grpo.training.config import LossConfig
from nemo_rl_ext.grpo.training.loss import Sampled, kept_rollouts, token_loss, token_weights

CASES = json.loads((Path(__file__).parent / "objective_cases.json").read_text())


def loss_and_gradient(batch, config, cuts=()):
    """The loss of a recorded batch and its gradient, rows cut into micro-batches."""
    logprobs = batch["logprobs"].clone().requires_grad_()
    mask = (batch["token_mask"] * batch["sample_mask"][:, None]).bool()
    rollouts = torch.arange(len(mask))
    old = batch["logprobs"] if config.force_on_policy_ratio else batch["old"]
    sampled = Sampled(
        engine=batch["engine"],
        mask=mask,
        weights=token_weights(mask, rollouts, token_level=config.token_level_loss).double(),
        advantages=batch["advantages"],
        old=old,
        reference=batch["reference"] if config.reference_policy_kl_penalty else None,
        kept=kept_rollouts(old, batch["engine"], mask, rollouts, config),
    )
    edges = [0, *cuts, len(mask)]
    parts = [slice(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
    loss = sum(token_loss(logprobs[part], sampled[part], config).total for part in parts)
    loss.backward()
    return loss.item(), logprobs.grad


@pytest.mark.parametrize("cuts", [(), (1, 3)], ids=["whole", "micro-batches"])
def test_loss_and_gradient_are_the_recorded_ones_of_nemo_rl(cuts):
    compared = 0
    for case in CASES:
        batch = {name: torch.tensor(values, dtype=torch.float64) for name, values in case["batch"].items()}
        for answer in case["answers"]:
            loss, gradient = loss_and_gradient(batch, LossConfig(**answer["settings"]), cuts)
            expected = torch.tensor(answer["gradient"], dtype=torch.float64)
            assert loss == pytest.approx(answer["loss"], rel=1e-6, abs=1e-6), answer["settings"]
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7, msg=str(answer["settings"]))
            compared += 1
    assert compared == 74


def test_a_ratio_beyond_the_clip_stops_pulling_in_its_direction():
    logprobs = torch.tensor([[-0.5]], requires_grad=True)
    sampled = Sampled(
        engine=torch.tensor([[-0.5]]),
        mask=torch.ones(1, 1, dtype=torch.bool),
        weights=torch.ones(1, 1),
        advantages=torch.tensor([1.0]),
        old=torch.tensor([[-1.0]]),
    )
    found = token_loss(logprobs, sampled, LossConfig())
    found.total.backward()
    assert found.total.item() == pytest.approx(-1.2)
    assert found.clipped.tolist() == [True] and logprobs.grad.item() == 0


def test_a_masked_token_contributes_nothing_even_with_an_infinite_ratio():
    logprobs = torch.tensor([[-1.0, 0.0]], requires_grad=True)
    sampled = Sampled(
        engine=torch.tensor([[-1.0, -float("inf")]]),
        mask=torch.tensor([[True, False]]),
        weights=torch.tensor([[1.0, 0.0]]),
        advantages=torch.tensor([1.0]),
        old=torch.tensor([[-1.0, -float("inf")]]),
    )
    found = token_loss(logprobs, sampled, LossConfig(use_importance_sampling_correction=True))
    found.total.backward()
    assert found.total.item() == pytest.approx(-1.0)
    assert logprobs.grad.tolist() == [[-1.0, 0.0]]


def test_a_conversation_in_several_sequences_counts_once_in_a_sequence_level_loss():
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    rollouts = torch.tensor([0, 1, 1, 2])
    shares = token_weights(mask, rollouts, token_level=False).sum(-1)
    assert shares.tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 3, 0.0])
    assert token_weights(mask, rollouts, token_level=True)[mask].tolist() == pytest.approx([0.2] * 5)


def test_a_rollout_is_dropped_by_the_ratio_of_all_its_sequences():
    config = LossConfig(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=1.1,
        truncated_importance_sampling_ratio_min=0.9,
    )
    old = torch.tensor([[0.3, 0.0], [-0.3, 0.0], [0.3, 0.3]])
    mask = torch.tensor([[True, False], [True, False], [True, True]])
    kept = kept_rollouts(old, torch.zeros(3, 2), mask, torch.tensor([0, 0, 1]), config)
    assert kept.tolist() == [True, True, False], "each half of the first lies outside, the whole does not"


@pytest.mark.parametrize(
    "settings",
    [
        {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"},
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0},
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 2.0,
        },
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 2.0,
            "truncated_importance_sampling_ratio_min": 3.0,
        },
        {"ratio_clip_c": 1.0},
    ],
)
def test_what_nemo_rl_would_refuse_is_refused(settings):
    with pytest.raises(ValidationError):
        LossConfig(**settings)
