# SPDX-License-Identifier: Apache-2.0
"""Whether `nemo-rl-ext size` is right where it can be checked: prompt groups on a simulated cluster of three nodes.

python -m benchmarks sizing
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench_pool import make_checkpoint
from benchmarks.group import SIZE, requests

NODES = 3
GENERATIONS, IMAGES = 8, 4
PROMPTS = (2, 4, 8)


def cpu(pids: list[int]) -> float:
    """CPU seconds of processes so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def step(pool: Any, brokers: list[Any], groups: list[list[Any]]) -> dict[str, float]:
    """All rollouts of one step, those of a prompt beside each other, as they end."""
    import ray

    aligners = pool.pids()
    made = ray.get(brokers[0].counts.remote())
    broker = [ray.get(brokers[0].pid.remote())]
    before = cpu(aligners), cpu(broker), cpu([os.getpid()])
    for future in [pool.submit_align([request]) for group in groups for request in group]:
        assert not future.result()[0].report.neutral
    after = cpu(aligners), cpu(broker), cpu([os.getpid()])
    counts = ray.get(brokers[0].counts.remote())
    names = ("aligner_cpu_s", "broker_cpu_s", "collect_cpu_s")
    return {name: b - a for name, a, b in zip(names, before, after, strict=True)} | {
        "renders": counts["made"] - made["made"],
        "bytes": counts["made_bytes"] - made["made_bytes"],
    }


def main() -> None:
    """Calibrate, print the command's table, and compare its arithmetic with steps that fit here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sizing", description=__doc__)
    parser.add_argument("--save-costs", type=Path, default=None)
    options = parser.parse_args()
    # A busy machine starts nodes slowly.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
    import ray
    import torch
    from ray.cluster_utils import Cluster

    from nemo_rl_ext.media.policy import MediaPolicy
    from nemo_rl_ext.media.unchanged_files import SETTLED_S
    from nemo_rl_ext.rollout.aligner import AlignerConfig
    from nemo_rl_ext.rollout.broker import end_brokers, start_brokers
    from nemo_rl_ext.rollout.calibration import calibrate
    from nemo_rl_ext.rollout.pool import AlignerPool
    from nemo_rl_ext.rollout.sizing import Workload, needs

    logging.getLogger("nemo_rl_ext").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        checkpoint = make_checkpoint(folder / "checkpoint")
        costs = calibrate(checkpoint, SIZE)
        print("measured: " + json.dumps({k: float(f"{v:.4g}") for k, v in dataclasses.asdict(costs).items()}))
        if options.save_costs:
            options.save_costs.write_text(json.dumps(dataclasses.asdict(costs), indent=1) + "\n")
        config = AlignerConfig(
            model_dir=checkpoint,
            media_policy=MediaPolicy(roots=(folder,)),
            base_dir=folder,
            dtype=torch.bfloat16,
            share=True,
        )
        node = {"num_cpus": 1, "object_store_memory": 600 << 20}
        made = Cluster(
            initialize_head=True, head_node_args=node | {"num_cpus": 0, "include_dashboard": False}
        )
        for _ in range(NODES):
            made.add_node(**node)
        ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
        try:
            brokers = start_brokers()
            pool = AlignerPool(config, NODES)
            work = {
                (prompts, own): [
                    requests(pool.family, folder, IMAGES, GENERATIONS, seed=100 * prompts + number, own=own)
                    for number in range(prompts)
                ]
                for prompts, own in [*((prompts, False) for prompts in PROMPTS), (1, True)]
            }
            warm = [requests(pool.family, folder, IMAGES, 2 * NODES, seed=1, own=True)]
            time.sleep(SETTLED_S)
            step(pool, brokers, warm)
            for (prompts, own), groups in work.items():
                found = step(pool, brokers, groups)
                asked = Workload(
                    prompts=prompts,
                    gpus=8 * NODES,
                    generations=GENERATIONS,
                    images=IMAGES,
                    own_images=IMAGES * own,
                    max_age=0,
                )
                said = needs(asked, costs)
                bytes_said = asked.distinct * costs.image_bytes
                broker_said = asked.distinct * costs.claim_s * NODES
                print(
                    f"{prompts} prompts{', own images' * own}: renders {found['renders']} of {asked.distinct:g}, "
                    f"bytes {found['bytes'] / bytes_said:.3f} of what was said, aligner CPU "
                    f"{found['aligner_cpu_s']:.2f} s against {said.aligner_cpu_s:.2f} s "
                    f"({found['aligner_cpu_s'] / said.aligner_cpu_s:.2f}), broker {found['broker_cpu_s']:.2f} s "
                    f"against at most {broker_said:.2f} s, collecting {found['collect_cpu_s']:.2f} s against "
                    f"{said.collect_cpu_s:.2f} s",
                    flush=True,
                )
            pool.shutdown()
            end_brokers(brokers)
        finally:
            ray.shutdown()
            made.shutdown()


if __name__ == "__main__":
    main()
