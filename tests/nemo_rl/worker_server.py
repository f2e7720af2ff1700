# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own OpenAI-compatible server over a real vLLM engine: `worker_server.py MODEL PORT PLUGIN`.

Runs in the engine's environment, which is not NeMo-RL's: only the methods that build the engine and the server are
used, on a worker that was never put in a Ray actor. The application, request and response classes are NeMo-RL's.
"""

import importlib
import sys
from importlib.util import find_spec
from unittest import mock

import transformers

if find_spec("pynvml") is None:
    # NeMo-RL asks it about GPUs' memory; there is no GPU here.
    sys.modules["pynvml"] = mock.MagicMock(name="pynvml")
# One of NeMo-RL's patches for another model insists on an older transformers than this engine brings.
with mock.patch.object(transformers, "__version__", "5.11.0"):
    from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

RENAMED = {
    "vllm.entrypoints.chat_utils": "vllm.renderers.chat_utils",
    "vllm.entrypoints.openai.engine.protocol": "vllm.entrypoints.serve.engine.protocol",
}
"""Modules of the vLLM that NeMo-RL pins, under the names that a later vLLM gave them."""

ENGINE = {
    "served_model_name": "policy",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 64 << 20,
    "mm_processor_cache_gb": 0,
    "limit_mm_per_prompt": {"image": 8},
    "hf_overrides": {"vit_hidden_size": 32},
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "logprobs_mode": "raw_logprobs",
}


def main(model, port, plugin):
    for old, new in RENAMED.items():
        try:
            importlib.import_module(old)
        except ModuleNotFoundError:
            sys.modules[old] = importlib.import_module(new)
    worker = object.__new__(VllmAsyncGenerationWorkerImpl)
    worker._reserved_socket = worker._sparse_refit_receiver = None
    worker.cfg = {
        "vllm_cfg": {
            "expose_http_server": True,
            "tool_parser_plugin": plugin or None,
            "http_server_serving_chat_kwargs": {"chat_template_content_format": "openai"},
        },
        "temperature": 1.0,
        "top_p": 1.0,
        "val_temperature": 0.0,
        "val_top_p": 1.0,
        "port_range_low": int(port),
        "port_range_high": int(port) + 1,
    }
    worker._create_engine({"model": model, **ENGINE})
    print(f"READY {worker.base_url}", flush=True)
    worker.server_thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
