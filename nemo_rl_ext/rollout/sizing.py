# SPDX-License-Identifier: Apache-2.0
"""Cores, memory and network that alignment takes in a step, from what one image and one rollout were measured to cost.

Everything here is arithmetic; `rollout.calibration` measures the costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BUSY = 0.7
"""Share of a step that aligners may be at work in: rollouts end together, and no core is all theirs."""

BROKER_SHARE = 0.25
"""Of the object store: what the broker keeps for whoever asks next, beside what is in use (`rollout.broker`)."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step, and where it runs.

    `images` per rollout, of which the share `repaired` has to be rendered; `own_images` of them show something else in
    every generation, such as a screenshot after the policy's own actions. A replica of the policy spans
    `gpus_per_replica`; tensors wait for `max_age` steps at most.
    """

    prompts: int
    gpus: int
    generations: int = 16
    images: int = 16
    own_images: int = 0
    repaired: float = 1.0
    step_s: float = 377.0
    max_age: int = 1
    gpus_per_node: int = 8
    gpus_per_replica: int = 8

    def __post_init__(self) -> None:
        if self.own_images > self.images:
            raise ValueError(
                f"expected at most {self.images} images of a rollout to be its own, got {self.own_images}"
            )

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def rollouts(self) -> int:
        return self.prompts * self.generations

    @property
    def distinct(self) -> float:
        """Images of a step that are rendered."""
        shared = self.images - self.own_images
        return self.repaired * self.prompts * (shared + self.own_images * self.generations)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured: CPU seconds, bytes and MiB.

    `render_s` and `image_bytes` of one image that is rendered, `rollout_s` and `image_s` of an aligner for one rollout
    and for each of its images that is known already, `collect_s` and `collect_bytes` of whoever collects one rollout,
    `claim_s` of the broker for one question, `aligner_mib` of one aligner's private memory.
    """

    render_s: float
    image_bytes: float
    rollout_s: float
    image_s: float
    collect_s: float
    collect_bytes: float
    claim_s: float
    aligner_mib: float


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a step takes: CPU seconds of all aligners, of the broker and of who collects, and what to provide.

    `alone_cpu_s` is what the aligners would spend if every rollout rendered its own. Memory in GiB for the whole
    cluster, network in GiB per step and, for a node, in GiB per second.
    """

    aligner_cpu_s: float
    aligners: int
    aligner_gib: float
    alone_cpu_s: float
    broker_cpu_s: float
    collect_cpu_s: float
    collect_gib: float
    store_gib: float
    store_gib_per_node: float
    network_gib: float
    network_gib_s_per_node: float


def needs(work: Workload, costs: Costs) -> Needs:
    """What one step of this work takes.

    Network counts the most that can travel: every image to every node that a generation of its prompt, or a part of
    its replica, is trained on.
    """
    known = work.rollouts * (costs.rollout_s + work.images * costs.image_s)
    cpu = work.distinct * costs.render_s + known
    aligners = max(1, math.ceil(cpu / (work.step_s * BUSY)))
    step_bytes = work.distinct * costs.image_bytes
    store = step_bytes * (1 + work.max_age) / (1 - BROKER_SHARE)
    nodes_of_replica = max(1, math.ceil(work.gpus_per_replica / work.gpus_per_node))
    shared_share = work.repaired * work.prompts * (work.images - work.own_images) / (work.distinct or 1)
    to_nodes = min(work.nodes, work.generations * nodes_of_replica)
    own_to_nodes = min(work.nodes, nodes_of_replica)
    network = step_bytes * (shared_share * to_nodes + (1 - shared_share) * own_to_nodes)
    gib = 2**30
    return Needs(
        aligner_cpu_s=cpu,
        aligners=aligners,
        aligner_gib=aligners * costs.aligner_mib / 1024,
        alone_cpu_s=work.repaired * work.rollouts * work.images * costs.render_s + known,
        broker_cpu_s=costs.claim_s * work.distinct * min(aligners, work.generations),
        collect_cpu_s=work.rollouts * costs.collect_s,
        collect_gib=work.rollouts * costs.collect_bytes * (1 + work.max_age) / gib,
        store_gib=store / gib,
        store_gib_per_node=store / gib / work.nodes,
        network_gib=network / gib,
        network_gib_s_per_node=network / gib / work.nodes / work.step_s,
    )
