# SPDX-License-Identifier: Apache-2.0
"""What a run says and checks before it starts an engine, and a user's own reward."""

import json

import pytest
import yaml

from nemo_rl_ext.config.shipped import CONFIGS, config_path
from nemo_rl_ext.grpo.config import load_config
from nemo_rl_ext.grpo.dry_run import memory_of, num_parameters
from nemo_rl_ext.grpo.reward_function import checked_reward, load_reward_function
from nemo_rl_ext.manifest.rows import ManifestRow


@pytest.fixture
def manifest(tmp_path):
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "l or r?"}]},
        "verifier_metadata": {"answer": "l", "weight": 0.25},
    }
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"id": f"row-{index}", **row}) + "\n" for index in range(20)))
    return path


@pytest.fixture
def settings(manifest, tiny_checkpoint, tmp_path):
    return [
        f"policy.model_name={tiny_checkpoint}",
        f"data.train.data_path={manifest}",
        "data.validation=null",
        "data.build_demo_manifest=false",
        f"logger.log_dir={tmp_path}/run",
    ]


def test_every_setting_is_printed_and_reads_back(command, settings, tmp_path):
    done = command("grpo", "--print-config", *settings, "grpo.seed=7")
    assert done.returncode == 0, done.stderr
    (tmp_path / "printed.yaml").write_text(done.stdout)
    printed = load_config(tmp_path / "printed.yaml")
    assert printed == load_config(CONFIGS / "embedded_async.yaml", [*settings, "grpo.seed=7"])
    assert "video_pruning_rate" in done.stdout, "defaults that no file sets are printed, too"


def test_a_dry_run_checks_forecasts_and_starts_nothing(command, settings, tmp_path):
    done = command("grpo", "--dry-run", *settings)
    assert done.returncode == 0, done.stderr
    for said in (
        "48 steps of 16 prompts x 4 generations",
        "first of 20 prompts",
        "sequence tokens",
        "key/value cache: 64.0 MiB",
        "nothing was started",
    ):
        assert said in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_dry_run_refuses_what_the_run_would(command, settings, manifest):
    manifest.write_text(manifest.read_text().replace('"answer"', '"anwser"'))
    done = command("grpo", "--dry-run", *settings)
    assert done.returncode == 2 and "no row has anything to be scored by" in done.stderr


def test_the_memory_of_parts_is_computed_from_shapes(settings, tiny_checkpoint):
    from safetensors.torch import load_file

    config = load_config(CONFIGS / "embedded_async.yaml", settings)
    count = sum(tensor.numel() for tensor in load_file(tiny_checkpoint / "model.safetensors").values())
    assert num_parameters(tiny_checkpoint) == count
    memory = memory_of(config, num_parameters=count, patch_size=16, merge_size=2)
    assert memory.policy == count * 4 * 4 and memory.engine == count * 2
    assert memory.longest_row == (512 - 4) * 4 * 16 * 16 * 3 * 4


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    with pytest.raises(ValueError, match="found none"):
        num_parameters(tmp_path)
    for content in (b"", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0{]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="model.safetensors: not a safetensors file"):
            num_parameters(tmp_path)


def test_configurations_are_found_from_any_directory(tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    assert config_path(Path("configs/embedded_async.yaml")) == CONFIGS / "embedded_async.yaml"
    assert config_path(Path("configs/none.yaml")) == Path("configs/none.yaml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "embedded_async.yaml").write_text("x: 1\n")
    own = Path("configs/embedded_async.yaml")
    assert config_path(own) == own, "a user's own file comes first"


def row():
    return ManifestRow.model_validate(
        {
            "id": "a",
            "responses_create_params": {"input": [{"role": "user", "content": "?"}]},
            "verifier_metadata": {"answer": "a spoon", "weight": 0.25},
        }
    )


def test_a_reward_function_of_a_file_or_module_scores(tmp_path, monkeypatch):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "def overlap(text, metadata):\n    return metadata['weight'] * (metadata['answer'] in text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{path}:overlap", "my_rewards:overlap"):
        reward = checked_reward(load_reward_function(name), name)
        assert reward(row(), "it is a spoon") == 0.25 and reward(row(), "a fork") == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rewards", "expected module:function or path/to/file.py:function, found 'rewards'"),
        (":f", "expected module:function"),
        ("rewards:1f", "expected module:function"),
        ("no_such_module:f", "no_such_module cannot be loaded: ModuleNotFoundError"),
        ("none.py:f", "none.py cannot be loaded: FileNotFoundError: no such file; relative paths start in"),
        ("json:lodas", "json has no function 'lodas'; it has"),
        ("json:__doc__", "json has no function '__doc__'"),
    ],
)
def test_a_reward_function_that_cannot_be_used_is_one_sentence(name, message):
    with pytest.raises(ValueError, match="^env.reward_function: ") as error:
        load_reward_function(name)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", None, [1.0]])
def test_what_is_no_number_is_refused_with_its_row(value):
    reward = checked_reward(lambda text, metadata: value, "mine:f")
    with pytest.raises(
        ValueError, match="env.reward_function mine:f: expected one finite number for row 'a'"
    ):
        reward(row(), "x")


def test_a_reward_function_that_raises_names_the_row():
    reward = checked_reward(lambda text, metadata: metadata["absent"], "mine:f")
    with pytest.raises(ValueError, match="mine:f raised KeyError for row 'a'"):
        reward(row(), "x")


def test_gym_and_a_reward_function_exclude_each_other(settings):
    with pytest.raises(ValueError, match="env.reward_function scores in this process"):
        load_config(
            CONFIGS / "embedded_async.yaml",
            [*settings, "env.should_use_nemo_gym=true", "env.reward_function=json:loads"],
        )


def test_the_reference_has_every_key():
    """`docs/configuration.md` is written from the classes."""
    from pathlib import Path

    from nemo_rl_ext.config.reference import configuration_page

    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == configuration_page(), (
        "write it again: python -m nemo_rl_ext.config.reference > docs/configuration.md"
    )


def test_the_configurations_of_the_package_are_those_of_the_repository():
    assert yaml.safe_load((CONFIGS / "embedded_async.yaml").read_text())["grpo"]["max_num_steps"] == 48
    assert (CONFIGS / "nemo_rl" / "async_gym_image.yaml").is_file()


def test_time_left_is_said_in_words(tmp_path):
    from rich.console import Console

    from nemo_rl_ext.grpo.run_log import RunLog, duration

    assert [duration(seconds) for seconds in (0.4, 89, 91, 3600, 7500)] == [
        "0 s", "89 s", "2 min", "60 min", "2 h 05 min",
    ]  # fmt: skip
    console = Console(record=True, width=200, quiet=False)
    log = RunLog(tmp_path, resume_from=None, tensorboard=False, console=console)
    log.show(8, 10, {"timing/step_s": 3.0})
    log.show(10, 10, {"timing/step_s": 3.0})
    first, last = console.export_text().splitlines()
    assert "3.0 s, 6 s left" in first and "left" not in last


def test_a_resumed_run_does_not_report_first_occurrences_again(tmp_path):
    from nemo_rl_ext.align.verdict import Reason
    from nemo_rl_ext.grpo.run_log import RunLog
    from nemo_rl_ext.rollout.metrics import AlignmentMetrics

    log = RunLog(tmp_path, resume_from=None, tensorboard=False)
    metrics = AlignmentMetrics(reported=log.reported_reasons())
    metrics.add_row([], extra_reasons={Reason.GENERATION_FAILED: "row a"}, row_id="a")
    for occurrence in metrics.new_occurrences():
        log.occurrence(1, occurrence)
    resumed = RunLog(tmp_path, resume_from=1, tensorboard=False)
    metrics = AlignmentMetrics(reported=resumed.reported_reasons())
    metrics.add_row([], extra_reasons={Reason.GENERATION_FAILED: "row b"}, row_id="b")
    metrics.add_row([], extra_reasons={Reason.WORKER_DIED: "row c"}, row_id="c")
    assert [occurrence.reason for occurrence in metrics.new_occurrences()] == [Reason.WORKER_DIED]
    assert metrics.flush()["alignment/reason/generation_failed"] == 1, "it still counts"
    before = RunLog(tmp_path, resume_from=0, tensorboard=False)
    assert before.reported_reasons() == set(), "what the checkpoint does not know is forgotten"


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 5000 + "]" * 5000, "\n".join(" " * i + "a:" for i in range(3000))]
)
def test_a_deeply_nested_file_is_one_sentence(tmp_path, command, text):
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    done = command("grpo", "--config", path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "deep.yaml: blocks or lists are nested too deeply" in done.stderr
    done = command("grpo", "a=" + "[" * 5000)
    assert done.returncode == 2 and len(done.stderr) < 400


def test_held_out_media_beside_another_manifest_are_refused(command, settings, tmp_path):
    """They would be looked up beside the training manifest, found nowhere, and every such answer counted as wrong."""
    from PIL import Image

    held_out = tmp_path / "held_out"
    held_out.mkdir()
    Image.new("RGB", (64, 64)).save(held_out / "a.png")
    path = held_out / "validation.jsonl"

    def write(url):
        content = [{"type": "input_image", "image_url": url, "detail": "auto"}]
        row = {"responses_create_params": {"input": [{"role": "user", "content": content}]}}
        path.write_text(json.dumps({"id": "v", **row, "verifier_metadata": {"answer": "l"}}) + "\n")

    settings = [name for name in settings if not name.startswith("data.validation")]
    settings.append(f"data.validation.data_path={path}")
    write("a.png")
    done = command("grpo", "--dry-run", *settings)
    assert done.returncode == 2
    assert (
        "validation.jsonl:1 names 'a.png'" in done.stderr
        and "put both manifests into one directory" in done.stderr
    )
    write(str(held_out / "a.png"))
    done = command("grpo", "--dry-run", *settings, f"data.media_roots=[{tmp_path}]")
    assert done.returncode == 0, done.stderr
