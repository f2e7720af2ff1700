# SPDX-License-Identifier: Apache-2.0
"""A prompt group whose generations are all repaired: every rollout on its own, and one render for all.

python -m benchmarks group --images 4
python -m benchmarks group --images 16 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import logging
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.bench_pool import make_checkpoint

SIZE = (1080, 2400)
MIB = 1 << 20
ALONE, GROUP_ALONE = "one rollout", "each on its own"
FIRST, SHARED, OWN = "one rollout, shared", "one render for all", "own screenshots"


def requests(family: Any, folder: Path, images: int, generations: int, *, seed: int, own: bool) -> list[Any]:
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
        whose = 1 + generation if own else 0
        names = [f"{seed}-{whose}-{image}.jpg" for image in range(images)]
        for number, name in enumerate(names):
            if not (folder / name).is_file():
                noise = np.random.default_rng([abs(seed), seed < 0, whose, number])
                coarse = Image.fromarray(noise.integers(0, 256, (27, 60, 3), dtype=np.uint8))
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


class Counted(io.RawIOBase):
    """A file that keeps nothing but its length."""

    num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.num_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes


def anonymous_mib() -> float:
    """Private memory of this process: views of the object store are not in it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) / 1024


@contextmanager
def peak_mib(figures: dict[str, Any]) -> Iterator[None]:
    """The highest private memory over that at the start, as `driver_peak_mib`."""
    before, running = anonymous_mib(), threading.Event()

    def watch() -> None:
        while not running.wait(0.01):
            figures["driver_peak_mib"] = max(figures["driver_peak_mib"], anonymous_mib() - before)

    figures["driver_peak_mib"] = 0.0
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        running.set()
        watcher.join()


def measure(pool: Any, work: list[Any]) -> dict[str, Any]:
    """One group, each generation in a call of its own, as rollouts end one by one."""
    import torch

    from nemo_rl_ext.rollout.stored import StoredTensor

    actors = [psutil.Process(pid) for pid in pool.pids()]
    busy = sum(sum(actor.cpu_times()[:2]) for actor in actors)
    own = sum(psutil.Process().cpu_times()[:2])
    figures: dict[str, Any] = {}
    with peak_mib(figures):
        begin = time.perf_counter()
        turns = [future.result()[0] for future in [pool.submit_align([request]) for request in work]]
        figures["wall_s"] = time.perf_counter() - begin
    figures["aligner_cpu_s"] = sum(sum(actor.cpu_times()[:2]) for actor in actors) - busy
    figures["driver_cpu_s"] = sum(psutil.Process().cpu_times()[:2]) - own
    values = [turn.tensors.values["pixel_values"] for turn in turns]
    stored = [value for value in values if isinstance(value, StoredTensor)]
    blobs = {blob.identity: blob.num_bytes for value in stored for blob in value.blobs}
    alone = sum(value.numel() * value.element_size() for value in values)
    figures["store_mib"] = (sum(blobs.values()) if stored else alone) / MIB
    saved = Counted()
    torch.save(values, saved)
    figures["save_mib"] = saved.num_bytes / MIB
    digest = hashlib.sha256()
    for value in values:
        digest.update(torch.cat([value]).view(torch.uint8).numpy().data)
    figures["digest"] = digest.hexdigest()[:12]
    return figures


def medians(rounds: list[dict[str, Any]]) -> str:
    """Figures of one path in words, each the median over rounds."""
    keys = [key for key, value in rounds[0].items() if isinstance(value, float)]
    return ", ".join(f"{key} {statistics.median(figures[key] for figures in rounds):.2f}" for key in keys)


def main() -> None:
    """Print the paths beside each other, and generations with their own screenshots."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks group", description=__doc__)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--generations", type=int, default=16)
    parser.add_argument(
        "--rounds", type=int, default=5, help="groups of each path, in turn, each of other pictures"
    )
    parser.add_argument("--aligners", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    import ray
    import torch

    from nemo_rl_ext.media.policy import MediaPolicy
    from nemo_rl_ext.media.unchanged_files import SETTLED_S
    from nemo_rl_ext.rollout.aligner import AlignerConfig
    from nemo_rl_ext.rollout.broker import end_brokers, start_brokers
    from nemo_rl_ext.rollout.pool import AlignerPool

    logging.getLogger("nemo_rl_ext").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        config = AlignerConfig(
            model_dir=make_checkpoint(folder / "checkpoint"),
            media_policy=MediaPolicy(roots=(folder,)),
            base_dir=folder,
            dtype=getattr(torch, options.dtype),
        )
        ray.init(
            address="local",
            num_cpus=2 * options.aligners,
            include_dashboard=False,
            object_store_memory=3 << 30,
            log_to_driver=False,
        )
        brokers = start_brokers()
        # A cache of its own does for one aligner what others do not see: what each rollout costs is measured without.
        alone = AlignerPool(dataclasses.replace(config, cache_bytes=0), options.aligners)
        shared = AlignerPool(dataclasses.replace(config, share=True), options.aligners)
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        try:
            for pool in (alone, shared):
                warm = requests(pool.family, folder, 2, options.aligners, seed=0, own=True)
                for future in [pool.submit_align([request]) for request in warm]:
                    future.result()
                for seed in range(1, 1 + options.rounds):
                    for pictures, generations in ((seed, options.generations), (-seed, 1)):
                        own = seed == 1 and pictures > 0
                        for whose in {False, own}:
                            requests(
                                pool.family, folder, options.images, generations, seed=pictures, own=whose
                            )
            # As media of a run are: written long before it.
            time.sleep(SETTLED_S)
            for seed in range(1, 1 + options.rounds):
                for path, pool, generations, own, pictures in (
                    (ALONE, alone, 1, False, seed),
                    (GROUP_ALONE, alone, options.generations, False, seed),
                    (FIRST, shared, 1, False, -seed),
                    (SHARED, shared, options.generations, False, seed),
                    *([(OWN, shared, options.generations, True, seed)] if seed == 1 else []),
                ):
                    work = requests(pool.family, folder, options.images, generations, seed=pictures, own=own)
                    found[path].append(measure(pool, work))
                assert found[GROUP_ALONE][-1]["digest"] == found[SHARED][-1]["digest"], "other pixels"
        finally:
            for pool in (alone, shared):
                pool.shutdown()
            end_brokers(brokers)
            ray.shutdown()
    for path, rounds in found.items():
        generations = 1 if path in (ALONE, FIRST) else options.generations
        print(f"{path}, {generations} x {options.images}: {medians(rounds)}")
    for name, of, against in (
        (
            "aligner CPU of the group against one rollout's",
            (SHARED, "aligner_cpu_s"),
            (ALONE, "aligner_cpu_s"),
        ),
        ("the same against one rollout that is shared", (SHARED, "aligner_cpu_s"), (FIRST, "aligner_cpu_s")),
        ("the same, each on its own", (GROUP_ALONE, "aligner_cpu_s"), (ALONE, "aligner_cpu_s")),
        ("store against the distinct pixels", (SHARED, "store_mib"), (ALONE, "store_mib")),
        ("save against the distinct pixels", (SHARED, "save_mib"), (ALONE, "store_mib")),
    ):
        ratios = sorted(
            one[of[1]] / other[against[1]] for one, other in zip(found[of[0]], found[against[0]], strict=True)
        )
        print(f"{name}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"digests of all micro-batches equal in {options.rounds} rounds of {options.rounds}")


if __name__ == "__main__":
    main()
