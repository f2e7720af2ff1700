# SPDX-License-Identifier: Apache-2.0
"""What alignment costs on this machine: prompt groups through one aligner and the brokers, by each process's CPU."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch

from nemo_rl_ext.align.grids import Size
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.media.unchanged_files import SETTLED_S
from nemo_rl_ext.rollout.aligner import AlignerConfig, RolloutAligner
from nemo_rl_ext.rollout.broker import BROKER, broker_handle, end_brokers, start_brokers
from nemo_rl_ext.rollout.fitting import TurnRequest
from nemo_rl_ext.rollout.pool import AlignerPool
from nemo_rl_ext.rollout.sizing import Costs

IMAGES = 4
KNOWN = 64
"""Rollouts that ask for images which are there already, in each of two lengths."""

ROUNDS = 5
STORE_BYTES = 1 << 30


def calibrate(checkpoint: Path, size: Size, *, dtype: torch.dtype = torch.bfloat16) -> Costs:
    """Measure with this checkpoint's images of `size`, (height, width), on a Ray that is started for it.

    Raises:
        ValueError: where this process is connected to a Ray already.
    """
    if ray.is_initialized():
        raise ValueError(
            "expected a process without Ray: calibration starts one of its own and counts its CPU"
        )
    with tempfile.TemporaryDirectory() as directory, _local_ray():
        folder = Path(directory)
        config = AlignerConfig(
            model_dir=checkpoint,
            media_policy=MediaPolicy(roots=(folder,)),
            base_dir=folder,
            dtype=dtype,
            share=True,
        )
        brokers = start_brokers()
        pool = AlignerPool(config, 1)
        try:
            return _Calibration(pool, RolloutAligner(config), folder, size).costs()
        finally:
            pool.shutdown()
            end_brokers(brokers)


@contextlib.contextmanager
def _local_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=STORE_BYTES,
    )
    try:
        yield
    finally:
        ray.shutdown()


class _Calibration:
    """Groups of `IMAGES` pictures that nobody has seen, and rollouts that ask for them again."""

    def __init__(self, pool: AlignerPool, local: RolloutAligner, folder: Path, size: Size) -> None:
        self.pool, self.local, self.folder, self.size = pool, local, folder, size
        broker = broker_handle(BROKER)
        self.broker_pid: int = ray.get(broker.pid.remote())
        (self.aligner_pid,) = pool.pids()
        self.made = 0

    def costs(self) -> Costs:
        warm, one, *fresh = [self._group(images) for images in (IMAGES, 1, *[IMAGES] * ROUNDS)]
        # As media of a run are: written long before it.
        time.sleep(SETTLED_S)
        self._align([warm])
        rendered = []
        broker = self._cpu(self.broker_pid)
        for group in fresh:
            before = self._cpu(self.aligner_pid)
            (turn,) = self._align([group])
            rendered.append((self._cpu(self.aligner_pid) - before) / IMAGES)
        broker = self._cpu(self.broker_pid) - broker
        few, _, _ = self._known(one)
        many, collect_s, collect_bytes = self._known(warm)
        image_s = max(0.0, (many - few) / (IMAGES - 1))
        memory = psutil.Process(self.aligner_pid).memory_info()
        return Costs(
            render_s=statistics.median(rendered),
            image_bytes=turn.tensors.num_bytes / IMAGES,
            rollout_s=max(0.0, few - image_s),
            image_s=image_s,
            collect_s=collect_s,
            collect_bytes=collect_bytes,
            claim_s=broker / ROUNDS / IMAGES,
            aligner_mib=(memory.rss - memory.shared) / 2**20,
        )

    def _known(self, group: TurnRequest) -> tuple[float, float, float]:
        """CPU of the aligner and of this process for one more rollout of a group, and its bytes here."""
        self._align([group])
        aligner, own = self._cpu(self.aligner_pid), self._cpu(os.getpid())
        turns = self._align([group] * KNOWN)
        spent = self._cpu(self.aligner_pid) - aligner, self._cpu(os.getpid()) - own
        num_bytes = len(pickle.dumps([turn.report for turn in turns])) / KNOWN
        num_bytes += group.token_ids.nbytes
        return spent[0] / KNOWN, spent[1] / KNOWN, num_bytes

    def _align(self, requests: list[TurnRequest]) -> list[Any]:
        turns = [future.result()[0] for future in [self.pool.submit_align([one]) for one in requests]]
        if any(turn.report.neutral for turn in turns):
            raise ValueError(f"the calibration's own images cannot be aligned: {turns[0].report}")
        return turns

    def _group(self, images: int) -> TurnRequest:
        """One rollout with pictures of its own."""
        from PIL import Image

        sources = []
        for _ in range(images):
            noise = np.random.default_rng(self.made).integers(0, 256, (27, 60, 3), dtype=np.uint8)
            name = f"{self.made}.jpg"
            Image.fromarray(noise).resize((self.size[1], self.size[0])).save(self.folder / name, quality=90)
            sources.append(MediaSource(ref=name))
            self.made += 1
        family = self.local.family
        items = [self.local.item_of(source) for source in sources]
        (grammar, *_), ids = family.grammars, [0]
        for item, geometry in zip(items, family.static(items), strict=True):
            for length in family.run_lengths(geometry, item.kind):
                ids += [grammar.start_id, *[grammar.context_id] * length, grammar.end_id]
        return TurnRequest(
            row_id="calibration", turn=0, token_ids=np.array(ids, np.int32), media=tuple(sources)
        )

    @staticmethod
    def _cpu(pid: int) -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
