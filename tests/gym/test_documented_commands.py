# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/gym.md as they stand there: vLLM's own server on the tiny checkpoint, and Gym's against it.

Only ports, paths and the environment's place are put in, and a ban on the image token, which a random model samples.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("GYM_VENV") or ROOT / ".venv-gym").absolute()
DOCS = (ROOT / "docs" / "gym.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"```bash\n(.*?)```", DOCS[DOCS.index("## Gym's own commands") : DOCS.index("## Tests")], re.DOTALL
)
NO_IMAGE_TOKEN = """'++responses_create_params.metadata.extra_body="{\\"logit_bias\\": {\\"5\\": -100}}"'"""

pytestmark = [
    pytest.mark.gym,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (VENV / "bin" / "gym").exists(),
        reason=f"no NeMo-Gym environment in {VENV} (make gym, GYM_VENV=dir)",
    ),
]


def block(words):
    """The one block of commands that has these words."""
    (found,) = (text for text in COMMANDS if words in text)
    return found


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def running(command, log, **options):
    """A shell command in a session of its own, ended with all that it started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-ec", command], stdout=output, stderr=output, start_new_session=True, **options
        )
    try:
        yield process
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(timeout=30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def wait_for(url, process, log):
    while process.poll() is None:
        try:
            return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5).read()
        except OSError:
            time.sleep(1)
    pytest.fail(f"ended with status {process.returncode}:\n" + log.read_text(errors="replace")[-4000:])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Where the commands run: `gym_resources/` by links, so that nothing is written into the checkout."""
    folder = tmp_path_factory.mktemp("gym") / "gym_resources"
    folder.mkdir()
    for source in (ROOT / "gym_resources").iterdir():
        if source.is_dir() and source.name != "outputs":
            (folder / source.name).symlink_to(source, target_is_directory=True)
    return folder


def shell(commands, ray, port, head):
    """The documented commands after the documented settings, with what is ours put in."""
    text = block("export PATH=") + commands.rstrip()
    for documented, ours in (
        ("$PWD/../.venv-gym", str(VENV)), ("/tmp/gym-ray", str(ray)), ("127.0.0.1:8000", f"127.0.0.1:{port}"),
    ):  # fmt: skip
        text = text.replace(documented, ours)
    # Gym's head server has a fixed port, which another run may hold
    address = f"++head_server.host=127.0.0.1 ++head_server.port={head}"
    text = re.sub(r"gym (env start|eval run|env validate)", rf"gym \1 {address}", text)
    return text.replace("gym eval run", f"gym eval run {NO_IMAGE_TOKEN}") + "\n"


def test_validation_leaves_nothing_that_git_would_add(tmp_path):
    script = shell(block("gym env validate").splitlines()[0], tmp_path, 1, 1)
    subprocess.run(["bash", "-ec", script], cwd=ROOT / "gym_resources", check=True, timeout=300)
    asked = ["git", "status", "--porcelain", "--untracked-files=all", "gym_resources"]
    left = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "outputs" not in left


@pytest.mark.engine
def test_rollouts_are_collected_from_vllm_s_own_server(workplace, tmp_path):
    port, head = free_ports(2)
    build, serve = (
        line.replace("python", sys.executable, 1).replace("--port 8000", f"--port {port}")
        for line in block("api_server").splitlines()
    )
    (on_a_cpu,) = re.findall(r"add\s`(--gpu-memory-utilization [^`]+)`", DOCS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    # set for engines inside a test's own process (tests/conftest.py); a server has a process for its engine
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    subprocess.run(["bash", "-ec", build], cwd=tmp_path, env=environment, check=True, timeout=300)
    vllm_log, gym_log = tmp_path / "vllm.log", tmp_path / "gym.log"
    ray = Path(f"/tmp/gym-ray-{os.getpid()}")  # Ray's sockets need a short path
    with running(f"{serve} {on_a_cpu}", vllm_log, cwd=tmp_path, env=environment) as server:
        wait_for(f"http://127.0.0.1:{port}/health", server, vllm_log)
        start = shell(block("gym env start"), ray, port, head)
        with running(start, gym_log, cwd=workplace, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as gym:
            while "servers ready!" not in gym_log.read_text(errors="replace"):
                assert gym.poll() is None, gym_log.read_text(errors="replace")[-4000:]
                time.sleep(1)
            collect = shell(block("gym eval run"), ray, port, head)
            subprocess.run(["bash", "-ec", collect], cwd=workplace, check=True, timeout=900)
    for name in ("sav_tracks", "caption_qa"):
        rows = [json.loads(line) for line in (workplace / f"rollouts_{name}.jsonl").read_text().splitlines()]
        assert len(rows) == 5, name
        for row in rows:
            (message,) = (item for item in row["response"]["output"] if item["type"] == "message")
            assert len(message["generation_token_ids"]) == len(message["generation_log_probs"]) > 0
            assert row["reward"] == sum(row["reward_components"].values())
            assert row["error_class"] in (None, "answer")
    assert not [path for path in workplace.glob("rollouts_*failures*") if path.stat().st_size]
