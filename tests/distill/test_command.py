# SPDX-License-Identifier: Apache-2.0
"""The command as users call it: what it refuses, with one clear message and nothing written."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import typer
from typer.testing import CliRunner

from nemo_rl_ext.distill.command import distill
from nemo_rl_ext.distill.config import load_config

PAIR = {"input": "What is 1 plus 1?\n", "output": "2"}
APP = typer.Typer()
APP.command()(distill)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def invoke(text_models, tmp_path):
    """Run the command in this process; returns the error message of a refusal, or None."""

    def call(*arguments, student=text_models[0], teacher=text_models[1], output=tmp_path / "run"):
        command = ["--output-dir", output, "--student", student, "--teacher", teacher, *arguments]
        command += ["tensorboard=false"]
        result = CliRunner().invoke(APP, [str(part) for part in command])
        if result.exit_code == 0:
            return None
        assert isinstance(result.exception, ValueError), (result.output, result.exception)
        assert not output.exists(), "nothing may be written before everything is checked"
        return str(result.exception)

    return call


@pytest.fixture
def data(tmp_path, write_jsonl):
    def make(records=(PAIR, PAIR), validation=None):
        write_jsonl(tmp_path / "data" / "training.jsonl", list(records))
        if validation is not None:
            write_jsonl(tmp_path / "data" / "validation.jsonl", validation)
        return "--sft", "--sft-dataset-root", tmp_path / "data"

    return make


def test_two_records_train_evaluate_and_save(invoke, data, tmp_path):
    flags = ("--train-iters", 3, "--eval-iters", 1, "--global-batch-size", 4, "--lr", "1e-3")
    assert invoke(*data(validation=[PAIR]), *flags, "loss.temperature=2") is None
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[-1]["eval/tokens"] == 2
    written = load_config(tmp_path / "run" / "config.yaml")
    assert written.loss.temperature == 2.0 and written.train.lr == 1e-3
    assert (tmp_path / "run" / "checkpoints" / "step_000003" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "found none of them"),
        (("--sft", "--use-mock-data"), "found --sft and --use-mock-data"),
        (("--sft", "--data-paths", "a.jsonl"), "found --sft and --data-paths"),
        (("--data-paths", "a.jsonl", "--use-mock-data"), "found --data-paths and --use-mock-data"),
        (
            ("--sft", "--data-paths", "a.jsonl", "--use-mock-data"),
            "found --sft and --data-paths and --use-mock-data",
        ),
        (("--sft",), "--sft needs --sft-dataset-root"),
        (("--use-mock-data", "--sft-dataset-root", "x"), "--sft-dataset-root belongs to --sft"),
        (("--use-mock-data", "--chat-template"), "--chat-template belongs to --sft"),
        (("--use-mock-data", "train.ls=1"), "unknown key `train.ls`"),
        (("--use-mock-data", "--seq-length", "1"), "option --seq-length: data.seq_length: expected"),
        (("--use-mock-data", "--precision", "fp8"), "option --precision: train.precision"),
        (("--use-mock-data", "loss.kd_weight=0"), "nothing to train on"),
        (("--use-mock-data", "nonsense"), "expected key=value"),
        (("--use-mock-data", "--cp-size", "2"), "--cp-size 2 does not divide the world size 1"),
        (("--use-mock-data", "--global-batch-size", "3", "--micro-batch-size", "2"), "not a multiple"),
    ],
)
def test_flags_that_contradict_each_other(invoke, flags, message):
    assert message in invoke(*flags)


def test_conflict_between_file_and_flag_names_both(invoke, tmp_path):
    (tmp_path / "mock.yaml").write_text("data:\n  use_mock_data: true\n")
    message = invoke("--config", tmp_path / "mock.yaml", "--sft", "--sft-dataset-root", tmp_path)
    assert "found --sft and --use-mock-data" in message


def test_missing_files(invoke, data, tmp_path):
    assert "no-such-dir: not a directory" in invoke("--sft", "--sft-dataset-root", tmp_path / "no-such-dir")
    (tmp_path / "empty").mkdir()
    assert "empty/training.jsonl: missing" in invoke("--sft", "--sft-dataset-root", tmp_path / "empty")
    assert "validation.jsonl: missing, and --eval-iters 1" in invoke(*data(), "--eval-iters", 1)
    assert "gone.jsonl: missing" in invoke("--data-paths", tmp_path / "gone.jsonl")
    assert "--student" in invoke(*data(), student=tmp_path / "nowhere")
    assert "no config.json" in invoke(*data(), teacher=tmp_path / "empty")


def test_validation_is_not_needed_without_evaluation(invoke, data):
    assert invoke(*data(), "--train-iters", 1) is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"input": "a", "output": ', "training.jsonl:2: not JSON"),
        ({"input": "a", "output": ""}, "training.jsonl:2: 'output' is empty"),
        ({"input": "a"}, "training.jsonl:2: 'output' is missing"),
        ({"input": "a", "output": "b" * 40}, "training.jsonl:2: the response has 41 tokens"),
        ({"input": "a", "output": "b", "images": ["x.png"]}, "training.jsonl:2: has media"),
    ],
)
def test_one_bad_record_stops_everything(invoke, data, record, message):
    assert message in invoke(*data([PAIR, record]), "--seq-length", 32)


def test_a_bad_validation_record_is_found_before_training(invoke, data):
    message = invoke(*data(validation=[PAIR, {"input": "a"}]), "--eval-iters", 1)
    assert "validation.jsonl:2: 'output' is missing" in message


def test_a_prompt_longer_than_the_sequence(invoke, data, caplog):
    records = [PAIR, {"input": "p" * 100, "output": "ok"}]
    message = invoke(*data(records), "--seq-length", 32, "data.on_long_prompt=error")
    assert "training.jsonl:2: the prompt has 100 tokens, 29 fit" in message
    assert invoke(*data(records), "--seq-length", 32, "--train-iters", 1) is None


def test_more_tokens_than_the_model_has_positions(invoke, data, text_models, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(text_models[1], short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    records = [PAIR, {"input": "p" * 100, "output": "ok"}]
    message = invoke(*data(records), teacher=short)
    assert "training.jsonl:2: the row has 103 tokens, but --teacher" in message
    assert "--seq-length 64 or less" in message


def test_swapped_vocabulary_ids_of_equal_size(invoke, data, text_models, tmp_path):
    teacher = tmp_path / "swapped"
    shutil.copytree(text_models[1], teacher)
    content = json.loads((teacher / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["x"], words["y"] = words["y"], words["x"]
    (teacher / "tokenizer.json").write_text(json.dumps(content))
    message = invoke(*data(), teacher=teacher)
    assert "do not share a vocabulary: 2 ids that differ" in message and "student 'x', teacher 'y'" in message


def test_weights_that_do_not_belong_to_the_configuration(invoke, data, text_models, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(text_models[0], broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    assert "is missing, one of" in invoke(*data(), student=broken)
    for content in (b"", b"no weights" * 200, (text_models[1] / "model.safetensors").read_bytes()[:-1000]):
        (broken / "model.safetensors").write_bytes(content)
        assert "weights cannot be loaded" in invoke(*data(), student=broken)
    (broken / "model.safetensors").unlink()
    assert "weights cannot be loaded" in invoke(*data(), student=broken)


def test_documents_and_mock_data_train(invoke, write_jsonl, tmp_path):
    write_jsonl(tmp_path / "text.jsonl", [{"text": "to be or not to be " * 5}])
    short = ("--train-iters", 2, "--seq-length", 32)
    assert invoke("--data-paths", tmp_path / "text.jsonl", *short) is None
    assert invoke("--use-mock-data", *short, output=tmp_path / "mock") is None


def test_the_contract_is_in_the_help_and_in_the_shipped_configuration():
    help_text = CliRunner().invoke(APP, ["--help"]).output
    config_text = (ROOT / "configs" / "distill.yaml").read_text()
    for text in (help_text, config_text):
        flat = " ".join(text.replace("#", " ").split())
        assert "VERBATIM" in flat and "no BOS" in flat and "EOS is appended once after the output" in flat


def test_the_shipped_configuration_is_valid_and_states_the_defaults():
    flags = {"student": "s", "teacher": "t", "data.use_mock_data": True}
    assert load_config(ROOT / "configs" / "distill.yaml", (), flags) == load_config(None, (), flags)
