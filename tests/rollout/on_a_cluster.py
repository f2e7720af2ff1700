# SPDX-License-Identifier: Apache-2.0
"""Aligners on several Ray nodes, simulated in one machine as Ray's own tests do; run by `test_cluster.py`.

python on_a_cluster.py SCENARIO CHECKPOINT DIRECTORY
"""

import contextlib
import sys
import time
from pathlib import Path

import numpy as np
import ray
from PIL import Image
from ray.cluster_utils import Cluster

from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.aligner import AlignerConfig
from nemo_rl_ext.rollout.fitting import TurnRequest
from nemo_rl_ext.rollout.pool import AlignerPool

NODE = {"num_cpus": 1, "object_store_memory": 128 << 20}


def config_of(checkpoint, folder, num_images=8):
    rng = np.random.default_rng(0)
    for number in range(num_images):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((640, 480)).save(folder / f"{number}.png")
    return AlignerConfig(model_dir=checkpoint, media_policy=MediaPolicy(roots=(folder,)), base_dir=folder)


@contextlib.contextmanager
def cluster(num_nodes):
    """A head without CPUs for aligners, and nodes with one each."""
    made = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "include_dashboard": False})
    nodes = [made.add_node(**NODE) for _ in range(num_nodes)]
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    made.wait_for_nodes()
    try:
        yield made, nodes
    finally:
        ray.shutdown()
        made.shutdown()


def turn(family, number):
    grammar = family.grammar
    ids = [40, grammar.start_id, *[grammar.context_id] * 165, grammar.end_id]
    media = (MediaSource(ref=f"{number % 8}.png", where=f"row r{number}"),)
    return TurnRequest(row_id=f"r{number}", turn=0, token_ids=np.array(ids, np.int32), media=media)


def nodes_lost(config):
    """Five times a node goes, each later in its step, and another one comes."""
    with cluster(3) as (made, nodes):
        pool = AlignerPool(config, 3)
        assert len({node for _, node in pool.places()}) == 3, "one aligner on each node"
        for moment in range(5):
            futures = [pool.submit_align([turn(pool.family, number)]) for number in range(120)]
            while sum(future.done() for future in futures) < 1 + 12 * moment:
                time.sleep(0.005)
            made.remove_node(nodes.pop(0), allow_graceful=moment % 2 == 0)
            nodes.append(made.add_node(**NODE))
            aligned = [future.result(timeout=240)[0] for future in futures]
            assert [item.report.row_id for item in aligned] == [f"r{number}" for number in range(120)]
            assert [item.report for item in aligned if item.report.neutral] == []
            assert [item for item in aligned if not item.report.repaired] == []
        assert len({pid for pid, _ in pool.places()}) == 3 and pool._idle.qsize() == 3
        pool.shutdown()


SCENARIOS = {"nodes_lost": nodes_lost}

if __name__ == "__main__":
    scenario, checkpoint, directory = sys.argv[1:]
    SCENARIOS[scenario](config_of(Path(checkpoint), Path(directory)))
