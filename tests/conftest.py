# SPDX-License-Identifier: Apache-2.0
"""Settings that must stand before torch, vLLM or Ray are imported, and deterministic property tests."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

for name, value in {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Compiling the first multimodal call takes a minute on a CPU and gains nothing.
    "TORCHDYNAMO_DISABLE": "1",
    # The engine runs in the test's own process or actor: no child process to lose.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

settings.register_profile(
    "repository",
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repository")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed; `make setup` installs it"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny float32 checkpoint; read-only, one for the whole test run, its parallel workers included."""
    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return build_tiny_checkpoint(folder / "tiny_checkpoint")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray for all tests of this process that do not watch Ray itself start or end; a run takes one it finds."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=512 << 20,
        namespace="tests",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`nemo-rl-ext ARGUMENTS` in this process, from its arguments to its exit code."""
    from nemo_rl_ext import cli

    package = logging.getLogger("nemo_rl_ext")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(package, name, getattr(package, name))

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.argv", ["nemo-rl-ext", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        output = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, output.out, output.err)

    return run


@pytest.fixture(autouse=True, scope="module")
def torch_s_own_dtype() -> Iterator[None]:
    """Give torch its default dtype back: an engine in a test's process may leave its own behind."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_default_dtype(torch.float32)
