# SPDX-License-Identifier: Apache-2.0
"""A prompt group whose generations are all repaired: every rollout on its own, and one render for all.

python -m benchmarks group --images 4
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import logging
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.bench_pool import make_checkpoint

SIZE = (1080, 2400)
MIB = 1 << 20


def requests(family: Any, folder: Path, images: int, generations: int, *, own: bool) -> list[Any]:
    """One request per generation of `images` screenshots each, repaired; with `own` every one has its own."""
    from PIL import Image

    from nemo_rl_ext.media.reader import MediaSource
    from nemo_rl_ext.rollout.fitting import TurnRequest

    static = family.tiler.static_grid(SIZE)
    grid = family.tiler.grid(SIZE, int(static.num_patches * 0.9))
    grammar = family.grammar
    run = [grammar.start_id, *[grammar.context_id] * grid.num_tokens(), grammar.end_id]
    made = []
    for generation in range(generations):
        names = [f"{generation if own else 0}-{image}-{own}.jpg" for image in range(images)]
        for number, name in enumerate(names):
            if not (folder / name).is_file():
                seed = np.random.default_rng([generation, number, own])
                coarse = Image.fromarray(seed.integers(0, 256, (27, 60, 3), dtype=np.uint8))
                coarse.resize((SIZE[1], SIZE[0])).save(folder / name, quality=90)
        made.append(
            TurnRequest(
                row_id=f"generation-{generation}",
                turn=0,
                token_ids=np.array([7, *run * images], np.int32),
                media=tuple(MediaSource(ref=name) for name in names),
                captured=(grid,) * images,
            )
        )
    return made


def anonymous_mib() -> float:
    """Private memory of this process: views of the object store are not in it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) / 1024


def measure(pool: Any, work: list[Any]) -> dict[str, Any]:
    """One group, each generation in a call of its own, as rollouts end one by one."""
    import torch

    from nemo_rl_ext.rollout.stored import StoredTensor

    actors = [psutil.Process(pid) for pid in pool.pids()]
    busy = sum(sum(actor.cpu_times()[:2]) for actor in actors)
    own = sum(psutil.Process().cpu_times()[:2])
    before, peak, running = anonymous_mib(), [0.0], True

    def watch() -> None:
        while running:
            peak[0] = max(peak[0], anonymous_mib() - before)
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    turns = [future.result()[0] for future in [pool.submit_align([request]) for request in work]]
    wall = time.perf_counter() - begin
    running = False
    watcher.join()
    figures: dict[str, Any] = {
        "aligner_cpu_s": sum(sum(actor.cpu_times()[:2]) for actor in actors) - busy,
        "driver_cpu_s": sum(psutil.Process().cpu_times()[:2]) - own,
        "driver_peak_mib": peak[0],
        "wall_s": wall,
    }
    values = [turn.tensors.values["pixel_values"] for turn in turns]
    blobs = {
        blob.identity: blob for value in values if isinstance(value, StoredTensor) for blob in value.blobs
    }
    figures["store_mib"] = (
        sum(blob.num_bytes for blob in blobs.values())
        if blobs
        else sum(value.numel() * value.element_size() for value in values)
    ) / MIB
    buffer = io.BytesIO()
    torch.save(values, buffer)
    figures["save_mib"] = buffer.tell() / MIB
    digest = hashlib.sha256()
    for value in values:
        digest.update(torch.cat([value]).numpy().tobytes())
    figures["digest"] = digest.hexdigest()[:12]
    return figures


def main() -> None:
    """Print the two paths, and generations with their own screenshots."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks group", description=__doc__)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--generations", type=int, default=16)
    options = parser.parse_args()
    import ray

    from nemo_rl_ext.media.policy import MediaPolicy
    from nemo_rl_ext.rollout.aligner import AlignerConfig
    from nemo_rl_ext.rollout.broker import end_brokers, start_brokers
    from nemo_rl_ext.rollout.pool import AlignerPool

    logging.getLogger("nemo_rl_ext").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model_dir = make_checkpoint(folder / "checkpoint")
        config = AlignerConfig(
            model_dir=model_dir, media_policy=MediaPolicy(roots=(folder,)), base_dir=folder, cache_bytes=0
        )
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=3 << 30,
            log_to_driver=False,
        )
        brokers = start_brokers()
        try:
            for name, share, own, generations in (
                ("one rollout", False, False, 1),
                ("each on its own", False, False, options.generations),
                ("one render for all", True, False, options.generations),
                ("own screenshots", True, True, options.generations),
            ):
                pool = AlignerPool(dataclasses.replace(config, share=share), 1)
                warm = requests(pool.family, folder, 1, 1, own=False)
                pool.submit_align(warm).result()
                figures = measure(pool, requests(pool.family, folder, options.images, generations, own=own))
                print(
                    f"{name}, {generations} x {options.images}: "
                    + ", ".join(
                        f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in figures.items()
                    ),
                    flush=True,
                )
                pool.shutdown()
        finally:
            end_brokers(brokers)
            ray.shutdown()


if __name__ == "__main__":
    main()
