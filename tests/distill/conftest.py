# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints (real Llama, real NemotronH-Omni), made once a session, and ways to run the real
trainer."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from nemo_rl_ext.distill.config import DistillConfig, load_config  # noqa: E402
from nemo_rl_ext.distill.loop import Trainer  # noqa: E402
from nemo_rl_ext.distill.parallel import Ranks  # noqa: E402
from nemo_rl_ext.distill.prepare import prepare  # noqa: E402
from nemo_rl_ext.distill.tiny import build_tiny_text_checkpoint  # noqa: E402

WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text_models(tmp_path_factory) -> tuple[Path, Path]:
    """(student, teacher), byte-level Llamas with different random weights."""
    root = tmp_path_factory.mktemp("text_models")
    student = build_tiny_text_checkpoint(root / "student", seed=1, hidden_size=32, initializer_range=0.02)
    return student, build_tiny_text_checkpoint(root / "teacher", seed=0, hidden_size=32)


@pytest.fixture(scope="session")
def vlm_models(tmp_path_factory, tiny_checkpoint) -> tuple[Path, Path]:
    """(student, teacher), tiny NemotronH-Omni checkpoints with different random weights."""
    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint

    return build_tiny_checkpoint(tmp_path_factory.mktemp("student") / "tiny", seed=1), tiny_checkpoint


def write_lines(path: Path, records: list) -> Path:
    """JSON Lines of objects; a string is written as it stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def write_jsonl():
    return write_lines


@pytest.fixture(scope="session")
def config_in():
    """A configuration whose data and run live in a directory; keyword arguments are dotted keys."""

    def make(root: Path, models: tuple[Path, Path], records: list, **flags) -> DistillConfig:
        write_lines(root / "data" / "training.jsonl", records)
        defaults = {
            "student": models[0],
            "teacher": models[1],
            "output_dir": root / "run",
            "tensorboard": False,
            "data.sft": True,
            "data.sft_dataset_root": root / "data",
            "data.seq_length": 128,
            "train.global_batch_size": 4,
        }
        dotted = {name.replace("__", "."): value for name, value in flags.items()}
        return load_config(None, (), {**defaults, **dotted})

    return make


@pytest.fixture
def make_config(tmp_path, config_in):
    return partial(config_in, tmp_path)


@pytest.fixture
def make_trainer():
    """A single-process trainer."""

    def make(config: DistillConfig) -> Trainer:
        return Trainer(config, prepare(config), Ranks())

    return make


@pytest.fixture(scope="session")
def run_on_ranks():
    """Accumulate one global batch of each configuration on two gloo ranks; returns what each rank saw.

    All configurations share one launch, since starting the processes is what takes the time. Whatever
    happens, no process is left behind.
    """

    def run(
        out: Path, configs: dict[str, DistillConfig], *, timeout_s: float = 400.0
    ) -> dict[str, list[dict]]:
        out.mkdir()
        for name, config in configs.items():
            (out / f"{name}.json").write_text(config.model_dump_json())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared["PYTHONPATH"] = str(WORKER.parents[2])
        deadline = time.monotonic() + timeout_s
        with (out / "log.txt").open("w") as log, contextlib.ExitStack() as stack:
            processes = []
            for rank in range(2):
                environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, str(WORKER), str(out)]
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
                stack.callback(process.wait)
                stack.callback(process.kill)
                processes.append(process)
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.2)
            codes = [process.poll() for process in processes]
        assert codes == [0, 0], f"exit codes {codes}: {(out / 'log.txt').read_text()[-4000:]}"
        return {
            name: [torch.load(out / f"{name}.rank_{rank}.pt", weights_only=True) for rank in range(2)]
            for name in configs
        }

    return run
