# SPDX-License-Identifier: Apache-2.0
"""The embedded run's loss and advantages against NeMo-RL's own code on equal batches.

`python tests/nemo_rl/test_objective.py` in this environment writes NeMo-RL's answers to the recorded cases, which
`make test` compares without NeMo-RL.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.algorithms.utils import calculate_baseline_and_std_per_prompt
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup, Rollout
from nemo_rl_ext.grpo.training.config import LossConfig
from nemo_rl_ext.grpo.training.loss import Sampled, kept_rollouts, token_loss, token_weights
from nemo_rl_ext.manifest.rows import ManifestRow

CASES = Path(__file__).parents[1] / "grpo/training/objective_cases.json"

TRUNCATIONS = (
    {},
    {"use_importance_sampling_correction": True},
    *(
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": high,
            "truncated_importance_sampling_ratio_min": low,
        }
        for kind, low, high in (
            ("tis", None, 1.2), ("tis", 0.9, 1.2), ("icepop", 0.8, 1.3), ("seq-mask-tis", 0.9, 1.1)
        )
    ),
)  # fmt: skip
RATIOS = (
    {},
    {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3},
    {"ratio_clip_c": 3.0},
    {"disable_ppo_ratio": True},
    {"force_on_policy_ratio": True},
)
DIVERGENCES = (
    {"reference_policy_kl_penalty": 0.0},
    {},
    {"reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k1"},
    {"reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k2"},
    {"reference_policy_kl_penalty": 0.5, "use_on_policy_kl_approximation": True},
    {"reference_policy_kl_penalty": 0.5, "kl_input_clamp_value": 0.3, "kl_output_clamp_value": 0.05},
    {"reference_policy_kl_penalty": 0.5, "kl_input_clamp_value": None, "kl_output_clamp_value": None},
)
CONFIGS = [
    truncation | ratio | divergence | {"token_level_loss": token_level}
    for truncation, ratio, divergence, token_level in itertools.product(
        TRUNCATIONS, RATIOS, DIVERGENCES, (True, False)
    )
]


def batch_of(seed: int, *, rows: int = 6, tokens: int = 7, spread: float = 0.4) -> dict[str, torch.Tensor]:
    """Log-probs float64 `[rows, tokens]` of the four policies, masks, advantages; one row is masked."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    logprobs = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 2 - spread
    sample_mask = torch.ones(rows, dtype=torch.float64)
    sample_mask[seed % rows] = 0
    token_mask = torch.rand(rows, tokens, generator=generator) > 0.3
    token_mask[:, 0] = True
    return {
        "logprobs": logprobs,
        "old": logprobs + noise(spread / 2),
        "engine": logprobs + noise(spread),
        "reference": logprobs + noise(spread),
        "advantages": torch.randn(rows, generator=generator, dtype=torch.float64),
        "token_mask": token_mask.double(),
        "sample_mask": sample_mask,
    }


def of_nemo_rl(batch: dict[str, torch.Tensor], settings: dict) -> tuple[float, torch.Tensor]:
    """Loss and gradient `[rows, tokens]` by NeMo-RL's code."""

    def shifted(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (1, 0))

    logprobs = batch["logprobs"].clone().requires_grad_()
    data = BatchedDataDict(
        {
            "token_mask": shifted(batch["token_mask"]),
            "sample_mask": batch["sample_mask"],
            "advantages": shifted(batch["advantages"][:, None].expand_as(logprobs)),
            "prev_logprobs": shifted(batch["old"]),
            "generation_logprobs": shifted(batch["engine"]),
            "reference_policy_logprobs": shifted(batch["reference"]),
        }
    )
    valid = batch["token_mask"] * batch["sample_mask"][:, None]
    loss, _ = ClippedPGLossFn(ClippedPGLossConfig(**settings))(
        logprobs, data, batch["sample_mask"].sum(), valid.sum()
    )
    loss.backward()
    return loss.item(), logprobs.grad


def of_ours(batch: dict[str, torch.Tensor], settings: dict) -> tuple[float, torch.Tensor]:
    """The same by this package's, in micro-batches of two rows."""
    config = LossConfig(**settings)
    logprobs = batch["logprobs"].clone().requires_grad_()
    mask = (batch["token_mask"] * batch["sample_mask"][:, None]).bool()
    rollouts = torch.arange(len(mask))
    # A step of one update, which a forced ratio needs, has no older policy.
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
    parts = [slice(start, start + 2) for start in range(0, len(mask), 2)]
    loss = sum(token_loss(logprobs[part], sampled[part], config).total for part in parts)
    loss.backward()
    return loss.item(), logprobs.grad


def agree(ours: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor]) -> bool:
    (loss, gradient), (their_loss, their_gradient) = ours, theirs
    norms = gradient.norm() * their_gradient.norm()
    cosine = (gradient * their_gradient).sum() / norms if norms > 0 else torch.ones(())
    same_size = torch.allclose(gradient, their_gradient, rtol=1e-6, atol=1e-7)
    return bool(cosine > 1 - 1e-6 and same_size and loss == pytest.approx(their_loss, rel=1e-6, abs=1e-6))


@pytest.mark.parametrize("spread", [0.05, 0.4, 2.0])
def test_loss_and_gradient_are_nemo_rls_in_every_combination(spread):
    differing = [
        (number, settings)
        for number, settings in enumerate(CONFIGS)
        if not agree(of_ours(b := batch_of(number, spread=spread), settings), of_nemo_rl(b, settings))
    ]
    assert len(CONFIGS) == 420 and not differing


def test_the_defaults_are_nemo_rls():
    theirs = ClippedPGLossConfig()
    assert {name: getattr(theirs, name) for name in LossConfig.model_fields} == LossConfig().model_dump()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_advantages_are_nemo_rls(normalize, leave_one_out):
    generator = torch.Generator().manual_seed(0)
    row = ManifestRow.from_json({"responses_create_params": {"input": "which?"}})
    for size in range(2, 9):
        for _ in range(60):
            rewards = torch.randint(0, 4, (size,), generator=generator).float() / 3
            scored = torch.rand(size, generator=generator) > 0.2
            baseline, std = calculate_baseline_and_std_per_prompt(
                torch.zeros(size, 1), rewards, scored.float(), leave_one_out_baseline=leave_one_out
            )
            expected = rewards - baseline
            if normalize:
                # Theirs is a difference of squares in float32: where nothing varies it leaves a rest of rounding.
                expected = torch.where(std > 1e-3, expected / (std + 1e-6), expected)
            group = PromptGroup(
                row=row,
                step=0,
                rollouts=[
                    Rollout(row_id="r", segments=[], reward=reward if there else None)
                    for reward, there in zip(rewards.tolist(), scored.tolist(), strict=True)
                ],
            )
            found = torch.from_numpy(group.advantages(normalize=normalize, leave_one_out=leave_one_out))
            torch.testing.assert_close(found[scored].float(), expected[scored], rtol=1e-4, atol=1e-5)
            assert not found[~scored].any()


def test_the_recorded_cases_are_nemo_rls():
    for case in json.loads(CASES.read_text()):
        batch = {name: torch.tensor(values, dtype=torch.float64) for name, values in case["batch"].items()}
        for expected in case["answers"]:
            recorded = expected["loss"], torch.tensor(expected["gradient"], dtype=torch.float64)
            assert agree(recorded, of_nemo_rl(batch, expected["settings"])), expected["settings"]


if __name__ == "__main__":
    cases = []
    for seed, settings in enumerate((CONFIGS[:70], CONFIGS[70:280], CONFIGS[280:])):
        batch = {name: values.float().double() for name, values in batch_of(seed, rows=4, tokens=4).items()}
        answers = []
        for chosen in settings[:: 7 if seed else 3]:
            loss, gradient = of_nemo_rl(batch, chosen)
            answers.append({"settings": chosen, "loss": loss, "gradient": gradient.tolist()})
        cases.append({"batch": {name: values.tolist() for name, values in batch.items()}, "answers": answers})
    CASES.write_text(json.dumps(cases, separators=(",", ":")) + "\n")
