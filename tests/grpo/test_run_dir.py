# SPDX-License-Identifier: Apache-2.0
"""A run never loses or mixes anything: who may write where, what a resumed run may change, how a run ends."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from nemo_rl_ext.grpo.config import load_config  # noqa: E402
from nemo_rl_ext.grpo.run_dir import FREE_KEYS, open_run_directory  # noqa: E402
from nemo_rl_ext.grpo.run_log import RunLog  # noqa: E402
from nemo_rl_ext.grpo.training.policy_state import save_policy_state, saved_by  # noqa: E402

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "embedded_async.yaml"


class SavedLinear:
    """The one method of a policy that a run directory calls, over a real optimizer."""

    def __init__(self):
        self.layer = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.layer.parameters())

    def save(self, path, *, run=None):
        save_policy_state(path, dict(self.layer.named_parameters()), self.optimizer, run=run)


@pytest.fixture
def configure(tmp_path):
    def make(*overrides, run="run"):
        return load_config(DEMO, [f"logger.log_dir={tmp_path / run}", "grpo.max_num_steps=8", *overrides])

    return make


def train(config, steps, **kwargs):
    """What the loop does of a run directory, without engine and trainer."""
    directory = open_run_directory(config, **kwargs)
    directory.claim()
    log = RunLog(
        directory.path,
        resume_from=directory.first_step if directory.resumed else None,
        tensorboard=False,
    )
    with directory.recording():
        for step in range(directory.first_step + 1, steps + 1):
            directory.step = step
            log.step(step, {"train/reward_mean": 0.5})
            directory.save(SavedLinear(), step)
    return directory


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_used_directory_is_refused_and_left_as_it_is(configure):
    config = configure()
    train(config, 5)
    before = contents(config.logger.log_dir)
    with pytest.raises(
        ValueError, match=r"holds a run of 5 steps \(finished, checkpoint of step 5\); continue"
    ) as error:
        open_run_directory(config)
    assert (
        "--resume" in str(error.value)
        and "--overwrite" in str(error.value)
        and "logger.log_dir" in str(error.value)
    )
    assert contents(config.logger.log_dir) == before


def test_metrics_without_a_record_or_checkpoint_are_a_run_too(configure):
    config = configure()
    config.logger.log_dir.mkdir()
    (config.logger.log_dir / "metrics.jsonl").write_text('{"step": 3, "train/reward_mean": 1.0}\n')
    with pytest.raises(ValueError, match="holds a run of 3 steps"):
        open_run_directory(config)


def test_a_run_that_failed_before_its_first_step_may_start_again(configure):
    config = configure()
    directory = open_run_directory(config)
    directory.claim()
    with pytest.raises(RuntimeError), directory.recording():
        raise RuntimeError("no engine")
    first = json.loads((config.logger.log_dir / "run.json").read_text())
    assert (first["state"], first["step"], first["error"]["type"]) == ("failed", 0, "RuntimeError")
    assert "no engine" in first["error"]["traceback"] and first["versions"]["torch"]
    second = open_run_directory(config)
    second.claim()
    assert json.loads((config.logger.log_dir / "run.json").read_text())["id"] != first["id"]


def test_overwriting_starts_a_run_whose_checkpoints_are_its_own(configure):
    config = configure("checkpointing.keep_top_k=2")
    train(config, 6)
    (config.logger.log_dir / "mine.txt").write_text("kept")
    train(config, 2, overwrite=True)
    folder = config.logger.log_dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_000001", "step_000002"]
    record = json.loads((config.logger.log_dir / "run.json").read_text())
    assert {saved_by(path) for path in folder.iterdir()} == {record["id"]}
    steps = [json.loads(line)["step"] for line in (config.logger.log_dir / "metrics.jsonl").open()]
    assert steps == [1, 2] and (config.logger.log_dir / "mine.txt").read_text() == "kept"
    assert open_run_directory(config, resume=True).first_step == 2


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_checkpoints_of_another_run_are_never_taken_nor_deleted(configure, tmp_path, flags):
    shared = f"checkpointing.checkpoint_dir={tmp_path / 'shared'}"
    train(configure(shared, run="a"), 3)
    before = contents(tmp_path / "shared")
    with pytest.raises(ValueError, match=r"shared holds checkpoints of another run \(steps 2, 3\)"):
        open_run_directory(configure(shared, run="b"), **flags)
    assert contents(tmp_path / "shared") == before


def test_two_runs_cannot_write_to_one_directory(configure):
    config = configure()
    directory = open_run_directory(config)
    directory.claim()
    code = f"""
from pathlib import Path
from nemo_rl_ext.grpo.config import load_config
from nemo_rl_ext.grpo.run_dir import open_run_directory
open_run_directory(load_config({str(DEMO)!r}, ["logger.log_dir={config.logger.log_dir}"])).claim()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "another run is writing to it" in done.stderr


def test_resume_lists_what_may_change_and_refuses_the_rest_by_key(configure, caplog):
    config = configure()
    train(config, 3)
    stored = (config.logger.log_dir / "config.yaml").read_text()
    with caplog.at_level("INFO", logger="nemo_rl_ext"):
        longer = configure("grpo.max_num_steps=12", "logger.tensorboard_enabled=false")
        assert open_run_directory(longer, resume=True).first_step == 3
    assert (
        "grpo.max_num_steps: 8 -> 12" in caplog.text and "tensorboard_enabled: True -> False" in caplog.text
    )
    changed = configure("grpo.seed=7", "policy.optimizer.lr=0.5", "grpo.num_prompts_per_step=2")
    with pytest.raises(ValueError, match="--allow-changes") as error:
        open_run_directory(changed, resume=True)
    for part in ("grpo.seed: 0 -> 7", "policy.optimizer.lr: ", "-> 0.5", "grpo.num_prompts_per_step: "):
        assert part in str(error.value)
    train(changed, 5, resume=True, allow_changes=True)
    assert (config.logger.log_dir / "config.yaml").read_text() == stored
    assert "seed: 7" in (config.logger.log_dir / "config.step_000003.yaml").read_text()
    assert open_run_directory(changed, resume=True).first_step == 5, "the last settings are compared"


def test_every_free_key_exists(configure):
    from nemo_rl_ext.config.faults import known_keys
    from nemo_rl_ext.grpo.config import Config

    assert sorted(set(FREE_KEYS) - set(known_keys(Config))) == []


def test_a_finished_run_has_nothing_to_do(configure):
    train(configure(), 8)
    assert open_run_directory(configure(), resume=True).finished
    assert not open_run_directory(configure("grpo.max_num_steps=9"), resume=True).finished


def test_resume_needs_a_checkpoint_and_no_other_flag(configure):
    with pytest.raises(ValueError, match="no checkpoint in"):
        open_run_directory(configure(), resume=True)
    with pytest.raises(ValueError, match="give one of them"):
        open_run_directory(configure(), resume=True, overwrite=True)


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_place_that_cannot_be_a_directory_is_found_before_anything_starts(configure, tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file is not a directory; choose another logger.log_dir"):
        open_run_directory(configure(run=place))


def test_a_directory_that_cannot_be_written_to_is_found_before_anything_starts(configure):
    with pytest.raises(
        ValueError, match=r"/proc/1 cannot be written to|/proc.*: cannot be written at step 0"
    ):
        open_run_directory(configure("logger.log_dir=/proc/1/run")).claim()


def test_a_full_disk_names_path_step_and_what_to_do(configure):
    config = configure()
    directory = open_run_directory(config)
    directory.claim()
    (config.logger.log_dir / "metrics.jsonl").symlink_to("/dev/full")
    log = RunLog(config.logger.log_dir, resume_from=0, tensorboard=False)
    (config.logger.log_dir / "metrics.jsonl").unlink()
    (config.logger.log_dir / "metrics.jsonl").symlink_to("/dev/full")
    directory.step = 4
    with pytest.raises(
        ValueError, match=r"cannot be written at step 4: the disk is full; make room"
    ) as error:
        with directory.writing():
            log.step(4, {"train/loss": 1.0})
    assert str(config.logger.log_dir) in str(error.value) and "start again" in str(error.value)
    directory.save(SavedLinear(), 4)
    with pytest.raises(ValueError, match="then continue with --resume"):
        with directory.writing():
            log.step(5, {"train/loss": 1.0})


def test_the_error_that_ended_a_run_is_not_hidden_by_a_record_that_cannot_be_written(configure):
    config = configure()
    directory = open_run_directory(config)
    directory.claim()
    with pytest.raises(RuntimeError, match="the real one"), directory.recording():
        for path in config.logger.log_dir.iterdir():
            path.unlink()
        config.logger.log_dir.rmdir()
        raise RuntimeError("the real one")


def test_an_interrupted_run_says_where_it_stands(configure):
    config = configure()
    directory = open_run_directory(config)
    directory.claim()
    directory.step = 3
    assert "interrupted at step 3, before its first checkpoint" in directory.interruption()
    directory.save(SavedLinear(), 2)
    assert directory.interruption() == (
        "interrupted at step 3; continue with --resume from the checkpoint of step 2"
    )
    with pytest.raises(KeyboardInterrupt), directory.recording():
        raise KeyboardInterrupt
    assert json.loads((config.logger.log_dir / "run.json").read_text())["state"] == "interrupted"


def test_the_first_sigterm_ends_a_process_like_ctrl_c_and_further_ones_wait():
    code = """
import os, signal
from nemo_rl_ext.grpo.termination import Terminated, raise_on_sigterm
raise_on_sigterm()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
except KeyboardInterrupt as error:
    os.kill(os.getpid(), signal.SIGTERM)
    print("cleaned up", isinstance(error, Terminated))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "cleaned up True\n"), done.stderr


def test_a_run_within_a_program_gives_its_sigterm_handler_back():
    from nemo_rl_ext.grpo.termination import handler_given_back, raise_on_sigterm

    own = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with handler_given_back():
            raise_on_sigterm()
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, own)
