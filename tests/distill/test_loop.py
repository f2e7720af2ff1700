# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from nemo_rl_ext.distill import checkpoint  # noqa: E402
from nemo_rl_ext.distill.batch import my_micro_batches  # noqa: E402
from nemo_rl_ext.distill.config import TrainConfig  # noqa: E402
from nemo_rl_ext.distill.loop import learning_rate, run  # noqa: E402
from nemo_rl_ext.distill.tiny import build_tiny_text_checkpoint  # noqa: E402
from nemo_rl_ext.manifest.row_order import RowOrder  # noqa: E402

RECORDS = [
    {"input": "a", "output": "b"},
    {"input": "What is two plus two? " * 3, "output": "4"},
    {"input": "Say the alphabet.", "output": "a b c d e f g h i j k l m n o p"},
    {"input": "Count.", "output": " ".join(str(i) for i in range(20))},
]


def gradients(trainer, rows):
    result = trainer.accumulate(rows)
    return result, {name: parameter.grad.clone() for parameter, name in trainer.names.items()}


def assert_equal_gradients(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


def read_metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("micro_batch_size", [2, 3, 4])
def test_accumulation_is_exact_for_uneven_micro_batches(
    text_models, make_config, make_trainer, micro_batch_size
):
    terms = {"loss__ce_weight": 0.5, "loss__hidden_weight": 0.2}
    one = make_trainer(make_config(text_models, RECORDS, **terms))
    result, expected = gradients(one, one.prepared.train_rows)
    other = make_trainer(make_config(text_models, RECORDS, train__micro_batch_size=micro_batch_size, **terms))
    other_result, got = gradients(other, other.prepared.train_rows)
    assert other_result.loss == pytest.approx(result.loss, rel=1e-5)
    assert_equal_gradients(got, expected)


def test_the_loss_is_the_mean_over_response_tokens_and_not_of_means(text_models, make_config, make_trainer):
    trainer = make_trainer(make_config(text_models, RECORDS, loss__kd_weight=0.0, loss__ce_weight=1.0))
    rows = trainer.prepared.train_rows
    result = trainer.accumulate(rows)
    per_row = []
    for row in rows:
        ids = torch.from_numpy(row.ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = trainer.model(ids).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        per_row.append(losses[row.response_start - 1 :])
    assert result.loss == pytest.approx(float(torch.cat(per_row).mean()), rel=1e-5)
    assert result.tokens == sum(len(losses) for losses in per_row)


def test_prompt_labels_change_nothing_and_a_response_token_does(text_models, make_config, make_trainer):
    """Proved by gradient, with the prompt's labels changed apart from its input ids."""
    trainer = make_trainer(make_config(text_models, RECORDS, loss__kd_weight=1.0, loss__ce_weight=1.0))
    (micro,) = list(trainer._micro_batches(trainer.prepared.train_rows[2:3]))

    def gradient(labels):
        trainer.model.zero_grad()
        trainer._sums(dataclasses.replace(micro, labels=labels)).loss.backward()
        return {name: p.grad.clone() for p, name in trainer.names.items()}

    expected = gradient(micro.labels)
    changed = torch.where(micro.mask, micro.labels, (micro.labels + 17) % 256)
    assert (changed != micro.labels).sum() == (~micro.mask).sum() > 10
    after = gradient(changed)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    one_token = micro.labels.clone()
    position = micro.mask[0].nonzero()[3, 0]
    one_token[0, position] = (one_token[0, position] + 1) % 256
    after = gradient(one_token)
    assert (after["lm_head.weight"] - expected["lm_head.weight"]).abs().max() > 1e-3


def test_only_response_positions_reach_the_output_layer(text_models, make_config, make_trainer):
    """The gradient of the logits is zero at every position that predicts a prompt token."""
    trainer = make_trainer(make_config(text_models, RECORDS))
    (micro,) = list(trainer._micro_batches(trainer.prepared.train_rows[1:2]))
    seen = []
    handle = trainer.model.lm_head.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1]))
    trainer._sums(micro)
    handle.remove()
    assert seen == [2], "'4' and EOS, out of 68 positions"


def test_padding_does_not_change_a_row(text_models, make_config, make_trainer):
    trainer = make_trainer(make_config(text_models, RECORDS, train__micro_batch_size=4))
    rows = trainer.prepared.train_rows
    alone = sum(trainer.accumulate([row]).loss * row.num_response_tokens for row in rows)
    together = trainer.accumulate(rows)
    assert together.loss * together.tokens == pytest.approx(alone, rel=1e-5)


def test_rows_of_padded_vocabularies_stay_out_of_the_loss(tmp_path, text_models, make_config, make_trainer):
    """A teacher whose output layer has extra rows scores as it does without them."""
    from nemo_rl_ext.models.tokenizer import VOCAB_SIZE

    teacher = transformers.AutoModelForCausalLM.from_pretrained(text_models[1])
    teacher.resize_token_embeddings(VOCAB_SIZE + 52, mean_resizing=False)
    with torch.no_grad():
        teacher.lm_head.weight[VOCAB_SIZE:] = 5.0
    teacher.save_pretrained(tmp_path / "padded")
    transformers.AutoTokenizer.from_pretrained(text_models[1]).save_pretrained(tmp_path / "padded")
    plain = make_trainer(make_config(text_models, RECORDS))
    padded = make_trainer(make_config((text_models[0], tmp_path / "padded"), RECORDS))
    rows = plain.prepared.train_rows
    assert padded.accumulate(rows).loss == pytest.approx(plain.accumulate(rows).loss, rel=1e-6)


def test_a_student_equal_to_its_teacher_has_nothing_to_learn(text_models, make_config, make_trainer):
    same = (text_models[1], text_models[1])
    for direction in ("forward", "reverse"):
        trainer = make_trainer(make_config(same, RECORDS, loss__direction=direction, loss__hidden_weight=1.0))
        result, grads = gradients(trainer, trainer.prepared.train_rows)
        assert abs(result.loss) < 1e-6
        assert max(g.abs().max() for g in grads.values()) < 1e-5


def test_hidden_term_needs_equal_sizes(tmp_path, text_models, make_config, make_trainer):
    wide = build_tiny_text_checkpoint(tmp_path / "wide", hidden_size=48)
    with pytest.raises(ValueError, match="32 dimensions and the teacher's 48"):
        make_trainer(make_config((text_models[0], wide), RECORDS, loss__hidden_weight=1.0))
    trainer = make_trainer(make_config((text_models[0], wide), RECORDS))
    assert math.isfinite(trainer.accumulate(trainer.prepared.train_rows).loss)


def test_resuming_gives_the_weights_of_an_uninterrupted_run(text_models, make_config, tmp_path):
    settings = {"train__iters": 6, "train__lr": 1e-2, "train__lr_warmup_iters": 2, "train__weight_decay": 0.1}
    settings |= {"save_interval": 3, "train__global_batch_size": 3}
    whole = make_config(text_models, RECORDS, output_dir=tmp_path / "whole", **settings)
    run(whole)
    stopped = make_config(text_models, RECORDS, output_dir=tmp_path / "stopped", **settings)
    run(stopped)
    for path in (tmp_path / "stopped" / "checkpoints").glob("step_000006/*"):
        path.unlink() if path.is_file() else None
    (tmp_path / "stopped" / "checkpoints" / "step_000006" / "state.json").unlink(missing_ok=True)
    assert checkpoint.newest(tmp_path / "stopped").step == 3
    run(stopped.model_copy(update={"resume": True}))
    a, b = (checkpoint.newest(tmp_path / name) for name in ("whole", "stopped"))
    assert a.step == b.step == 6
    from safetensors.torch import load_file

    for name in ("model/model.safetensors", "optimizer.safetensors"):
        left, right = load_file(a.path / name), load_file(b.path / name)
        assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
    steps = [row["step"] for row in read_metrics(tmp_path / "stopped")]
    assert steps == [1, 2, 3, 4, 5, 6]
    losses = [[row["train/loss"] for row in read_metrics(tmp_path / name)] for name in ("whole", "stopped")]
    assert losses[0] == losses[1]


def test_resuming_another_run_is_refused(text_models, make_config):
    run(make_config(text_models, RECORDS, train__iters=1))
    changed = make_config(text_models, RECORDS, train__iters=2, resume=True, loss__temperature=2.0)
    with pytest.raises(ValueError, match=r"loss.temperature: 1.0 -> 2.0"):
        run(changed)
    with pytest.raises(ValueError, match="data_digest"):
        run(make_config(text_models, RECORDS[:3], train__iters=2, resume=True))
    with pytest.raises(ValueError, match="not empty"):
        run(make_config(text_models, RECORDS, train__iters=2))


def test_a_run_that_died_before_its_first_checkpoint_starts_again_as_the_same_run(
    text_models, make_config, tmp_path
):
    run(make_config(text_models, RECORDS, train__iters=1))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match="loss.temperature"):
        run(make_config(text_models, RECORDS, train__iters=1, resume=True, loss__temperature=2.0))
    run(make_config(text_models, RECORDS, train__iters=1, resume=True))
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1]


@pytest.mark.parametrize("resume", [False, True])
def test_the_directory_of_another_run_is_left_as_it_is(text_models, make_config, tmp_path, resume):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "train/reward_mean": 0.5}\n')
    with pytest.raises(ValueError, match="no distillation run wrote it" if resume else "not empty"):
        run(make_config(text_models, RECORDS, train__iters=1, resume=resume))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1, "train/reward_mean": 0.5}\n'
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_a_checkpoint_that_cannot_be_written_names_path_step_and_what_to_do(
    text_models, make_config, make_trainer, tmp_path
):
    trainer = make_trainer(make_config(text_models, RECORDS))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises(
        ValueError, match=r"run/checkpoints.*cannot be written at step 3: .*; make room in .*--resume"
    ):
        trainer.save(3)


def test_an_output_directory_that_cannot_be_is_found_before_anything_is_read(
    text_models, make_config, tmp_path
):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="file is not a directory"):
            run(make_config((tmp_path / "no", tmp_path / "no"), RECORDS, output_dir=path))


def test_checkpoints_load_with_transformers_and_only_the_newest_are_kept(text_models, make_config, tmp_path):
    run(make_config(text_models, RECORDS, train__iters=4, save_interval=1, keep_checkpoints=2))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step_000003", "step_000004"]
    model_dir = tmp_path / "run" / "checkpoints" / "step_000004" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    assert model(**tokenizer("hello", return_tensors="pt")).logits.shape[1] == 5


def test_an_image_text_checkpoint_keeps_the_names_and_the_configuration_that_engines_read(
    vlm_models, make_config, tmp_path
):
    from PIL import Image
    from safetensors import safe_open

    (tmp_path / "data").mkdir()
    Image.new("RGB", (96, 64), (200, 0, 0)).save(tmp_path / "data" / "red.png")
    records = [{"input": "<image>?", "output": "red", "images": ["red.png"]}]
    config = make_config(vlm_models, records, train__iters=1, save_interval=1, train__lr=1e-2)
    run(config)
    saved = checkpoint.newest(tmp_path / "run").model_dir
    names = [set(safe_open(str(path / "model.safetensors"), "pt").keys()) for path in (vlm_models[0], saved)]
    assert names[0] == names[1]
    before, after = (json.loads((path / "config.json").read_text()) for path in (vlm_models[0], saved))
    assert {**before, "dtype": "float32"} == after
    again = config.model_copy(update={"resume": True, "train": config.train.model_copy(update={"iters": 2})})
    assert math.isfinite(run(again).loss) and checkpoint.newest(tmp_path / "run").step == 2


def test_tied_embeddings_survive_saving_and_resuming(text_models, make_config, tmp_path):
    settings = transformers.AutoConfig.from_pretrained(text_models[0], tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "tied")
    transformers.AutoTokenizer.from_pretrained(text_models[0]).save_pretrained(tmp_path / "tied")
    models = (tmp_path / "tied", text_models[1])
    config = make_config(models, RECORDS, train__iters=2, train__lr=1e-2, save_interval=1)
    run(config)
    last = read_metrics(tmp_path / "run")[1]["train/loss"]
    shutil.rmtree(checkpoint.newest(tmp_path / "run").path)
    assert run(config.model_copy(update={"resume": True})).loss == last
    saved = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.newest(tmp_path / "run").model_dir)
    assert saved.lm_head.weight is saved.model.embed_tokens.weight


def test_evaluation_is_the_loss_on_the_held_out_rows(text_models, make_config, write_jsonl, tmp_path):
    write_jsonl(tmp_path / "data" / "validation.jsonl", RECORDS[:3])
    config = make_config(text_models, RECORDS, train__iters=2, eval__iters=1, eval__interval=1)
    run(config)
    metrics = read_metrics(tmp_path / "run")
    assert [row["step"] for row in metrics] == [1, 2]
    held_out = sum(len(r["output"]) + 1 for r in RECORDS[:3])
    assert all(row["eval/tokens"] == held_out for row in metrics)
    assert list(metrics[0])[0] == "step" and {"train/loss", "train/kd_loss", "eval/loss"} <= metrics[0].keys()


def test_bf16_trains_fp32_weights(text_models, make_config, tmp_path):
    config = make_config(text_models, RECORDS, train__iters=8, train__lr=1e-2, train__precision="bf16")
    run(config)
    losses = [row["train/kd_loss"] for row in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0]
    from safetensors.torch import load_file

    weights = load_file(checkpoint.newest(tmp_path / "run").model_dir / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}


def test_a_loss_that_is_not_finite_stops_before_the_update(text_models, make_config, make_trainer):
    trainer = make_trainer(make_config(text_models, RECORDS))
    with torch.no_grad():
        trainer.model.lm_head.weight[5] = float("inf")
    with pytest.raises(FloatingPointError, match="training.jsonl:1"):
        trainer.accumulate(trainer.prepared.train_rows)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_kd_loss_falls_over_200_iterations(text_models, make_config, tmp_path, direction):
    config = make_config(
        text_models,
        RECORDS,
        train__iters=200,
        train__micro_batch_size=4,
        train__lr=3e-3,
        train__lr_warmup_iters=10,
        loss__direction=direction,
    )
    run(config)
    losses = np.array([row["train/kd_loss"] for row in read_metrics(tmp_path / "run")])
    smoothed = losses.reshape(10, 20).mean(1)
    print(direction, [round(float(x), 4) for x in smoothed])
    assert (np.diff(smoothed) < 0).all(), smoothed
    assert smoothed[-1] < 0.2 * smoothed[0]


def test_the_order_is_a_permutation_per_epoch_and_can_start_anywhere():
    order = RowOrder(7, seed=3)
    epochs = [[order[e * 7 + i] for i in range(7)] for e in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and epochs[0] != epochs[1]
    assert RowOrder(7, seed=3)[15] == epochs[2][1]
    assert [RowOrder(7, seed=4)[i] for i in range(7)] != epochs[0]


def test_shares_of_a_batch_are_disjoint_and_complete():
    for rows in (1, 5, 8):
        shares = [my_micro_batches(range(rows), dp_rank=r, dp_size=3, micro_batch_size=2) for r in range(3)]
        flat = [row for share in shares for micro in share for row in micro]
        assert flat == list(range(rows))
        assert all(1 <= len(micro) <= 2 for share in shares for micro in share)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate(schedule):
    train = TrainConfig(iters=100, lr=1.0, lr_schedule=schedule, lr_warmup_iters=10)
    rates = [learning_rate(step, train) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[10] == pytest.approx(1.0)
    decay = np.diff(rates[10:])
    assert (decay == 0).all() if schedule == "constant" else (decay < 0).all() and rates[-1] > 0
