# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own workers without NeMo-Gym: they format, ask, and hand back trainer's ids, compared now.

Only the engine below them is replaced: it answers with the ids that it is given.
"""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

from nemo_rl_ext.integration.comparison_install import WORKERS, install_comparison
from nemo_rl_ext.integration.in_process import uninstall
from nemo_rl_ext.integration.prompt_comparison import PromptMismatch

TRAINER = [1, 20, 18, 18, 18, 21, 5]
CONFIG = {
    "_pad_token_id": 0,
    "vllm_cfg": {"max_model_len": 64, "async_engine": False},
    "max_new_tokens": 4,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "stop_token_ids": None,
    "stop_strings": None,
    "vllm_kwargs": {},
}


def batch():
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([TRAINER]),
            "input_lengths": torch.tensor([len(TRAINER)]),
            "vllm_content": ["<img> look"],
            "vllm_images": [["picture"]],
        }
    )


class Engine:
    def __init__(self, seen):
        self.seen = seen
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64, model="tiny"))

    def answer(self):
        made = SimpleNamespace(token_ids=[7, 8], logprobs=None, finish_reason="stop", routed_experts=None)
        return SimpleNamespace(prompt_token_ids=self.seen, outputs=[made])


class BatchEngine(Engine):
    def generate(self, prompts, *_, **__):
        return [self.answer() for _ in prompts]


class StreamEngine(Engine):
    async def generate(self, prompt, sampling_params, request_id):
        yield self.answer()


def worker(implementation, engine, monkeypatch):
    made = object.__new__(implementation)
    made.cfg, made.llm, made.routed_experts_dtype = CONFIG, engine, torch.int16
    monkeypatch.setattr(implementation, "_build_sampling_params", lambda *_, **__: None)
    return made


SHORT = [1, 20, 18, 18, 21, 5]
COUNTS = r"made 6 ids.*the trainer has 7.*engine \[2\], trainer \[3\]"


def test_the_synchronous_worker(monkeypatch):
    from nemo_rl_ext.integration.comparing_worker import ComparingWorkerImpl

    outputs = worker(ComparingWorkerImpl, BatchEngine(TRAINER), monkeypatch).generate(batch())
    assert outputs["output_ids"][0].tolist() == [*TRAINER, 7, 8]
    with pytest.raises(PromptMismatch, match=COUNTS):
        worker(ComparingWorkerImpl, BatchEngine(SHORT), monkeypatch).generate(batch())


def test_the_asynchronous_worker(monkeypatch):
    from nemo_rl_ext.integration.comparing_worker import ComparingAsyncWorkerImpl

    monkeypatch.setitem(CONFIG["vllm_cfg"], "async_engine", True)

    async def collect(seen):
        made = worker(ComparingAsyncWorkerImpl, StreamEngine(seen), monkeypatch)
        return [output async for output in made.generate_async(batch())]

    ((_, outputs),) = asyncio.run(collect(TRAINER))
    assert outputs["output_ids"][0].tolist() == [*TRAINER, 7, 8]
    with pytest.raises(PromptMismatch, match=COUNTS):
        asyncio.run(collect(SHORT))


def test_nemo_rl_starts_the_comparing_workers_in_its_own_environments(monkeypatch):
    import nemo_rl.distributed.worker_groups as groups
    import nemo_rl.models.generation.vllm.vllm_generation as generation
    from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env

    asked = []
    monkeypatch.setattr(
        groups, "create_local_venv_on_each_node", lambda py_executable, venv_name: asked.append(venv_name)
    )
    try:
        for _ in range(2):
            install_comparison()
        for theirs, ours in WORKERS.items():
            assert generation.resolve_generation_worker_cls(theirs, {"quant_cfg": None}) == ours
            assert get_actor_python_env(ours) == get_actor_python_env(theirs)
            groups.create_local_venv_on_each_node(py_executable="uv run", venv_name=ours)
        assert asked == list(WORKERS)
    finally:
        uninstall()


BOUND = """
import pickle, sys
held = pickle.load(open(sys.argv[1], "rb"))
from nemo_rl.models.generation.vllm import vllm_worker, vllm_worker_async
from nemo_rl_ext.integration.in_process import is_wrapped
for module in (vllm_worker, vllm_worker_async):
    assert is_wrapped(module.format_prompt_for_vllm_generation), module
from nemo_rl_ext.integration.comparing_worker import ComparingAsyncWorkerImpl
assert issubclass(held, ComparingAsyncWorkerImpl)
generate = ComparingAsyncWorkerImpl.__mro__[1].generate_async
assert generate.__globals__ is vars(vllm_worker_async)
"""


def test_a_process_that_receives_the_worker_is_bound(tmp_path):
    from nemo_rl_ext.integration.comparing_worker import ComparingAsyncWorker

    pickled = tmp_path / "worker"
    pickled.write_bytes(ray.cloudpickle.dumps(ComparingAsyncWorker.__ray_metadata__.modified_class))
    subprocess.run([sys.executable, "-c", BOUND, str(pickled)], check=True)
