# SPDX-License-Identifier: Apache-2.0
"""CPU seconds per 1,000 rollouts with nothing to repair, with and without the extension; prints one JSON line each.

    PYTHONPATH=CHECKOUT:NEMO_RL python tests/nemo_rl/measure_overhead.py [NUM_ROLLOUTS]

Real NemoGym actor, aligners and NeMo-RL's synchronous rollout, answered at the network edge. CPU time rather than wall
time: a busy machine does not blur it. `actor` is the process whose event loop serves all rollouts.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import ray

sys.path.insert(0, str(Path(__file__).parent))

import conftest
import driving
import gym_edge

GENERATIONS = 8


def cpu(pids):
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def measure(root, checkpoint, rows, *, aligned, dedup):
    from nemo_rl_ext.integration.in_process import uninstall
    from nemo_rl_ext.integration.install import install_driver

    if aligned:
        assert install_driver()
    config = driving.image_recipe(
        root, checkpoint, rows, dedup=dedup, aligned=aligned, generations=GENERATIONS, repeat=1
    )
    name = "EdgeAlignedNemoGym" if aligned else "EdgeNemoGym"
    with pytest.MonkeyPatch.context() as patch:
        processor, train, gym = driving.prepare(config, patch, name)
    actor = [ray.get(gym.__ray_call__.remote(lambda self: os.getpid()))]
    aligners = ray.get(gym.__ray_call__.remote(lambda self: self._alignment.pool.pids())) if aligned else []
    driving.rollout_in_driver(config, processor, train, gym, generations=GENERATIONS)
    before = [cpu(actor), cpu(aligners), cpu([os.getpid()])]
    started = time.perf_counter()
    done = 0
    for first in range(2, len(train), 2):
        result = driving.rollout_in_driver(
            config, processor, train, gym, generations=GENERATIONS, first=first
        )
        done += len(result.final_batch["message_log"])
    wall = time.perf_counter() - started
    after = [cpu(actor), cpu(aligners), cpu([os.getpid()])]
    ray.kill(gym)
    if aligned:
        assert result.rollout_metrics["alignment/media_repaired"] == 0
        uninstall()
    scale = 1000 / done
    names = ("actor_cpu_s", "aligners_cpu_s", "driver_cpu_s")
    spent = {name: round((b - a) * scale, 2) for name, a, b in zip(names, before, after, strict=True)}
    return {"aligned": aligned, "dedup": dedup, "rollouts": done, **spent, "wall_s": round(wall * scale, 2)}


def step_rows(step):
    one, three = driving.urls([(480, 640)], 4 * step), driving.urls([(160, 320)] * 3, 4 * step + 1)
    return [
        gym_edge.image_row(one, [[300]], id=f"one {step}"),
        gym_edge.image_row(three, [[50, 50, 50]], id=f"three {step}"),
    ]


def main():
    num_rollouts = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    asyncio.set_event_loop(asyncio.new_event_loop())
    directory = Path(tempfile.mkdtemp(prefix="nrx-measure-"))
    checkpoint = conftest.write_checkpoint(directory / "nano")
    # Every prompt group has images of its own, as in training; the first two rows warm the processes up.
    num_steps = 1 + -(-num_rollouts // (2 * GENERATIONS))
    rows = driving.write_rows(
        directory / "rows.jsonl", [row for step in range(num_steps) for row in step_rows(step)]
    )
    root = Path(conftest.find_spec("nemo_rl").submodule_search_locations[0]).parent
    with conftest.running_head():
        for dedup in (False, True):
            for aligned in (False, True):
                measured = measure(root, checkpoint, rows, aligned=aligned, dedup=dedup)
                print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
