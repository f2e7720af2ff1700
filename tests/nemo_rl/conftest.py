# SPDX-License-Identifier: Apache-2.0
"""Real NeMo-RL objects, a processor with the released checkpoints' contract, and a Ray head of the tests' own.

The only fake is at the network edge: `FakeGymEdge` answers where NeMo-Gym's servers would.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAS_NEMO_RL = find_spec("nemo_rl") is not None
REASON = "NeMo-RL is not on the import path; `make test-nemo-rl NEMO_RL=/path/to/RL` runs these tests"

if HAS_NEMO_RL:
    # `gym_edge` is imported here and in Ray's workers, `tiny_processor` is copied into checkpoints.
    sys.path.insert(0, str(HERE))
else:
    collect_ignore_glob = ["test_[!c]*.py"]


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
def running_head():
    """A Ray head on ports and a directory of its own, so that neither another cluster nor another run is met."""
    # Ray's socket paths must stay short; pytest's directories are long.
    directory = tempfile.mkdtemp(prefix="nrx-", dir="/tmp")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    paths = [str(HERE), str(HERE.parents[1]), *(os.environ.get("PYTHONPATH") or "").split(os.pathsep)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
        "RAY_AUTH_MODE": "disabled",
        # A busy machine starts slowly; past the second, Ray's raylet ends itself.
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_agent_register_timeout_ms": "300000",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    log = Path(directory) / "head.log"
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
            "--object-store-memory=800000000",
            "--disable-usage-stats",
        ],
        env=env,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    os.environ.update({"RAY_AUTH_MODE": "disabled", "PYTHONPATH": env["PYTHONPATH"]})
    import ray
    from ray.util import get_node_ip_address

    # The command says so once every process of the head is up.
    while "block forever" not in log.read_text(errors="replace"):
        if head.poll() is not None:
            raise RuntimeError(f"Ray's head did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.5)
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
        head.terminate()
        try:
            head.wait(timeout=60)
        except subprocess.TimeoutExpired:
            head.kill()
        os.environ.pop("RAY_ADDRESS", None)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def installed():
    """The driver's hooks, taken out again afterwards."""
    from nemo_rl_ext.integration.install import install_driver, uninstall

    assert install_driver()
    yield
    uninstall()
