# SPDX-License-Identifier: Apache-2.0
"""The aligner pool: turns per second in-process, with one actor and with two, and the bytes that rows ship."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_repair import MAX_PATCHES, MEAN, MIN_PATCHES, STD
from benchmarks.measure import Check, Effort, Section, Table, alternate, mib, ratio

SIZE = (960, 1280)
GROUP, GROUPS = 4, 8
TARGET = 1.8
IN_PROCESS_TARGET = 1.3


@dataclass(kw_only=True)
class Work:
    """Turns of prompt groups over real files, each to be repaired, and the aligner's configuration."""

    groups: list[list[Any]]
    config: Any


def make_checkpoint(folder: Path) -> Path:
    """The embedded run's tiny checkpoint with the released models' patch limits."""
    import json

    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint

    model_dir = build_tiny_checkpoint(folder)
    path = model_dir / "preprocessor_config.json"
    limits = {
        "min_num_patches": MIN_PATCHES,
        "max_num_patches": MAX_PATCHES,
        "norm_mean": MEAN,
        "norm_std": STD,
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **limits}))
    return model_dir


def make_work(folder: Path, *, num_groups: int, group_size: int, budget_share: float = 0.8) -> Work:
    """`num_groups` prompts of one photograph-sized JPEG each; runs hold `budget_share` of the static tokens."""
    from PIL import Image

    from nemo_rl_ext.align.families.nemotron import NemotronFamily
    from nemo_rl_ext.media.policy import MediaPolicy
    from nemo_rl_ext.media.reader import MediaReader, MediaSource
    from nemo_rl_ext.rollout.aligner import AlignerConfig
    from nemo_rl_ext.rollout.fitting import TurnRequest

    model_dir = make_checkpoint(folder / "checkpoint")
    family = NemotronFamily.from_pretrained(model_dir)
    static = family.tiler.static_grid(SIZE)
    grid = family.tiler.grid(SIZE, int(static.num_patches * budget_share))
    grammar = family.grammar
    ids = np.array(
        [7, grammar.start_id, *[grammar.context_id] * grid.num_tokens(), grammar.end_id], dtype=np.int32
    )
    rng = np.random.default_rng(0)
    reader = MediaReader(
        policy=MediaPolicy(roots=(folder,)),
        base_dir=folder,
        num_frames=8,
        frames_per_tubelet=1,
        backend="opencv",
    )
    groups = []
    for index in range(num_groups):
        coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        coarse.resize((SIZE[1], SIZE[0])).save(folder / f"{index}.jpg", quality=90)
        source = MediaSource(ref=f"{index}.jpg")
        facts, _ = reader.decode(source)
        request = TurnRequest(
            row_id=f"row-{index}",
            turn=0,
            token_ids=ids,
            media=(source,),
            facts=(facts,),
            static_grids=(static,),
            captured=(grid,),
        )
        groups.append([request] * group_size)
    # No cache: every round must do all the work again.
    config = AlignerConfig(
        model_dir=model_dir, media_policy=MediaPolicy(roots=(folder,)), base_dir=folder, cache_bytes=0
    )
    return Work(groups=groups, config=config)


def stored_bytes(results: Sequence[Any]) -> int:
    """What these results take in the object store."""
    import ray
    from ray.experimental import get_local_object_locations

    ref = ray.put(list(results))
    found = get_local_object_locations([ref])[ref]["object_size"]
    if not found:
        raise RuntimeError("Ray does not know the size of an object that was just put")
    return found


def throughput(work: Work, effort: Effort) -> tuple[Table, list[Check]]:
    """Turns per second, wall time: the actors' time is not this process's."""
    from nemo_rl_ext.rollout.aligner import RolloutAligner
    from nemo_rl_ext.rollout.pool import AlignerPool

    pools = {count: AlignerPool(work.config, count) for count in (1, 2)}
    for pool in pools.values():
        pool.pids()
    local = RolloutAligner(work.config)

    def through(pool: Any) -> None:
        futures = [pool.submit_align(group[:1]) for group in work.groups]
        for future in futures:
            (aligned,) = future.result()
            assert aligned.report.repaired

    def in_process() -> None:
        for group in work.groups:
            local.align(group[:1])

    timings = alternate(
        {
            "1 actor": lambda: through(pools[1]),
            "2 actors": lambda: through(pools[2]),
            "in-process": in_process,
        },
        rounds=effort.rounds,
        clock=time.perf_counter,
    )
    for pool in pools.values():
        pool.shutdown()
    turns = len(work.groups)
    rows = [
        (name, f"{turns / timing.median:.1f}", "baseline" if name == "1 actor" else ratio(1 / timing.ratio))
        for name, timing in timings.items()
    ]
    busy = f"wall time, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    checks = []
    for target, name, met in (
        ("two actors >= 1.8x one", "2 actors", lambda value: value >= TARGET),
        ("one actor <= 1.3x in process", "in-process", lambda value: value <= IN_PROCESS_TARGET),
    ):
        value = 1 / timings[name].ratio
        high, low = (1 / quartile for quartile in timings[name].quartiles)
        measured = f"{ratio(value)} ({ratio(low)} to {ratio(high)}; {busy})"
        checks.append(Check(target=target, measured=measured, met=met(value)))
    caption = f"{turns} turns of one {SIZE[1]}x{SIZE[0]} JPEG, decoded and made again on the engine's grid; wall time."
    return Table(
        columns=("where", "turns per second", "against one actor"), rows=rows, caption=caption
    ), checks


def shipped(work: Work) -> tuple[Table, Check]:
    """Object-store bytes per row: matched rows, and repaired rows of groups of several sizes."""
    import dataclasses

    from nemo_rl_ext.rollout.aligner import RolloutAligner

    aligner = RolloutAligner(work.config)
    repaired = work.groups[0][0]
    grid = repaired.static_grids[0]
    grammar = aligner.family.grammar
    ids = np.array(
        [7, grammar.start_id, *[grammar.context_id] * grid.num_tokens(), grammar.end_id], dtype=np.int32
    )
    matched = dataclasses.replace(repaired, token_ids=ids, captured=(grid,))
    rows = []
    tensors = 0
    for size in (2, 4, 8, 16):
        same = aligner.align([matched] * size)
        tensors += sum(turn.tensors.num_bytes for turn in same if turn.tensors is not None)
        shared = stored_bytes(aligner.align([repaired] * size))
        alone = sum(stored_bytes(aligner.align([repaired])) for _ in range(size))
        mixed = stored_bytes(aligner.align([matched] * (size - 1) + [repaired]))
        rows.append(
            (
                f"G = {size}",
                f"{stored_bytes(same) / size:,.0f} B",
                mib(alone / size),
                mib(shared / size),
                mib(mixed / size),
                ratio(alone / shared),
            )
        )
    columns = (
        "group",
        "matched row",
        "repaired row, each alone",
        "repaired row, sharing",
        "one repaired among matched",
        "saved by sharing",
    )
    check = Check(
        target="zero extra object-store bytes for matched rows",
        measured=f"{tensors} bytes of tensors; {rows[-1][1]} of verdict per row",
        met=tensors == 0,
    )
    return Table(
        columns=columns, rows=rows, caption="Bytes through Ray's object store per row, float32."
    ), check


def run(effort: Effort) -> Section:
    """Throughput, then bytes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import ray
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        # Every distinct picture once per round, so that equal repairs within a call cannot be shared.
        work = make_work(Path(scratch), num_groups=4 if effort.quick else GROUPS * GROUP, group_size=GROUP)
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=512 << 20,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        try:
            speed, scaling = throughput(work, effort)
            size, nothing = shipped(work)
        finally:
            ray.shutdown()
    return Section(
        name="pool",
        title="The aligner pool",
        about="Ray actors that decode, resize and verify beside the driver. Rows of a prompt group whose repairs are "
        "equal share one tensor also in the object store; rows that matched ship their verdict alone.",
        tables=[speed, size],
        checks=[*scaling, nothing],
    )
