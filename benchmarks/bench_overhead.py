# SPDX-License-Identifier: Apache-2.0
"""What alignment costs a step of the embedded run: nothing to repair, flag on and off, and shares of repaired rows."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.measure import Check, Effort, Section, Table, quartiles, ratio, seconds

CONFIG = Path(__file__).parents[1] / "configs" / "embedded_async.yaml"
PROMPTS = 8
SHARES = (0.1, 0.5, 1.0)
SIZES = ((640, 480), (300, 1024), (300, 1024))
"""(width, height) of a row's pictures: the first alone fits the 512 tokens of the demo's engine, all three do not."""
TARGET = 1.01


@dataclass(kw_only=True)
class Step:
    """One measured step: wall seconds, driver's CPU seconds, and wall seconds inside alignment."""

    wall: float = 0.0
    cpu: float = 0.0
    aligning: float = 0.0
    repaired: float = 0.0


@dataclass(kw_only=True)
class Stopwatch:
    """Adds up the wall time of the calls that it wraps."""

    total: float = field(default=0.0)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.total += time.perf_counter() - began

        return timed


class _TimedFuture:
    """A future whose waiting counts."""

    def __init__(self, future: Any, watch: Stopwatch) -> None:
        self.result = watch.around(future.result)


def write_manifest(folder: Path, num_rows: int) -> Path:
    """Rows `fits-N` with one picture, which is never re-sized, and `over-N` with three, which always are."""
    from PIL import Image

    rng = np.random.default_rng(0)
    lines = []
    for kind, count in (("fits", 1), ("over", 3)):
        for index in range(num_rows):
            content: list[dict[str, str]] = [{"type": "input_text", "text": "l or r?"}]
            for number in range(count):
                name = f"{kind}-{index}-{number}.jpg"
                coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                coarse.resize(SIZES[number]).save(folder / name, quality=90)
                content.append({"type": "input_image", "image_url": name, "detail": "auto"})
            row = {
                "id": f"{kind}-{index}",
                "responses_create_params": {"input": [{"role": "user", "content": content}]},
                "verifier_metadata": {"answer": "lr"[index % 2]},
            }
            lines.append(json.dumps(row) + "\n")
    path = folder / "train.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def measured_step(run: Any, rows: Sequence[Any], *, enabled: bool, version: int) -> Step:
    """Collect, account, train and refit, one after the other, so that nothing hides behind anything."""
    from nemo_rl_ext.grpo.collecting.assembly import GroupAssembly
    from nemo_rl_ext.grpo.training.trainer import train_step
    from nemo_rl_ext.rollout.metrics import AlignmentMetrics

    collector = run.collector
    collector.options = dataclasses.replace(collector.options, enabled=enabled)
    watch, metrics = Stopwatch(), AlignmentMetrics()
    submit = watch.around(collector.pool.submit_align)
    requests = watch.around(GroupAssembly._turn_requests)
    with (
        mock.patch.object(GroupAssembly, "_turn_requests", lambda assembly: requests(assembly)),
        mock.patch.object(collector.pool, "submit_align", lambda turns: _TimedFuture(submit(turns), watch)),
    ):
        wall, cpu = time.perf_counter(), time.process_time()
        groups = collector.collect(rows, step=version)
        for group in groups:
            for rollout in group.rollouts:
                watch.around(metrics.add_row)(rollout.aligned, masked=rollout.masked)
        train_step(
            run.policy, groups, sampling=run.sampling, objective=run.objective, metrics=metrics, history=None
        )
        run.push_weights(version + 1)
        step = Step(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, aligning=watch.total)
    counts = metrics.flush()
    step.repaired = counts["alignment/media_repaired"]
    return step


def rows_with(rows: Sequence[Any], share: float, number: int) -> list[Any]:
    """A step's rows, `share` of them over the engine's budget; other ones every step."""
    over = [row for row in rows if row.row_id.startswith("over")]
    fits = [row for row in rows if row.row_id.startswith("fits")]
    # Tenths of rows do not exist: 10 % of 8 prompts is one prompt in four steps out of five.
    count = int(share * PROMPTS * (number + 1)) - int(share * PROMPTS * number)
    chosen = [over[(number * PROMPTS + place) % len(over)] for place in range(count)]
    return chosen + [fits[(number * PROMPTS + place) % len(fits)] for place in range(PROMPTS - count)]


def run(effort: Effort) -> Section:
    """One engine, one policy, one pool; steps with the flag on and off in turn, then the shares."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Every measured step has metrics of its own, which would log every first occurrence again.
    logging.getLogger("nemo_rl_ext").setLevel(logging.ERROR)
    from nemo_rl_ext.grpo.config import load_config
    from nemo_rl_ext.grpo.setup import prepare, start

    warm, pairs, each = (1, 1, 1) if effort.quick else (2, 3 * effort.rounds, 8)
    with tempfile.TemporaryDirectory() as scratch:
        manifest = write_manifest(Path(scratch), 16 if effort.quick else 64)
        overrides = [
            f"policy.model_name={scratch}/checkpoint",
            f"data.train.data_path={manifest}",
            "data.validation=null",
            "data.build_demo_manifest=false",
            f"logger.log_dir={scratch}/run",
            f"grpo.num_generations_per_prompt={2 if effort.quick else 8}",
            "grpo.val_at_start=false",
            "grpo.val_period=0",
        ]
        config = load_config(CONFIG, overrides)
        inputs = prepare(config)
        version = 0
        pair_steps: dict[bool, list[Step]] = {True: [], False: []}
        shares: dict[float, list[Step]] = {share: [] for share in SHARES}
        with start(config, inputs) as live:
            rows = list(live.train)

            def step(chosen: Sequence[Any], enabled: bool) -> Step:
                nonlocal version
                version += 1
                return measured_step(live, chosen, enabled=enabled, version=version)

            for number in range(warm):
                step(rows_with(rows, 1.0, number), True)
                step(rows_with(rows, 0.0, number), False)
            for number in range(pairs):
                chosen = rows_with(rows, 0.0, number)
                # Which one goes first changes, as caches warm up for the second.
                for enabled in (True, False) if number % 2 else (False, True):
                    pair_steps[enabled].append(step(chosen, enabled))
            for number in range(each):
                for share in SHARES:
                    shares[share].append(step(rows_with(rows, share, number), True))
    assert all(step.repaired == 0 for step in pair_steps[True]), "rows that fit were re-sized"
    assert all(step.repaired > 0 for step in shares[1.0]), "rows over the budget were not re-sized"
    return _section(pair_steps, shares)


def _section(pairs: dict[bool, list[Step]], shares: dict[float, list[Step]]) -> Section:
    on, off = pairs[True], pairs[False]
    ratios = [a.wall / b.wall for a, b in zip(on, off, strict=True)]
    wall, walls = statistics.median(ratios), quartiles(ratios)
    cpu = statistics.median(a.cpu / b.cpu for a, b in zip(on, off, strict=True))
    direct = statistics.median(step.aligning / step.wall for step in on)
    rows = [
        (
            name,
            seconds(statistics.median(s.wall for s in steps)),
            seconds(statistics.median(s.cpu for s in steps)),
        )
        for name, steps in (("flag off", off), ("flag on", on))
    ]
    rows[1] += (f"{ratio(wall)} wall, {ratio(cpu)} CPU", f"{direct:.2%}")
    rows[0] += ("baseline", "0 %")
    columns = (
        "nothing to repair",
        "step, wall",
        "step, driver's CPU",
        "against flag off",
        "inside alignment",
    )
    nothing = Table(columns=columns, rows=rows, caption=f"Medians of {len(on)} steps each, in alternation.")
    share_rows = [
        (
            f"{share:.0%} of prompts over budget",
            seconds(statistics.median(step.wall for step in steps)),
            seconds(statistics.mean(step.aligning for step in steps)),
            f"{sum(step.aligning for step in steps) / sum(step.wall for step in steps):.1%}",
            f"{statistics.mean(step.repaired for step in steps):.0f}",
        )
        for share, steps in shares.items()
    ]
    columns = ("rows", "step, wall", "inside alignment", "share of the step", "media repaired per step")
    caption = (
        f"{PROMPTS} prompts x 8 generations per step, three pictures per prompt over budget. The step's parts "
        "run one after the other here; the asynchronous run hides the aligners' work behind training."
    )
    return Section(
        name="overhead",
        title="Overhead in a run",
        about="Steps of the embedded run (vLLM engine, aligner actor, transformers policy) on one machine. Inside "
        "alignment is what the driver spends on building requests, waiting for the aligners and counting.",
        tables=[nothing, Table(columns=columns, rows=share_rows, caption=caption)],
        checks=[
            Check(
                target="nothing to repair: on against off <= 1.01x wall",
                measured=f"{ratio(wall)} ({ratio(walls[0])} to {ratio(walls[1])}), {ratio(cpu)} CPU; {direct:.2%} of a "
                "step inside alignment",
                met=wall <= TARGET,
            )
        ],
    )
