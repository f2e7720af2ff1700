# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from nemo_rl_ext.grpo.training.loss import clipped_policy_loss


def loss(logprobs, engine, advantages, weights):
    return clipped_policy_loss(
        torch.tensor(logprobs, requires_grad=True),
        torch.tensor(engine),
        torch.tensor(advantages),
        torch.tensor(weights),
        clip_min=0.2,
        clip_max=0.2,
    )


def test_equal_policies_give_the_advantage_itself():
    sums = loss([[-1.0, -2.0]], [[-1.0, -2.0]], [0.5], [[1.0, 1.0]])
    assert sums.loss.item() == pytest.approx(-1.0)
    assert (sums.num_tokens, sums.num_clipped) == (2, 0)


def test_a_ratio_beyond_the_clip_stops_pulling_in_its_direction():
    logprobs = torch.tensor([[-0.5]], requires_grad=True)
    sums = clipped_policy_loss(
        logprobs, torch.tensor([[-1.0]]), torch.tensor([1.0]), torch.ones(1, 1), clip_min=0.2, clip_max=0.2
    )
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-1.2)
    assert sums.num_clipped == 1
    assert logprobs.grad.item() == 0


def test_a_masked_token_contributes_nothing_even_with_an_infinite_ratio():
    logprobs = torch.tensor([[-1.0, 0.0]], requires_grad=True)
    engine = torch.tensor([[-1.0, -float("inf")]])
    sums = clipped_policy_loss(
        logprobs, engine, torch.tensor([1.0]), torch.tensor([[1.0, 0.0]]), clip_min=0.2, clip_max=0.2
    )
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-1.0)
    assert sums.num_tokens == 1
    assert logprobs.grad.tolist() == [[-1.0, 0.0]]


def test_micro_batches_add_up_to_the_whole():
    torch.manual_seed(0)
    logprobs, engine = -torch.rand(6, 5), -torch.rand(6, 5)
    advantages, weights = torch.randn(6), (torch.rand(6, 5) > 0.4).float()

    def sums(rows):
        return clipped_policy_loss(
            logprobs[rows], engine[rows], advantages[rows], weights[rows], clip_min=0.2, clip_max=0.3
        )

    parts = [sums(slice(0, 1)), sums(slice(1, 4)), sums(slice(4, 6))]
    whole = sums(slice(0, 6))
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item(), abs=1e-5)
    assert sum(part.num_tokens for part in parts) == whole.num_tokens
