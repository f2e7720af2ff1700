# SPDX-License-Identifier: Apache-2.0
"""A run that is interrupted, terminated or killed leaves no process and nothing half-written."""

import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def inputs(make_inputs):
    return make_inputs(16, 2)


@pytest.fixture(scope="module")
def policy(inputs):
    from nemo_rl_ext.grpo.training.policy import Policy

    return Policy.from_pretrained(inputs.checkpoint)


@pytest.fixture
def started(inputs, tmp_path):
    """The command after its first step: the driver, everything it started, and its run directory."""
    overrides = [
        *inputs.overrides(tmp_path / "run"),
        "grpo.max_num_steps=1000",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=2",
        "grpo.media_alignment.num_aligners=1",
        "checkpointing.save_period=1",
    ]
    with open(tmp_path / "output", "w") as output:
        command = [sys.executable, "-m", "nemo_rl_ext", "grpo", "--config", str(inputs.config), *overrides]
        driver = psutil.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            # A test run in the background of a shell ignores Ctrl-C, and so would what it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert driver.poll() is None, (tmp_path / "output").read_text()[-3000:]
        assert time.monotonic() < deadline, "no step within five minutes"
        time.sleep(0.1)
    descendants = driver.children(recursive=True)
    yield driver, descendants, tmp_path / "run"
    for process in [driver, *descendants]:
        if process.is_running():
            process.kill()


def test_a_killed_raylet_ends_with_one_sentence_and_how_to_resume(started):
    driver, descendants, run_dir = started
    (raylet,) = [process for process in descendants if process.name() == "raylet"]
    raylet.kill()
    assert driver.wait(timeout=180) == 1
    output = (run_dir.parent / "output").read_text()
    (sentence,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.search(
        r"^error: Ray's node process \(raylet\).* gone.*continue with --resume from the checkpoint of step \d+$",
        sentence,
    )
    assert "Traceback" not in output and "C++" not in output and "stack trace" not in output.lower()
    _, alive = psutil.wait_procs(descendants, timeout=30)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name
)
def test_nothing_survives_the_driver(started, policy, number):
    driver, descendants, run_dir = started
    names = {process.pid: " ".join(process.cmdline())[:60] for process in descendants}
    assert sum("EngineActor" in name or "Host" in name for name in names.values()) >= 2

    driver.send_signal(number)
    code = driver.wait(timeout=180)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]
    output = (run_dir.parent / "output").read_text()
    if number != signal.SIGKILL:
        assert re.search(
            r"interrupted at step \d+; continue with --resume from the checkpoint of step \d+", output
        )
    assert "Traceback" not in output and "C++" not in output and "stack trace" not in output.lower()

    # Left to themselves, Ray's two agents of a killed driver go on for a minute.
    _, alive = psutil.wait_procs(descendants, timeout=30)
    assert [names[process.pid] for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    finished = [path for path in (run_dir / "checkpoints").iterdir() if not path.name.startswith(".")]
    assert finished
    for path in finished:
        policy.load(path)
    report = run_dir / "report.html"
    assert not report.exists() or report.read_text().rstrip().endswith("</html>")
