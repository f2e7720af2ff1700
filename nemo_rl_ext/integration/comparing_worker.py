# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's vLLM workers, comparing the engine's prompt ids with the trainer's. Imported in the workers alone.

A process that receives one of the actors imports this module for the class below it, and is bound by that.
"""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm import vllm_worker, vllm_worker_async

from nemo_rl_ext.integration.in_process import is_wrapped, wrap
from nemo_rl_ext.integration.prompt_comparison import compare_batch, compare_stream, remember_ids

for _module in (vllm_worker, vllm_worker_async):
    wrap(_module, "format_prompt_for_vllm_generation", remember_ids)


class ComparingWorkerImpl(vllm_worker.VllmGenerationWorkerImpl):  # type: ignore[misc]
    """The synchronous worker."""

    def generate(self, *args: Any, **options: Any) -> Any:
        """As NeMo-RL's.

        Raises:
            PromptMismatch: when the engine expanded a prompt otherwise than the trainer.
        """
        if self.llm is not None and not is_wrapped(self.llm.generate):
            wrap(self.llm, "generate", compare_batch)
        return super().generate(*args, **options)


class ComparingAsyncWorkerImpl(vllm_worker_async.VllmAsyncGenerationWorkerImpl):  # type: ignore[misc]
    """The asynchronous worker."""

    async def generate_async(self, *args: Any, **options: Any) -> Any:
        """As NeMo-RL's.

        Raises:
            PromptMismatch: when the engine expanded a prompt otherwise than the trainer.
        """
        if self.llm is not None and not is_wrapped(self.llm.generate):
            wrap(self.llm, "generate", compare_stream)
        async for result in super().generate_async(*args, **options):
            yield result


# Names of their own: a class whose name is bound to its actor would pickle by value, and not import this module.
# Nsight's patterns are NeMo-RL's own.
ComparingWorker = ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})(
    ComparingWorkerImpl
)
ComparingAsyncWorker = ray.remote(
    runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")}
)(ComparingAsyncWorkerImpl)
