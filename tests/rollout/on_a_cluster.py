# SPDX-License-Identifier: Apache-2.0
"""Aligners on several Ray nodes, simulated in one machine as Ray's own tests do; run by `test_cluster.py`.

python on_a_cluster.py CHECKPOINT DIRECTORY [LOSSES]     prints the name of each scenario that held, else a traceback

LOSSES is the number of nodes that go, one after the other; 2 unless given, each takes about half a minute.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import sys
import time
import traceback
from pathlib import Path

# A busy machine starts nodes slowly.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")

import numpy as np
import ray
import torch
from PIL import Image
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.cluster_utils import Cluster

from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.aligner import AlignerConfig, RolloutAligner
from nemo_rl_ext.rollout.broker import end_brokers, start_brokers
from nemo_rl_ext.rollout.fitting import TurnRequest
from nemo_rl_ext.rollout.pool import AlignerPool

MIB = 1 << 20
NODE = {"num_cpus": 1, "object_store_memory": 80 * MIB}
NODES = 3
PICTURES = 200
"""Of 2 MiB each when they are repaired: more than the stores of all nodes together."""


def config_of(checkpoint, folder):
    rng = np.random.default_rng(0)
    for number in range(PICTURES):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((640, 480)).save(folder / f"{number}.jpg", quality=90)
    return AlignerConfig(
        model_dir=checkpoint,
        media_policy=MediaPolicy(roots=(folder,)),
        base_dir=folder,
        share=True,
        cache_bytes=8 * MIB,
    )


@contextlib.contextmanager
def cluster():
    """A head without CPUs for aligners, and nodes with one each."""
    made = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "include_dashboard": False})
    nodes = [made.add_node(**NODE) for _ in range(NODES)]
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    made.wait_for_nodes()
    try:
        yield made, nodes
    finally:
        ray.shutdown()
        made.shutdown()


def turn(family, picture, row):
    grammar = family.grammar
    ids = [40, grammar.start_id, *[grammar.context_id] * 165, grammar.end_id]
    media = (MediaSource(ref=f"{picture}.jpg", where=f"row {row}"),)
    return TurnRequest(row_id=row, turn=0, token_ids=np.array(ids, np.int32), media=media)


class Expected:
    """What a picture's repair is when nothing is shared and nothing is lost."""

    def __init__(self, config):
        self.aligner = RolloutAligner(dataclasses.replace(config, share=False, cache_bytes=0))

    def equals(self, picture, aligned):
        (own,) = self.aligner.align([turn(self.aligner.family, picture, "expected")])
        found = torch.cat([aligned.tensors.values["pixel_values"]])
        return torch.equal(found, own.tensors.values["pixel_values"])


class RenderedAgain(logging.Handler):
    """Counts media that this process had to render again."""

    count = 0

    def emit(self, record):
        self.count += "rendered again" in record.getMessage()


def stores(made):
    """What the object stores of all nodes hold, and what they moved to disk."""
    return get_memory_info_reply(get_state_from_address(made.address)).store_stats


def private_mib(pids):
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    lines = [next(line for line in text.splitlines() if line.startswith("RssAnon")) for text in texts]
    return sum(int(line.split()[1]) for line in lines) / 1024


def nodes_lost(made, nodes, config, expected):
    """Nodes go, each later in its step, and others come."""
    brokers = start_brokers()
    pool = AlignerPool(config, NODES)
    assert len({node for _, node in pool.places()}) == NODES, "one aligner on each node"
    for moment in range(LOSSES):
        pictures = [40 * moment + number % 40 for number in range(120)]
        futures = [
            pool.submit_align([turn(pool.family, picture, f"r{number}")])
            for number, picture in enumerate(pictures)
        ]
        while sum(future.done() for future in futures) < 1 + 12 * moment:
            time.sleep(0.005)
        made.remove_node(nodes.pop(0), allow_graceful=moment % 2 == 0)
        nodes.append(made.add_node(**NODE))
        aligned = [future.result(timeout=240)[0] for future in futures]
        assert [item.report.row_id for item in aligned] == [f"r{number}" for number in range(120)]
        assert [item.report for item in aligned if item.report.neutral] == []
        assert [item for item in aligned if not item.report.repaired] == []
        # Of what the lost node held and what its broker owned no row is missing either.
        for picture, item in list(zip(pictures, aligned, strict=True))[:40:2]:
            assert expected.equals(picture, item), f"moment {moment}, picture {picture}"
    assert len({pid for pid, _ in pool.places()}) == NODES and pool.num_idle == NODES
    pool.shutdown()
    end_brokers(brokers)


def store_too_small(made, nodes, config, expected):
    """A step whose tensors are more than all object stores hold: it spills, and nobody's memory takes it up."""
    brokers = start_brokers()
    pool = AlignerPool(config, NODES)
    pool.submit_align([turn(pool.family, 0, "warm")]).result()
    aligners, own = private_mib(pool.pids()), private_mib(["self"])
    futures = [pool.submit_align([turn(pool.family, picture, "r")]) for picture in range(PICTURES)]
    aligned = [future.result(timeout=240)[0] for future in futures]
    needed = sum(item.tensors.num_bytes for item in aligned)
    found = stores(made)
    assert needed > found.object_store_bytes_avail, "the scenario needs more than there is"
    assert found.object_store_bytes_used <= found.object_store_bytes_avail and found.spilled_bytes_total
    assert private_mib(pool.pids()) - aligners < 64 * NODES, "aligners keep nothing of it"
    assert all(expected.equals(picture, item) for picture, item in enumerate(aligned))
    assert private_mib(["self"]) - own < 64
    pool.shutdown()
    end_brokers(brokers)


def trainer_slower_than_generation(made, nodes, config, expected):
    """Three groups wait at most, as a buffer's staleness bounds them: what is past them is given back."""
    kept = 16 * MIB
    brokers = start_brokers(max_bytes=kept)
    pool = AlignerPool(config, NODES)
    before = stores(made).object_store_bytes_used
    waiting = collections.deque(maxlen=3)
    for group in range(PICTURES // 4):
        futures = [
            pool.submit_align([turn(pool.family, 4 * group + number % 4, "r")]) for number in range(16)
        ]
        waiting.append([future.result(timeout=240)[0] for future in futures])
    groups = sum(item.tensors.num_bytes for group in waiting for item in group[:4])
    bound = before + groups + kept + NODES * config.cache_bytes + 16 * MIB
    # References are counted down behind the work; a test's timeout ends this.
    while stores(made).object_store_bytes_used > bound:
        time.sleep(0.2)
    pool.shutdown()
    end_brokers(brokers)


@ray.remote(num_cpus=0)
class Collecting:
    """An actor that owns a pool and hands on what it made, as NeMo-RL's NemoGym actor does."""

    def __init__(self, config):
        self.pool = AlignerPool(config, 2)

    def align(self, pictures):
        futures = [self.pool.submit_align([turn(self.pool.family, picture, "r")]) for picture in pictures]
        return [future.result()[0] for future in futures]


def actor_and_brokers_killed(made, nodes, config, expected):
    """References outlive whoever made them; without their owner they are rendered again."""
    again = RenderedAgain()
    logging.getLogger("nemo_rl_ext.rollout.stored").addHandler(again)
    brokers = start_brokers()
    actor = Collecting.remote(config)
    aligned = ray.get(actor.align.remote(range(6)))
    ray.kill(actor)
    while ray.available_resources().get("CPU", 0) < NODES:
        time.sleep(0.1)
    assert all(expected.equals(picture, item) for picture, item in enumerate(aligned))
    assert again.count == 0, "the broker owned what the actor's aligners made"
    for broker in brokers:
        ray.kill(broker, no_restart=False)
    for picture, item in enumerate(aligned):
        assert expected.equals(picture, item)
    end_brokers(brokers)


SCENARIOS = (nodes_lost, actor_and_brokers_killed, store_too_small, trainer_slower_than_generation)

if __name__ == "__main__":
    checkpoint, directory, *losses = sys.argv[1:]
    LOSSES = int(losses[0]) if losses else 2
    config = config_of(Path(checkpoint), Path(directory))
    expected = Expected(config)
    with cluster() as (made, nodes):
        for scenario in SCENARIOS:
            began = time.perf_counter()
            try:
                scenario(made, nodes, config, expected)
            except Exception:
                traceback.print_exc()
            else:
                print(f"{scenario.__name__} held after {time.perf_counter() - began:.1f} s", flush=True)
