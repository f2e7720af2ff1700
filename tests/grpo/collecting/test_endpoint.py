# SPDX-License-Identifier: Apache-2.0
import numpy as np

from nemo_rl_ext.grpo.collecting.endpoint import seed_of_turn


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
