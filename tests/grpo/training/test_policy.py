# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json

import pytest
import torch

from nemo_rl_ext.grpo.training.batch import MediaValues, PolicyBatch, PolicyRow, collate
from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint
from nemo_rl_ext.models.tokenizer import IMAGE_ID, PAD_ID, SPECIAL_TOKENS, VOCAB_SIZE
from nemo_rl_ext.models.weights import to_engine_names

START, END = SPECIAL_TOKENS.index("<img>"), SPECIAL_TOKENS.index("</img>")


@pytest.fixture(scope="module")
def policy(tiny_checkpoint) -> Policy:
    """Shared and never stepped."""
    return Policy.from_pretrained(tiny_checkpoint)


def media(*grids: tuple[int, int], seed: int = 0) -> MediaValues:
    generator = torch.Generator().manual_seed(seed)
    num_patches = sum(height * width for height, width in grids)
    return dict(
        pixel_values=torch.randn(num_patches, 3 * 16 * 16, generator=generator),
        image_grid_hw=torch.tensor(grids),
    )


def tokens(*runs: int, text: int = 12, seed: int = 0) -> list[int]:
    """Text around one wrapped run of context tokens per entry of `runs`."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (text,), generator=generator).tolist()
    wrapped = [token for run in runs for token in (START, *[IMAGE_ID] * run, END)]
    return words[: text // 2] + wrapped + words[text // 2 :]


def batch_of(*rows: PolicyRow) -> PolicyBatch:
    return collate(rows, pad_token_id=PAD_ID)


MIXED = (
    PolicyRow(token_ids=tokens(12, 4), media=(media((6, 8)), media((4, 4), seed=1))),
    PolicyRow(token_ids=tokens(text=9, seed=1)),
    PolicyRow(token_ids=tokens(24, text=20, seed=2), media=(media((8, 12), seed=2),)),
    PolicyRow(token_ids=tokens(text=3, seed=3)),
)


@torch.no_grad()
def test_logprobs_are_those_of_the_plain_forward(policy, tiny_checkpoint):
    """Text needs nothing of ours: the transformers model, its logits, a log-softmax."""
    row = MIXED[1]
    ids = torch.tensor([row.token_ids])
    expected = torch.log_softmax(policy.model(input_ids=ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])
    torch.testing.assert_close(policy.forward_logprobs(batch_of(row)), expected[..., 0], rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_batch_equals_single_rows_whichever_have_images(policy, order):
    together = policy.forward_logprobs(batch_of(*(MIXED[i] for i in order)))
    for values, i in zip(together, order, strict=True):
        alone = policy.forward_logprobs(batch_of(MIXED[i]))[0]
        torch.testing.assert_close(values[: len(alone)], alone, rtol=0, atol=1e-5)
        assert (values[len(alone) :] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("filler", [PAD_ID, IMAGE_ID])
def test_padding_side_and_content_do_not_matter(policy, filler):
    right = batch_of(*MIXED)
    lengths = right.attention_mask.sum(-1).tolist()
    seq = right.input_ids.shape[1] + 3
    ids = torch.full((len(right), seq), filler)
    mask = torch.zeros((len(right), seq), dtype=torch.bool)
    for i, length in enumerate(lengths):
        ids[i, seq - length :] = right.input_ids[i, :length]
        mask[i, seq - length :] = True
    left = dataclasses.replace(right, input_ids=ids, attention_mask=mask)
    expected, found = policy.forward_logprobs(right), policy.forward_logprobs(left)
    for i, length in enumerate(lengths):
        torch.testing.assert_close(found[i, seq - length :], expected[i, : length - 1], rtol=0, atol=1e-5)
        assert (found[i, : seq - length] == 0).all()


@torch.no_grad()
def test_mamba_layers_do_not_see_padding(tmp_path):
    policy = Policy.from_pretrained(build_tiny_checkpoint(tmp_path / "mamba", pattern="M*M-"))
    together = policy.forward_logprobs(batch_of(*MIXED))
    for values, row in zip(together, MIXED, strict=True):
        alone = policy.forward_logprobs(batch_of(row))[0]
        torch.testing.assert_close(values[: len(alone)], alone, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_micro_batches_do_not_change_the_result(policy, size):
    batch = batch_of(*MIXED)
    torch.testing.assert_close(
        policy.forward_logprobs(batch, micro_batch_size=size),
        policy.forward_logprobs(batch),
        rtol=0,
        atol=1e-5,
    )


def test_shared_media_are_encoded_once_and_get_the_gradient_of_all_rows(policy):
    shared = media((6, 8))
    rows = [PolicyRow(token_ids=tokens(12, seed=seed), media=(shared,)) for seed in range(4)]
    apart = [dataclasses.replace(row, media=(media((6, 8)),)) for row in rows]
    batch = batch_of(*rows)
    assert [len(values["pixel_values"]) for values in batch.media] == [48]
    assert len(batch_of(*apart).media) == 4

    def gradient(part: PolicyBatch) -> torch.Tensor:
        policy.zero_grad()
        policy.forward_logprobs(part).sum().backward()
        return policy.model.vision_model.embeddings.patch_projection.weight.grad.clone()

    torch.testing.assert_close(gradient(batch), gradient(batch_of(*apart)), rtol=1e-4, atol=1e-3)
    policy.zero_grad()


def test_micro_batch_takes_only_its_own_images():
    batch = batch_of(*MIXED)
    part = batch.rows(1, 3)
    assert [values["image_grid_hw"].tolist() for values in part.media] == [[[8, 12]]]
    assert part.media == MIXED[2].media
    assert part.media_of_row == ((), (0,))
    assert batch.rows(1, 2).media == ()


def test_surplus_features_stop_the_forward(policy):
    row = PolicyRow(token_ids=tokens(453), media=(media((4 * 179, 4)),))
    with pytest.raises(ValueError, match=r"Got 716 feature vectors for 453 placeholder tokens"):
        policy.forward_logprobs(batch_of(row))


def test_placeholders_without_media_stop_the_forward(policy):
    with pytest.raises(ValueError, match=r"Got 0 feature vectors for 3 placeholder tokens"):
        policy.forward_logprobs(batch_of(PolicyRow(token_ids=tokens(3)), MIXED[1]))


def test_counts_that_only_agree_in_sum_stop_the_forward(policy):
    rows = (
        PolicyRow(token_ids=tokens(12), media=(media((4, 4)),)),
        PolicyRow(token_ids=tokens(4), media=(media((6, 8)),)),
    )
    with pytest.raises(ValueError, match=r"row 0 .*Got 4 feature vectors for 12 .*differ: \[0, 1\]"):
        policy.forward_logprobs(batch_of(*rows))


@torch.no_grad()
def test_ban_bias_then_allowed_set_then_temperature(policy):
    batch = batch_of(MIXED[1])
    allowed = (PAD_ID, *sorted({int(token) for token in MIXED[1].token_ids}))
    banned = int(MIXED[1].token_ids[4])
    logits = policy.model(input_ids=batch.input_ids).logits[:, :-1].double()
    logits[..., banned] -= 100
    kept = torch.full_like(logits, float("-inf"))
    kept[..., list(allowed)] = logits[..., list(allowed)]
    expected = torch.log_softmax(kept / 0.7, -1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    found = policy.forward_logprobs(
        dataclasses.replace(batch, allowed_token_ids=(allowed,)), banned_token_ids=[banned], temperature=0.7
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert found[0, 3] < -100

    raw = policy.forward_logprobs(
        dataclasses.replace(batch, allowed_token_ids=(allowed,)),
        banned_token_ids=[banned],
        temperature=0.7,
        logprobs_mode="raw_logprobs",
    )
    torch.testing.assert_close(raw, policy.forward_logprobs(batch), rtol=0, atol=1e-6)


def test_only_sampled_tokens_get_a_value_and_a_finite_gradient(policy):
    """The prompt lies outside the allowed set, where the restricted log-prob is -inf."""
    ids = [*tokens(12, seed=5), 40, 41]
    sampled = [False] * (len(ids) - 2) + [True, True]
    row = PolicyRow(token_ids=ids, media=(media((6, 8)),), sampled=sampled, allowed_token_ids=(40, 41))
    open_row = PolicyRow(token_ids=tokens(text=5), sampled=[False] * 3 + [True] * 2)
    logprobs = policy.forward_logprobs(batch_of(row, open_row), banned_token_ids=[IMAGE_ID])
    assert torch.nonzero(logprobs[0]).flatten().tolist() == [len(ids) - 3, len(ids) - 2]
    assert torch.nonzero(logprobs[1]).flatten().tolist() == [2, 3]
    policy.zero_grad()
    logprobs.sum().backward()
    assert all(
        torch.isfinite(value.grad).all() for value in policy.trainable.values() if value.grad is not None
    )
    policy.zero_grad()


def test_sampled_token_outside_the_allowed_set_is_named(policy):
    row = PolicyRow(token_ids=[30, 31, 32], sampled=[False, False, True], allowed_token_ids=(40, 41))
    with pytest.raises(ValueError, match=r"row 0 .*token id 32 at position 2 is not in .*allowed_token_ids"):
        policy.forward_logprobs(batch_of(row))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.tensor([[True, False, True]])}, r"one block of real tokens"),
        ({"attention_mask": torch.zeros((1, 3), dtype=torch.bool)}, r"one block of real tokens"),
        ({"attention_mask": torch.ones((1, 2), dtype=torch.bool)}, r"one shape"),
        ({"media_of_row": ((0,),)}, r"names 1 media sets, but 0 are given"),
        ({"media_of_row": ((), ())}, r"one entry per row \(1\), found 2"),
        ({"sampled_mask": torch.ones((1, 3), dtype=torch.bool)}, r"expected \[1, 2\]"),
        (
            {
                "media": ({"pixel_values": torch.zeros(5, 768), "image_grid_hw": torch.tensor([[2, 2]])},),
                "media_of_row": ((0,),),
            },
            r"hold 5 patches but image_grid_hw describes 4",
        ),
    ],
)
def test_inconsistent_batch_is_refused(policy, change, message):
    batch = batch_of(PolicyRow(token_ids=[30, 31, 32]))
    with pytest.raises(ValueError, match=message):
        policy.forward_logprobs(dataclasses.replace(batch, **change))


def nll(policy: Policy, rows=MIXED) -> torch.Tensor:
    return -policy.forward_logprobs(batch_of(*rows)).mean()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_steps_lower_the_loss_and_leave_the_engine_a_twin(tiny_checkpoint, precision):
    policy = Policy.from_pretrained(tiny_checkpoint, precision=precision, lr=1e-3)
    first = nll(policy).item()
    for _ in range(8):
        nll(policy).backward()
        norm = policy.optimizer_step()
        assert norm > 0
    assert nll(policy).item() < first - 0.05
    weights = policy.state_dict_for_engine()
    assert {value.dtype for value in weights.values() if value.is_floating_point()} == {
        getattr(torch, precision)
    }
    # RADIO has no layer scale in the engine: to_engine_names refuses a trained one.
    expected = to_engine_names(policy.model.state_dict())
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    weights_before = {name: value.clone() for name, value in weights.items()}
    with torch.no_grad():
        next(iter(policy.trainable.values())).add_(1)
    assert all(torch.equal(weights[name], weights_before[name]) for name in weights)


def test_small_steps_survive_a_bfloat16_forward(tiny_checkpoint):
    policy = Policy.from_pretrained(tiny_checkpoint, precision="bfloat16", lr=1e-6)
    name, value = next((n, v) for n, v in policy.trainable.items() if n.endswith("norm.weight"))
    before = policy.masters[name].clone()
    for _ in range(3):
        nll(policy).backward()
        policy.optimizer_step()
    assert torch.equal(value, torch.ones_like(value))
    assert ((policy.masters[name] - before).abs() > 1e-6).any()


def test_gradient_is_clipped(tiny_checkpoint):
    policy = Policy.from_pretrained(tiny_checkpoint, max_grad_norm=1e-3)
    seen = []
    policy.optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            torch.stack([v.grad.norm() for v in policy.masters.values() if v.grad is not None])
        )
    )
    nll(policy).backward()
    norm = policy.optimizer_step()
    assert norm > 1e-3
    assert float(seen[0].norm()) == pytest.approx(1e-3, rel=1e-3)


def test_step_without_images_leaves_the_vision_tower_alone(tiny_checkpoint):
    policy = Policy.from_pretrained(tiny_checkpoint)
    nll(policy).backward()
    policy.optimizer_step()
    weight = policy.model.vision_model.embeddings.patch_projection.weight
    before = weight.detach().clone()
    nll(policy, MIXED[1::2]).backward()
    policy.optimizer_step()
    assert torch.equal(weight, before)


def test_bad_gradient_is_refused_without_a_step(tiny_checkpoint):
    policy = Policy.from_pretrained(tiny_checkpoint)
    with pytest.raises(ValueError, match="without a gradient"):
        policy.optimizer_step()
    before = {name: value.detach().clone() for name, value in policy.trainable.items()}
    (nll(policy) * float("nan")).backward()
    with pytest.raises(ValueError, match="gradient norm is nan"):
        policy.optimizer_step()
    assert all(torch.equal(value, before[name]) for name, value in policy.trainable.items())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resumed_training_equals_uninterrupted_training(tiny_checkpoint, tmp_path, precision):
    def step(policy: Policy) -> None:
        nll(policy).backward()
        policy.optimizer_step()

    policy = Policy.from_pretrained(tiny_checkpoint, precision=precision)
    step(policy)
    policy.save(tmp_path / "step_1")
    step(policy)
    resumed = Policy.from_pretrained(tiny_checkpoint, precision=precision)
    resumed.load(tmp_path / "step_1")
    step(resumed)
    for name, value in policy.masters.items():
        assert torch.equal(resumed.masters[name], value), name
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_1"]
    assert {entry.suffix for entry in (tmp_path / "step_1").iterdir()} == {".safetensors", ".json"}


def test_policy_state_of_another_model_is_refused_unchanged(tiny_checkpoint, tmp_path):
    other = Policy.from_pretrained(build_tiny_checkpoint(tmp_path / "other", pattern="*-"))
    other.save(tmp_path / "state")
    policy = Policy.from_pretrained(tiny_checkpoint)
    before = {name: value.detach().clone() for name, value in policy.trainable.items()}
    with pytest.raises(ValueError, match=r"saved by another model: \d+ parameters differ"):
        policy.load(tmp_path / "state")
    assert all(torch.equal(value, before[name]) for name, value in policy.trainable.items())


def test_incomplete_policy_state_is_refused(policy, tmp_path):
    policy.save(tmp_path / "state")
    with pytest.raises(ValueError, match="not empty"):
        policy.save(tmp_path / "state")
    (tmp_path / "state" / "optimizer.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="is not a saved policy"):
        policy.load(tmp_path / "state")


def test_unusable_setting_is_refused(tiny_checkpoint, policy, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="policy precision"):
        Policy.from_pretrained(tiny_checkpoint, precision="float16")
    with pytest.raises(ValueError, match="found nothing"):
        Policy.from_pretrained(tmp_path / "missing")
    with pytest.raises(ValueError, match="temperature: expected 0"):
        policy.forward_logprobs(batch_of(MIXED[1]), temperature=-1.0)
    with pytest.raises(ValueError, match="logprobs_mode: expected"):
        policy.forward_logprobs(batch_of(MIXED[1]), logprobs_mode="logits")
    monkeypatch.setenv("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")
    with pytest.raises(ValueError, match="last guard"):
        Policy.from_pretrained(tiny_checkpoint)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    path = build_tiny_checkpoint(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["hybrid_override_pattern"] = "*-*-*-"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="weights do not fit the model"):
        Policy.from_pretrained(path)
