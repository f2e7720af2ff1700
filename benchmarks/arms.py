# SPDX-License-Identifier: Apache-2.0
"""What wrong pixels cost: the same task, seeds and steps with aligned pixels, with others, and with none.

Every arm has the right number of features for every run, so no count check objects. Reported are held-out accuracy
and the float32 engine-against-trainer log-prob gap, measured on the very weights that sampled.

    python -m benchmarks arms --steps 80 --seeds 3
    python -m benchmarks arms --modality video --steps 80 --seeds 3
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
from nemo_rl_ext.grpo.collecting.collector import Collector
from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup
from nemo_rl_ext.grpo.components import new_policy
from nemo_rl_ext.grpo.config import Config, load_config
from nemo_rl_ext.grpo.setup import Run, prepare, start
from nemo_rl_ext.grpo.training.trainer import train_step
from nemo_rl_ext.grpo.training.weight_history import WeightHistory
from nemo_rl_ext.manifest.demo import build_demo_manifest
from nemo_rl_ext.manifest.row_media import media_by_turn
from nemo_rl_ext.manifest.row_order import steps_of
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.rollout.metrics import AlignmentMetrics
from nemo_rl_ext.rollout.packed import pack

ARMS = {
    "image": ("aligned", "other image", "transposed", "text only"),
    "video": ("aligned", "other clip", "reversed", "text only"),
}
CONFIG = Path(__file__).parents[1] / "configs" / "embedded_async.yaml"
# More rows than the demo's: only those with one medium are used, and few pictures are learnt by heart.
TRAIN_ROWS, VALIDATION_ROWS = 720, 192


def tamper(arm: str, groups: Sequence[PromptGroup], collector: Collector) -> None:
    """Replace every message's pixels as the arm says, on grids and frames with the same number of tokens."""
    if arm == "aligned":
        return
    media = [
        (message, collector.images_of(group.row))
        for group in groups
        for segment in group.rollouts[0].segments
        for message in segment.message_log
        if "pixel_values" in message
    ]
    assert all(len(pixels) == 1 for _, pixels in media), "rows with one medium only"
    replaced = {}
    for index, (message, (own,)) in enumerate(media):
        source = media[(index + 1) % len(media)][1][0] if arm.startswith("other") else own
        grid = Grid(*message["image_grid_hw"].as_tensor()[0].tolist())
        target = Grid(grid.width, grid.height) if arm == "transposed" else grid
        frames = int(message["num_frames"].as_tensor()[0]) if "num_frames" in message else 0
        pixels = collector.pool.family.render(_item(arm, source, frames), target)
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


def _item(arm: str, pixels: np.ndarray, frames: int) -> MediaItem:
    """An image, or `frames` frames of a clip spread over those that there are, backwards where the arm says so."""
    if not frames:
        return MediaItem(size=pixels.shape[:2], source=arm, load=lambda: pixels[None])
    places = np.linspace(0, len(pixels) - 1, frames).round().astype(int)
    chosen = pixels[places[::-1] if arm == "reversed" else places]
    return MediaItem(
        kind="video",
        size=pixels.shape[1:3],
        source=arm,
        load=lambda indices: chosen,
        frame_indices=tuple(range(frames)),
    )


def single(rows: Sequence[ManifestRow], modality: str) -> list[ManifestRow]:
    """The rows that bring one image, or one clip, and nothing else."""
    kinds = [[source.kind for turn in media_by_turn(row) for source in turn] for row in rows]
    return [row for row, found in zip(rows, kinds, strict=True) if found == [modality] and row.num_turns == 1]


def run_arm(
    run: Run, config: Config, rows: Sequence[ManifestRow], arm: str, seed: int, version: int
) -> tuple[dict[str, float], int]:
    """Train one arm from the checkpoint; returns its results and the last weight version used."""
    run.policy = new_policy(config)
    version += 1
    run.engine.update_weights(run.policy.state_dict_for_engine(torch.float32), version, in_flight=False)
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
        train_step(
            run.policy,
            groups,
            sampling=run.sampling,
            objective=run.objective,
            metrics=metrics,
            history=history,
            reference=run.reference,
        )
        flushed = metrics.flush()
        gaps += [
            value
            for name, value in flushed.items()
            if name in ("alignment/logprob_gap_matched_mean", "alignment/logprob_gap_repaired_mean")
        ]
        scored = [r.reward for group in groups for r in group.rollouts if r.reward is not None]
        rewards.append(float(np.mean(scored)))
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
    parser.add_argument("--modality", choices=ARMS, default="image")
    parser.add_argument("--arms", nargs="+", default=None, help="some of the modality's arms; all by default")
    parser.add_argument("--json", type=Path, default=None, help="write the results here as JSON")
    options = parser.parse_args(arguments)
    arms = options.arms or ARMS[options.modality]
    if unknown := sorted(set(arms) - set(ARMS[options.modality])):
        parser.error(f"unknown arms {unknown}; those of {options.modality} are {ARMS[options.modality]}")
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as scratch:
        train, validation = build_demo_manifest(
            scratch, num_rows=TRAIN_ROWS, num_validation_rows=VALIDATION_ROWS, seed=0
        )
        config = load_config(
            CONFIG,
            [
                f"grpo.max_num_steps={options.steps}",
                f"grpo.max_val_samples={VALIDATION_ROWS}",
                "grpo.num_generations_per_prompt=8",
                "policy.optimizer.lr=2e-4",
                "policy.generation.vllm_cfg.precision=float32",
                f"policy.model_name={scratch}/checkpoint",
                f"data.train.data_path={train}",
                f"data.validation.data_path={validation}",
                "data.build_demo_manifest=false",
                f"logger.log_dir={scratch}/run",
            ],
        )
        inputs = prepare(config)
        with start(config, inputs) as run:
            run.validation = single(run.validation, options.modality)
            rows = single(run.train, options.modality)
            version = 0
            for seed in range(options.seeds):
                for arm in arms:
                    result, version = run_arm(run, config, rows, arm, seed, version)
                    results[arm].append(result)
                    print(
                        f"seed {seed} {arm}: {json.dumps({k: round(v, 5) for k, v in result.items()})}",
                        flush=True,
                    )
    print(f"held-out rows: {len(run.validation)}")
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
