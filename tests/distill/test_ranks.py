# SPDX-License-Identifier: Apache-2.0
"""One process, two data-parallel ranks and two context-parallel ranks compute the same step."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

# Rows 1 and 2 go to data-parallel rank 0 and have short answers, rows 3 and 4 to rank 1.
UNEVEN = [
    {"input": "a", "output": "b"},
    {"input": "What is two plus two? " * 2, "output": "4"},
    {"input": "Say the alphabet.", "output": "a b c d e f g h i j k l m n o p q r s t u v w x y z"},
    {"input": "Count.", "output": " ".join(str(i) for i in range(30))},
]
# The response starts shortly before the border of the shards in one row and at the very end in the other.
LATE = [{"input": "p" * 40, "output": "o" * 50}, {"input": "p" * 80, "output": "o" * 10}] * 2
PROMPT_ONLY_RANK = [{"input": "long prompt " * 8, "output": "ok"}, {"input": "p" * 90, "output": "no"}] * 2
NO_PICTURE = {"input": "No picture here.", "output": "none"}
PICTURE = {"input": "Look: <image> Colour?", "output": "red", "images": ["red.png"]}
TERMS = {"loss__ce_weight": 0.3, "loss__hidden_weight": 0.1}
CP = {"train__cp_size": 2}


def build_sliding_window_model(out_dir, seed: int):
    """A Mistral that attends to the last 12 tokens: fewer than a shard, and across its border."""
    from transformers import MistralConfig, MistralForCausalLM

    from nemo_rl_ext.models.tokenizer import VOCAB_SIZE, save_byte_tokenizer

    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=12,
        initializer_range=0.2,
    )
    MistralForCausalLM(config).save_pretrained(out_dir)
    save_byte_tokenizer(out_dir)
    return out_dir


@pytest.fixture(scope="module")
def steps(tmp_path_factory, text_models, vlm_models, config_in, run_on_ranks):
    """Configurations by name, and what two ranks made of each."""
    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint

    root = tmp_path_factory.mktemp("ranks")
    mamba = tuple(build_tiny_checkpoint(root / f"mamba{seed}", seed=seed, pattern="M*-") for seed in (1, 0))
    images = {"train__global_batch_size": 2}
    windowed = tuple(build_sliding_window_model(root / f"window{seed}", seed) for seed in (1, 0))
    cases = {
        "dp": (text_models, UNEVEN, TERMS),
        "dp-micro-batch-2": (text_models, UNEVEN, {"train__micro_batch_size": 2}),
        "cp": (text_models, LATE, {**TERMS, **CP, "train__micro_batch_size": 2}),
        "cp-prompt-only-rank": (text_models, PROMPT_ONLY_RANK, {**TERMS, **CP}),
        "cp-checkpointing": (text_models, LATE, {**CP, "train__gradient_checkpointing": True}),
        "cp-sliding-window": (windowed, LATE, {**CP, "train__micro_batch_size": 2}),
        "cp-replicated": (text_models, LATE, {**CP, "train__cp_forward": "replicated"}),
        "cp-mamba": (mamba, LATE, CP),
        "cp-images": (vlm_models, [PICTURE, NO_PICTURE], {**CP, **images}),
        "dp-images": (vlm_models, [PICTURE, NO_PICTURE], images),
    }
    configs = {}
    for name, (models, records, flags) in cases.items():
        (root / name / "data").mkdir(parents=True)
        Image.new("RGB", (160, 96), (200, 30, 30)).save(root / name / "data" / "red.png")
        configs[name] = config_in(root / name, models, records, **flags)
    return configs, run_on_ranks(root / "out", configs)


def check(steps, make_trainer, name: str) -> list[dict]:
    """Loss and every gradient equal those of one process, and the ranks agree to the bit."""
    config, seen = steps[0][name], steps[1][name]
    one = config.model_copy(update={"train": config.train.model_copy(update={"cp_size": 1})})
    trainer = make_trainer(one)
    single = trainer.accumulate(trainer.prepared.train_rows[: config.train.global_batch_size])
    expected = {name: parameter.grad for parameter, name in trainer.names.items()}
    worst = 0.0
    for rank in seen:
        assert rank["tokens"] == single.tokens == sum(r["my_tokens"] for r in seen)
        assert rank["loss"] == pytest.approx(single.loss, rel=1e-5)
        assert rank["ce"] == pytest.approx(single.ce, rel=1e-5)
        assert rank["gradients"].keys() == expected.keys()
        for key, gradient in rank["gradients"].items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6)
            assert torch.equal(gradient, seen[0]["gradients"][key]), f"{key}: the ranks would drift apart"
            worst = max(worst, float((gradient - expected[key]).abs().max()))
    loss_gap = abs(seen[0]["loss"] - single.loss)
    print(
        f"{name}: tokens {[r['my_tokens'] for r in seen]}, loss gap {loss_gap:.1e}, gradient gap {worst:.1e}"
    )
    return seen


@pytest.mark.parametrize("name", ["dp", "dp-micro-batch-2"])
def test_data_parallel_ranks_equal_one(steps, make_trainer, name):
    low, high = sorted(rank["my_tokens"] for rank in check(steps, make_trainer, name))
    assert high > 2 * low, "the split was meant to be uneven"


@pytest.mark.parametrize("name", ["cp", "cp-checkpointing", "cp-sliding-window"])
def test_context_parallel_ranks_equal_one(steps, make_trainer, name):
    seen = check(steps, make_trainer, name)
    assert all(rank["sharded"] for rank in seen), "the forward pass itself must have been split"
    assert seen[1]["my_tokens"] > 2 * seen[0]["my_tokens"] > 0


def test_a_rank_with_only_prompt_tokens(steps, make_trainer):
    seen = check(steps, make_trainer, "cp-prompt-only-rank")
    assert all(rank["sharded"] for rank in seen)
    assert seen[0]["my_tokens"] == 0


@pytest.mark.parametrize("name", ["cp-replicated", "cp-mamba"])
def test_where_the_forward_cannot_be_split_the_loss_still_is(steps, make_trainer, name):
    assert not any(rank["sharded"] for rank in check(steps, make_trainer, name))


@pytest.mark.parametrize("name", ["cp-images", "dp-images"])
def test_images_whose_run_spans_shards_or_that_only_one_rank_has(steps, make_trainer, name):
    seen = check(steps, make_trainer, name)
    assert all(rank["sharded"] for rank in seen) == (name == "cp-images")
    vision = [gradient for key, gradient in seen[0]["gradients"].items() if "vision_model" in key]
    assert any(gradient.abs().max() > 0 for gradient in vision)
