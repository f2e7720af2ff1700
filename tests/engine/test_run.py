# SPDX-License-Identifier: Apache-2.0
"""The embedded run as a whole: a real engine, real actors, real photographs, a few steps."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from nemo_rl_ext.grpo.command import grpo

pytestmark = pytest.mark.engine

NUM_STEPS = 3


@pytest.fixture(scope="module")
def inputs(make_inputs):
    return make_inputs(40, 6)


@pytest.fixture
def configure(inputs, tmp_path, cluster):
    from nemo_rl_ext.grpo.config import load_config

    def make(*overrides):
        fixed = [
            *inputs.overrides(tmp_path / "run"),
            f"grpo.max_num_steps={NUM_STEPS}",
            "grpo.num_prompts_per_step=10",
            "grpo.num_generations_per_prompt=4",
            "checkpointing.save_period=2",
        ]
        return load_config(inputs.config, [*fixed, *overrides])

    return make


def lines(config, name):
    return [json.loads(line) for line in (config.logger.log_dir / name).read_text().splitlines()]


def records(config):
    return lines(config, "metrics.jsonl")


def run(config, **kwargs):
    from nemo_rl_ext.grpo.loop import run_grpo

    return run_grpo(config, console=Console(quiet=True), **kwargs)


def test_a_run_repairs_over_budget_turns_and_resumes_where_it_stopped(configure):
    config = configure("logger.tensorboard_enabled=true")
    run(config)
    steps = records(config)
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["alignment/rows"] == record["train/num_rollouts"] == 40
        assert record["train/num_sequences"] >= 40
        assert record["train/weight_age"] <= 1
        assert record["alignment/logprob_gap_matched_max"] < 0.1
        # Weights are pushed in mid-step; of an answer with an update in it the part before counts.
        assert record["alignment/logprob_gap_share"] > 0.5
    assert sum(record["alignment/media_repaired"] for record in steps) > 0
    repaired = [
        r["alignment/logprob_gap_repaired_mean"] for r in steps if "alignment/logprob_gap_repaired_mean" in r
    ]
    matched = [r["alignment/logprob_gap_matched_mean"] for r in steps]
    assert max(repaired) < 3 * max(matched)
    assert "eval/accuracy" in steps[-1]
    assert list((config.logger.log_dir / "tensorboard").iterdir())
    assert json.loads((config.logger.log_dir / "run.json").read_text())["state"] == "finished"
    assert sorted(path.name for path in config.checkpoint_dir.iterdir()) == ["step_000002", "step_000003"]

    assert {turn["step"] for turn in lines(config, "turns.jsonl")} == {1, 2, 3}
    assert not (config.logger.log_dir / "report.html").exists()

    with pytest.raises(ValueError, match=r"holds a run of 3 steps \(finished, checkpoint of step 3\)"):
        run(config)
    assert run(config, resume=True) == {}, "finished: nothing starts"
    stored = (config.logger.log_dir / "config.yaml").read_text()
    grpo(["grpo.max_num_steps=4"], config.logger.log_dir / "config.yaml", resume=True)
    assert (config.logger.log_dir / "config.yaml").read_text() == stored
    assert [record["step"] for record in records(config)] == [1, 2, 3, 4]
    assert not any(path.name.startswith(".") for path in config.checkpoint_dir.iterdir())

    turns = lines(config, "turns.jsonl")
    assert {turn["step"] for turn in turns} == {1, 2, 3, 4}
    assert any("resized" in turn["reasons"] and not turn["neutral"] for turn in turns)
    page = (config.logger.log_dir / "report.html").read_text()
    shown = page[
        page.index("Which rows were repaired or masked") : page.index("The first occurrence of each reason")
    ]
    assert shown.count("<tr") > 5 and all(turn["row_id"] in shown for turn in turns if turn["neutral"])


def test_without_alignment_the_run_dies_as_users_know_it_and_leaves_no_process(inputs, tmp_path):
    """As a command, with a Ray of its own."""
    overrides = [
        *inputs.overrides(tmp_path / "run"),
        "grpo.media_alignment.enabled=false",
        "data.shuffle=false",
        "grpo.max_num_steps=1",
    ]
    command = [sys.executable, "-m", "nemo_rl_ext", "grpo", "--config", str(inputs.config), *overrides]
    with open(tmp_path / "output", "w") as output:
        driver = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path)
    started = set()
    while driver.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            started.update(driver.children(recursive=True))
        time.sleep(0.2)
    output = " ".join((tmp_path / "output").read_text().split())
    assert driver.returncode == 2, output
    assert re.search(r"Got \d+ feature vectors for \d+ placeholder tokens.*enabled=true", output), output
    assert len(started) > 4
    _, alive = psutil.wait_procs(started, timeout=30)
    assert [process.cmdline() for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_killed_aligners_and_a_killed_engine_cost_no_row(configure, monkeypatch):
    from nemo_rl_ext.grpo import loop

    config = configure("grpo.max_num_steps=4", "checkpointing.enabled=false")
    killed = {}

    def sabotage(live):
        """Kill the only aligner and the engine while a later step is being collected."""
        engine_pid = live.engine.health()["pid"]
        (aligner_pid,) = live.pool.pids()
        while not (config.logger.log_dir / "metrics.jsonl").is_file():
            time.sleep(0.01)
        for name, pid in (("aligner", aligner_pid), ("engine", engine_pid)):
            os.kill(pid, signal.SIGKILL)
            killed[name] = pid

    started = loop.start

    @contextlib.contextmanager
    def sabotaged(*args, **options):
        with started(*args, **options) as live:
            thread = threading.Thread(target=sabotage, args=(live,), daemon=True)
            thread.start()
            yield live
            thread.join(timeout=60)

    monkeypatch.setattr(loop, "start", sabotaged)
    last = run(config)
    assert set(killed) == {"aligner", "engine"}
    assert last["rollout/engine_restarts"] >= 1
    assert last["rollout/aligner_deaths"] >= 1
    assert [record["step"] for record in records(config)] == [1, 2, 3, 4]
    assert all(record["alignment/rows"] == 40 for record in records(config))
    assert all(record["alignment/rows_masked"] == 0 for record in records(config))


def test_a_file_that_breaks_after_the_start_is_a_named_masked_group(configure, inputs, tmp_path):
    rows = [json.loads(line) for line in (inputs.folder / "train.jsonl").read_text().splitlines()[:10]]
    media = tmp_path / "media"
    media.mkdir()
    for row in rows:
        for messages in (row["responses_create_params"]["input"], *row.get("turns", [])):
            for part in (part for message in messages for part in message["content"]):
                for key in {"image_url", "video_url"} & set(part):
                    source = inputs.folder / part[key]
                    (media / source.name).write_bytes(source.read_bytes())
                    part[key] = f"media/{source.name}"
    broken, victim = next(
        (number, media / Path(part["image_url"]).name)
        for number, row in enumerate(rows, start=1)
        for part in row["responses_create_params"]["input"][-1]["content"]
        if part["type"] == "input_image"
    )
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    manifest = tmp_path / "train.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = configure(
        f"data.train.data_path={manifest}",
        "data.validation=null",
        "data.verify_media=false",
        "grpo.max_num_steps=1",
        "checkpointing.enabled=false",
        "data.shuffle=false",
    )
    record = run(config)
    assert record["alignment/rows"] == 40
    assert record["alignment/rows_masked"] == 4
    assert record["alignment/reason/generation_failed"] == 4
    (occurrence,) = [
        json.loads(line)
        for line in (config.logger.log_dir / "offences.jsonl").read_text().splitlines()
        if json.loads(line)["reason"] == "generation_failed"
    ]
    assert victim.name in occurrence["story"]
    assert f"train.jsonl:{broken}" in occurrence["story"]
