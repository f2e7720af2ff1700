# SPDX-License-Identifier: Apache-2.0
"""What is bound in the driver of a run without NeMo-Gym: the workers that compare prompt ids, under NeMo-RL's venvs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nemo_rl_ext.integration.in_process import bind, wrap

logger = logging.getLogger(__name__)

_HERE = "nemo_rl_ext.integration.comparing_worker"
_UPSTREAM = "nemo_rl.models.generation.vllm"
WORKERS = {
    f"{_UPSTREAM}.vllm_worker.VllmGenerationWorker": f"{_HERE}.ComparingWorker",
    f"{_UPSTREAM}.vllm_worker_async.VllmAsyncGenerationWorker": f"{_HERE}.ComparingAsyncWorker",
}
"""The worker that NeMo-RL would start, and the one that compares."""


def install_comparison() -> None:
    """Let NeMo-RL start the comparing workers, in the environments that it has for its own. Idempotent."""
    import nemo_rl.distributed.worker_groups as groups
    import nemo_rl.models.generation.vllm.vllm_generation as generation
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    for theirs, ours in WORKERS.items():
        if ACTOR_ENVIRONMENT_REGISTRY.get(ours) is None:
            bind(ACTOR_ENVIRONMENT_REGISTRY, ours, ACTOR_ENVIRONMENT_REGISTRY[theirs])
    wrap(generation, "resolve_generation_worker_cls", _with_comparing_worker)
    wrap(groups, "create_local_venv_on_each_node", _in_the_same_venv)
    logger.info(
        "grpo.media_alignment compares the engine's prompt ids with the trainer's for every request with media; "
        "without NeMo-Gym nothing is repaired or masked, and the first difference stops the run"
    )


def _with_comparing_worker(original: Callable[..., str]) -> Callable[..., str]:
    def resolve(default_cls: str, config: Any) -> str:
        return WORKERS.get(name := original(default_cls, config), name)

    return resolve


def _in_the_same_venv(original: Callable[..., str]) -> Callable[..., str]:
    theirs = {ours: name for name, ours in WORKERS.items()}

    def create(py_executable: str, venv_name: str) -> str:
        return original(py_executable=py_executable, venv_name=theirs.get(venv_name, venv_name))

    return create
