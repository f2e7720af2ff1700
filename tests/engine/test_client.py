# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the engine: a real vLLM in a real actor, killed and lost in the ways that Ray has."""

import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest

pytestmark = pytest.mark.engine


def test_an_engine_killed_while_its_replacement_starts_is_one_restart(tiny_checkpoint, cluster):
    import ray

    from nemo_rl_ext.grpo.engine.actor import start_engine
    from nemo_rl_ext.grpo.engine.client import EngineClient
    from nemo_rl_ext.grpo.engine.config import EngineConfig
    from nemo_rl_ext.grpo.engine.requests import GenerationRequest

    starts, began = [], time.time()

    def start():
        starts.append(time.monotonic())
        if len(starts) == 2:
            threading.Thread(target=kill_what_starts, daemon=True).start()
        return start_engine(EngineConfig(model=str(tiny_checkpoint)))

    def kill_what_starts():
        while True:
            for process in psutil.Process().children(recursive=True):
                if (
                    process.name().startswith("ray::EngineActo")
                    and process.pid != first
                    and process.create_time() > began
                ):
                    process.kill()
                    return
            time.sleep(0.01)

    engine = EngineClient(start)
    try:
        first = engine.health()["pid"]
        os.kill(first, signal.SIGKILL)
        asked = GenerationRequest(prompt_token_ids=np.arange(60, 70, dtype=np.int32), max_new_tokens=3)
        (result,) = engine.generate([asked])
        assert len(result.outputs[0].token_ids) and result.error is None
        assert (engine.restarts, len(starts)) == (2, 3)

        # A request or a result that Ray lost is sent again, to the engine that is there.
        lost = [ray.exceptions.ObjectReconstructionFailedError("ab" * 28)]
        alive = engine.health()["pid"]
        assert engine._call(lambda actor: ray.put(1) if not lost else _raise(lost.pop())) == 1
        assert engine.health()["pid"] == alive and engine.restarts == 2
    finally:
        engine.shutdown()


def _raise(error):
    raise error
