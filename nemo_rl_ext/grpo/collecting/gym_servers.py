# SPDX-License-Identifier: Apache-2.0
"""NeMo-Gym's servers as one child process of the run.

Gym lives in an environment of its own (`make gym`), so nothing of it is imported here. `start_gym` starts Gym's head
server, model server, agents and verifiers against an OpenAI-compatible endpoint and ends them on the way out.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import yaml

logger = logging.getLogger(__name__)

MODEL_CONFIG = Path("responses_api_models/engine_token_ids/configs/engine_token_ids.yaml")
SERVER_FOLDERS = ("resources_servers", "responses_api_models", "responses_api_agents")
_LOG_LINES = 25
_ATTEMPTS = 3

# Gym in a process group of its own, ended when our end of its standard input closes: by `close`, or by our own death.
_KEEPER = """
set -m
exec 3<&0
"$@" </dev/null 3<&- &
child=$!
set +m
(
    cat <&3 >/dev/null
    kill -INT -- -$child 2>/dev/null
    for _ in $(seq 100); do kill -0 -- -$child 2>/dev/null || exit 0; sleep 0.1; done
    kill -KILL -- -$child 2>/dev/null
) &
wait $child
"""


class GymError(RuntimeError):
    """Gym's servers do not start or have died: infrastructure, not data. One string."""


@dataclass(frozen=True, kw_only=True)
class GymConfig:
    """What to start."""

    venv: Path
    """Gym's environment, as built by `make gym`."""
    root: Path
    """Folder with our `resources_servers` and `responses_api_models`."""
    config_paths: Sequence[Path | str]
    """Gym configuration files of agents and verifiers; relative ones are looked up in `root`, then in Gym."""
    base_url: str
    """The engine's OpenAI-compatible endpoint, ending in `/v1`."""
    model_name: str
    """The name that the endpoint knows its model by."""
    run_dir: Path
    """Where Gym works and logs; kept."""
    overrides: Sequence[str] = ()
    """Further `key=value` overrides of Gym's configuration."""
    start_timeout_s: float = 300.0
    """Seconds until every server must answer; a start that fails is tried twice more."""


class GymServers:
    """Running Gym servers; made by `start_gym`."""

    def __init__(self, process: subprocess.Popen[bytes], head_url: str, log_path: Path) -> None:
        self.head_url = head_url
        self.log_path = log_path
        self._process = process
        self._urls: dict[str, str] = {}

    @property
    def urls(self) -> Mapping[str, str]:
        """Address of every server by its name in the configuration."""
        return self._urls

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when every server answers. Raises `GymError` with the end of Gym's log when one does not."""
        deadline = time.monotonic() + timeout_s
        waiting: list[str] = ["head server"]
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise GymError(
                    f"Gym ended with status {self._process.returncode} while starting; {self._log_tail()}"
                )
            if not self._urls:
                self._urls = _server_urls(self.head_url)
            waiting = (
                [name for name, url in self._urls.items() if not _answers(url)] if self._urls else waiting
            )
            if not waiting:
                return
            time.sleep(0.5)
        raise GymError(f"{', '.join(waiting)} did not answer within {timeout_s:g} s; {self._log_tail()}")

    def check(self) -> None:
        """Raise `GymError` when Gym has died."""
        if self._process.poll() is not None:
            raise GymError(f"Gym ended with status {self._process.returncode}; {self._log_tail()}")

    def close(self) -> None:
        """End all servers; safe to call twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            logger.warning("Gym did not end within 20 s; see %s", self.log_path)

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        return f"the end of {self.log_path}:\n" + "\n".join(lines)


@contextmanager
def start_gym(config: GymConfig) -> Iterator[GymServers]:
    """Start Gym and end it on the way out. Raises `GymError` when it cannot be started."""
    gym = config.venv.absolute() / "bin" / "gym"
    if not gym.exists():
        raise GymError(
            f"no NeMo-Gym environment in {config.venv}; build it with: make gym (GYM_VENV=dir for elsewhere)"
        )
    # Gym looks for servers below its working directory and writes caches there; links keep the sources clean
    config.run_dir.mkdir(parents=True, exist_ok=True)
    for folder in SERVER_FOLDERS:
        link, target = config.run_dir / folder, config.root.absolute() / folder
        if target.is_dir() and not link.exists():
            link.symlink_to(target, target_is_directory=True)
    with tempfile.TemporaryDirectory(prefix="gym-ray-") as ray_dir:
        servers = _launch(gym, config, ray_dir)
        try:
            for left in range(_ATTEMPTS - 1, -1, -1):
                try:
                    servers.wait_until_ready(config.start_timeout_s)
                    break
                except GymError as error:
                    # Gym starts a Ray, which gives itself 30 s; an engine that starts on the same cores can use them
                    # up, and then Gym ends or, when only a part of Ray is missing, waits for ever
                    if not left:
                        raise
                    logger.warning("starting Gym again: %s", error)
                    servers.close()
                    servers = _launch(gym, config, ray_dir)
            logger.info("Gym is ready: %s", ", ".join(sorted(servers.urls)))
            yield servers
        finally:
            servers.close()


def _launch(gym: Path, config: GymConfig, ray_dir: str) -> GymServers:
    port = _free_port()
    paths = ",".join(str(path) for path in (MODEL_CONFIG, *config.config_paths))
    command = [
        str(gym), "env", "start", f"+config_paths=[{paths}]",
        f"++policy_base_url={config.base_url}", "++policy_api_key=none", f"++policy_model_name={config.model_name}",
        "++head_server.host=127.0.0.1", f"++head_server.port={port}", "++default_host=127.0.0.1",
        "++skip_venv_if_present=true", f"++uv_venv_dir={config.venv.absolute()}/gym-servers", *config.overrides,
    ]  # fmt: skip
    log_path = config.run_dir / "gym.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", _KEEPER, "gym-keeper", *command],
            cwd=config.run_dir,
            env=_environment(config.venv.absolute(), ray_dir),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell's background job ignores Ctrl-C and so would Gym, which is ended by that signal.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    return GymServers(process, f"http://127.0.0.1:{port}", log_path)


def post_json(url: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """POST to a server of this machine.

    Raises:
        httpx.HTTPError: it does not answer in time, or with an error status (`httpx.HTTPStatusError`).
        ValueError: the answer is not JSON.
    """
    answer = _direct.post(url, json=body, timeout=timeout_s).raise_for_status()
    return cast(dict[str, Any], answer.json())


def _server_urls(head_url: str) -> dict[str, str]:
    """Addresses from the head server's configuration; empty while it does not answer."""
    try:
        answer = _direct.get(f"{head_url}/global_config_dict_yaml").raise_for_status()
        configuration = yaml.safe_load(answer.json())
    except (httpx.HTTPError, ValueError):
        return {}
    urls = {}
    for name, kinds in configuration.items():
        for kind in SERVER_FOLDERS:
            for server in (kinds.get(kind) or {}).values() if isinstance(kinds, dict) else ():
                urls[name] = f"http://{server['host']}:{server['port']}"
    return urls


def _answers(url: str) -> bool:
    try:
        _direct.get(url)
    except httpx.HTTPError:
        return False
    return True  # a server without a page at / still answers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(venv: Path, ray_dir: str) -> dict[str, str]:
    # our interpreter's path and our Ray are of no use to another Python with another Ray
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "PYTHONHOME") and not k.startswith("RAY_")
    }
    return kept | {
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "VIRTUAL_ENV": str(venv),
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": ray_dir,
        "RAY_USAGE_STATS_ENABLED": "0",
        "UV_PYTHON_DOWNLOADS": "never",
        "WANDB_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
    }


# Servers on this machine are never reached through a proxy, nor with certificates. Every request has a connection of
# its own: one that the server is about to close would cost a row.
_direct = httpx.Client(
    trust_env=False,
    verify=False,
    timeout=5,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
)
