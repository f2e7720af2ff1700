# SPDX-License-Identifier: Apache-2.0
"""Real NeMo-RL objects, a processor with the released checkpoints' contract, and a Ray head of the tests' own.

The only fake is at the network edge: `FakeGymEdge` answers where NeMo-Gym's servers would.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENGINE_PYTHON = Path(os.environ.get("ENGINE_PYTHON", HERE.parents[1] / ".venv/bin/python"))
HAS_NEMO_RL = find_spec("nemo_rl") is not None
REASON = "NeMo-RL is not on the import path; `make test-nemo-rl NEMO_RL=/path/to/RL` runs these tests"

if HAS_NEMO_RL:
    # `gym_edge` is imported here and in Ray's workers, `tiny_processor` is copied into checkpoints.
    sys.path.insert(0, str(HERE))
else:
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if path.name != "test_checkout.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.nemo_rl)
            if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
                # Most of it goes into NeMo-RL's imports in Ray's workers.
                item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def nemo_rl_root() -> Path:
    """NeMo-RL's checkout: the directory that holds `nemo_rl` and `examples`."""
    root = Path(find_spec("nemo_rl").submodule_search_locations[0]).parent
    if not (root / "examples").is_dir():
        pytest.skip(f"{root} has no examples/: recipes need a checkout")
    return root


def write_checkpoint(
    directory: Path,
    processor_class: str = "NemotronH_Nano_Omni_Reasoning_V3Processor",
    tokenizer_of: Path | None = None,
) -> Path:
    """A directory from which NeMo-RL's `get_tokenizer(get_processor=True)` loads the tiny processor, offline.

    `tokenizer_of` names a checkpoint whose tokenizer it takes over.
    """
    import tiny_processor

    directory.mkdir(parents=True)
    if tokenizer_of is None:
        tiny_processor.make_tokenizer().save_pretrained(directory)
    else:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tokenizer_of / name, directory / name)
    shutil.copy(HERE / "tiny_processor.py", directory / "processing_tiny.py")
    (directory / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "processor_class": processor_class,
                "image_processor_type": "TinyOmniImageProcessor",
                "patch_size": 16,
                "min_num_patches": 16,
                "max_num_patches": 13312,
                "max_model_len": 16384,
                "downsample_ratio": 0.5,
                "norm_mean": [0.5, 0.5, 0.5],
                "norm_std": [0.5, 0.5, 0.5],
                "auto_map": {
                    "AutoProcessor": f"processing_tiny.{processor_class}",
                    "AutoImageProcessor": "processing_tiny.TinyOmniImageProcessor",
                },
            }
        )
    )
    (directory / "configuration_tiny.py").write_text(
        "from transformers import PretrainedConfig\n\n\n"
        'class TinyOmniConfig(PretrainedConfig):\n    model_type = "tiny_omni"\n'
    )
    (directory / "config.json").write_text(
        json.dumps(
            {
                "model_type": "tiny_omni",
                "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
                "patch_size": 16,
                "downsample_ratio": 0.5,
                "norm_mean": [0.5, 0.5, 0.5],
                "norm_std": [0.5, 0.5, 0.5],
                "auto_map": {"AutoConfig": "configuration_tiny.TinyOmniConfig"},
            }
        )
    )
    return directory


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "nano")


@pytest.fixture(scope="session")
def super_checkpoint(tmp_path_factory) -> Path:
    """The same under a class name that NeMo-RL's allowlists do not know."""
    return write_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "super", "NemotronH_Omni_Reasoning_V3Processor"
    )


@pytest.fixture(scope="session")
def ray_head():
    with running_head() as address:
        yield address


@contextlib.contextmanager
def running_head(object_store_memory: int = 800_000_000):
    """A Ray head on ports and a directory of its own, so that neither another cluster nor another run is met."""
    paths = [str(HERE), str(HERE.parents[1]), *(os.environ.get("PYTHONPATH") or "").split(os.pathsep)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
        "RAY_AUTH_MODE": "disabled",
        # A busy machine starts slowly.
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    os.environ.update({"RAY_AUTH_MODE": "disabled", "PYTHONPATH": env["PYTHONPATH"]})
    for _ in range(MAX_STARTS):
        # Ray's socket paths must stay short; pytest's directories are long.
        directory = tempfile.mkdtemp(prefix="nrx-", dir="/tmp")
        head, port = _start_head(directory, env, object_store_memory)
        if _is_up(head, Path(directory)):
            break
        _stop_head(head, directory)
    else:
        raise RuntimeError(f"Ray's head did not start in {MAX_STARTS} attempts; is this machine very busy?")
    import ray
    from ray.util import get_node_ip_address

    address = f"{get_node_ip_address()}:{port}"
    os.environ["RAY_ADDRESS"] = address
    ray.init(
        address=address,
        log_to_driver=True,
        logging_level="WARNING",
        runtime_env={"env_vars": {"PYTHONPATH": env["PYTHONPATH"]}},
    )
    try:
        yield address
    finally:
        ray.shutdown()
        _stop_head(head, directory)
        os.environ.pop("RAY_ADDRESS", None)


MAX_STARTS = 5


def _start_head(
    directory: str, env: dict[str, str], object_store_memory: int
) -> tuple[subprocess.Popen, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with Path(directory, "head.log").open("wb") as log:
        head = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "ray"),
                "start",
                "--head",
                "--block",
                f"--port={port}",
                "--num-cpus=16",
                "--include-dashboard=false",
                f"--temp-dir={directory}",
                f"--object-store-memory={object_store_memory}",
                "--disable-usage-stats",
            ],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return head, port


def _is_up(head: subprocess.Popen, directory: Path) -> bool:
    """Wait until every process of a head is up, which its command says, or one has ended."""
    raylet = directory / "session_latest" / "logs" / "raylet.out"
    while "block forever" not in (directory / "head.log").read_text(errors="replace"):
        # On a busy machine the raylet gives up on its agent after 30 seconds, and the command waits on for the raylet.
        gave_up = raylet.exists() and "Timed out waiting for file" in raylet.read_text(errors="replace")
        if gave_up or head.poll() is not None:
            return False
        time.sleep(0.5)
    return True


def _stop_head(head: subprocess.Popen, directory: str) -> None:
    head.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        head.wait(timeout=60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(head.pid, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def installed():
    """The driver's hooks, taken out again afterwards."""
    from nemo_rl_ext.integration.in_process import uninstall
    from nemo_rl_ext.integration.install import install_driver

    assert install_driver()
    yield
    uninstall()


@pytest.fixture(scope="session")
def engine(tmp_path_factory, nemo_rl_root):
    """The tiny checkpoint's directory and the URL of NeMo-RL's server: 512 tokens of context, grids recorded.

    vLLM cannot share NeMo-RL's CPU environment, so the server runs from the engine's.
    """
    from nemo_rl_ext.integration.capture import PLUGIN

    if not ENGINE_PYTHON.exists():
        pytest.skip(f"{ENGINE_PYTHON} does not exist: `make setup` builds it, ENGINE_PYTHON names another")
    directory = tmp_path_factory.mktemp("engine")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), str(nemo_rl_root))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    env.pop("HF_MODULES_CACHE", None)
    build = (
        "import sys; from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint; "
        "build_tiny_checkpoint(sys.argv[1], dtype='bfloat16', max_num_patches=13312)"
    )
    model = directory / "model"
    subprocess.run([ENGINE_PYTHON, "-c", build, str(model)], env=env, check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server_script = HERE / "worker_server.py"
    log = directory / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*map(str, (ENGINE_PYTHON, "-W", "ignore", server_script, model, port, PLUGIN))],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while "READY " not in (text := log.read_text(errors="replace")):
            assert server.poll() is None, text[-3000:]
            time.sleep(1)
        assert "media receipts are returned as `media_receipt`" in text
        yield model, text.split("READY ")[1].split()[0]
    finally:
        # The engine's core is a process of its own, in the server's session.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=30)
