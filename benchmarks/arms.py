# SPDX-License-Identifier: Apache-2.0
"""What wrong pixels cost: the same task, seeds and steps with aligned, swapped, transposed and no pixels.

Every arm has the right number of features for every run, so no count check objects. Reported are held-out accuracy
and the float32 engine-against-trainer log-prob gap, measured on the very weights that sampled.

    python -m benchmarks arms --steps 80 --seeds 3
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.grpo.collector import Collector
from nemo_rl_ext.grpo.config import Config, load_config
from nemo_rl_ext.grpo.loop import steps_of
from nemo_rl_ext.grpo.rollouts import PromptGroup
from nemo_rl_ext.grpo.setup import Run, new_policy, prepare, start
from nemo_rl_ext.grpo.trainer import train_step
from nemo_rl_ext.grpo.weight_history import WeightHistory
from nemo_rl_ext.rollout.metrics import AlignmentMetrics
from nemo_rl_ext.rollout.packed import pack

ARMS = ("aligned", "other image", "transposed", "text only")
CONFIG = Path(__file__).parents[1] / "configs" / "embedded_async.yaml"


def tamper(arm: str, groups: Sequence[PromptGroup], collector: Collector) -> None:
    """Replace every message's pixels as the arm says, on grids with the same number of tokens."""
    if arm == "aligned":
        return
    media = [
        (message, Grid(*grid), image)
        for group in groups
        for rollout in group.rollouts[:1]
        for segment in rollout.segments
        for message in segment.message_log
        if "image_grid_hw" in message
        for grid, image in zip(
            message["image_grid_hw"].as_tensor().tolist(), collector.images_of(group.row), strict=True
        )
    ]
    assert all(len(message["image_grid_hw"].as_tensor()) == 1 for message, *_ in media), "single-image rows only"
    replaced = {}
    for index, (message, grid, image) in enumerate(media):
        source = media[(index + 1) % len(media)][2] if arm == "other image" else image
        target = Grid(grid.width, grid.height) if arm == "transposed" else grid
        item = MediaItem(size=source.shape[:2], source=arm, load=lambda source=source: source[None])
        pixels = collector.pool.family.render(item, target)
        if arm == "text only":
            pixels = torch.zeros_like(pixels)
        replaced[id(message["pixel_values"].as_tensor())] = (pixels, torch.tensor([target]))
    for group in groups:
        for rollout in group.rollouts:
            for segment in rollout.segments:
                for message in segment.message_log:
                    if "pixel_values" in message:
                        pixels, grids = replaced[id(message["pixel_values"].as_tensor())]
                        message["pixel_values"] = pack("pixel_values", pixels)
                        message["image_grid_hw"] = pack("image_grid_hw", grids)


def run_arm(run: Run, config: Config, arm: str, seed: int, version: int) -> tuple[dict[str, float], int]:
    """Train one arm from the checkpoint; returns its results and the last weight version used."""
    run.policy = new_policy(config)
    version += 1
    run.engine.update_weights(run.policy.state_dict_for_engine(torch.float32), version, in_flight=False)
    rows = [row for row in run.train if len(row.media_refs()) == 1]
    gaps: list[float] = []
    rewards: list[float] = []
    started = time.perf_counter()
    steps = steps_of(
        rows,
        per_step=config.grpo.num_prompts_per_step,
        first=0,
        last=config.grpo.max_num_steps,
        shuffle=True,
        seed=seed,
    )
    for step, batch in steps:
        groups = run.collector.collect(batch, step=step)
        tamper(arm, groups, run.collector)
        metrics = AlignmentMetrics()
        history = WeightHistory(1)
        history.keep(version, run.policy)
        train_step(run.policy, groups, sampling=run.sampling, options=run.loss, metrics=metrics, history=history)
        flushed = metrics.flush()
        gaps += [
            value for name, value in flushed.items() if name.startswith("alignment/logprob_gap") and "mean" in name
        ]
        rewards.append(float(np.mean([rollout.reward for group in groups for rollout in group.rollouts])))
        version += 1
        run.engine.update_weights(run.policy.state_dict_for_engine(torch.float32), version, in_flight=False)
    result = {
        "accuracy": run.evaluate()["eval/accuracy"],
        "reward_last_20": float(np.mean(rewards[-20:])),
        "gap_mean": float(np.mean(gaps)),
        "gap_max": float(np.max(gaps)),
        "seconds": time.perf_counter() - started,
    }
    return result, version


def main(arguments: Sequence[str] | None = None) -> dict:
    """Run all arms and print one row per arm: mean over seeds, with the seeds' own values."""
    parser = argparse.ArgumentParser(prog="benchmarks arms", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json", type=Path, default=None, help="write the results here as JSON")
    options = parser.parse_args(arguments)
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
    with tempfile.TemporaryDirectory() as scratch:
        config = load_config(
            CONFIG,
            [
                f"grpo.max_num_steps={options.steps}",
                "policy.generation.vllm_cfg.precision=float32",
                f"policy.model_name={scratch}/checkpoint",
                f"data.train.data_path={scratch}/train.jsonl",
                f"data.validation.data_path={scratch}/validation.jsonl",
                f"logger.log_dir={scratch}/run",
            ],
        )
        inputs = prepare(config)
        with start(config, inputs) as run:
            run.validation = [row for row in run.validation if len(row.media_refs()) == 1]
            version = 0
            for seed in range(options.seeds):
                for arm in options.arms:
                    result, version = run_arm(run, config, arm, seed, version)
                    results[arm].append(result)
                    print(f"seed {seed} {arm}: {json.dumps({k: round(v, 5) for k, v in result.items()})}", flush=True)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: accuracy per seed and the log-prob gap, one row per arm."""
    lines = [
        "| pixels | held-out accuracy per seed | fp32 log-prob gap, mean | max of step means |",
        "|---|---|---|---|",
    ]
    for arm, runs in results.items():
        accuracies = ", ".join(f"{run['accuracy']:.2f}" for run in runs)
        mean = np.mean([run["gap_mean"] for run in runs])
        largest = max(run["gap_max"] for run in runs)
        lines.append(f"| {arm} | {accuracies} | {mean:.1e} | {largest:.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
