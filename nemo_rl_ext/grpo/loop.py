# SPDX-License-Identifier: Apache-2.0
"""The embedded run: engine, aligners, collector and policy on one machine, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from nemo_rl_ext.align.verdict import MediaAlignmentError
from nemo_rl_ext.grpo.collecting.buffer import TrajectoryBuffer
from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup
from nemo_rl_ext.grpo.config import Config
from nemo_rl_ext.grpo.run_log import RunLog, accuracy_line
from nemo_rl_ext.grpo.setup import Run, prepare, start
from nemo_rl_ext.grpo.training.trainer import train_step
from nemo_rl_ext.grpo.training.weight_history import WeightHistory
from nemo_rl_ext.rollout.metrics import AlignmentMetrics, MaskedWindow


def run_grpo(
    config: Config,
    *,
    resume: bool = False,
    console: Console | None = None,
    at_end: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Run GRPO as configured; returns the last step's metrics.

    `at_end` is called once the run directory is complete, after a failure, too.

    Raises:
        ValueError: for bad input, before anything is written; for a masked share over the limit; and, with
            alignment switched off, for the first turn whose media do not fit its tokens.
    """
    console = console or Console()
    inputs = prepare(config)
    first_step = _latest_step(config.checkpoint_dir) if resume else 0
    with start(config, inputs) as run:
        if first_step:
            run.policy.load(_checkpoint(config.checkpoint_dir, first_step))
        log = RunLog(
            config.logger.log_dir,
            resume_from=first_step if resume else None,
            tensorboard=config.logger.tensorboard_enabled,
            console=console,
        )
        (config.logger.log_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        try:
            return _train(run, log, first_step)
        finally:
            log.close()
            if at_end is not None:
                at_end()


def _train(run: Run, log: RunLog, first_step: int) -> dict[str, float]:
    config = run.config
    grpo, alignment = config.grpo, config.grpo.media_alignment
    metrics = AlignmentMetrics(on_ambiguous=alignment.on_ambiguous, on_unalignable=alignment.on_unalignable)
    window = MaskedWindow(size=alignment.masked_window, max_fraction=alignment.max_masked_fraction)
    max_age = grpo.async_grpo.max_trajectory_age_steps if grpo.async_grpo.enabled else 0
    buffer = TrajectoryBuffer(max_age=max_age, first_step=first_step)
    history = WeightHistory(max_age + 1) if alignment.measure_logprob_gap else None
    if history is not None:
        history.keep(first_step, run.policy)
    if first_step:
        run.push_weights(first_step)
    record: dict[str, float] = {}
    if first_step == 0 and grpo.val_at_start and run.validation:
        record = run.evaluate()
        log.step(0, record)
        log.console.print(f"before training: {accuracy_line(record)}", highlight=False)
    collector = run.collector.run(buffer, run.steps(first_step))
    try:
        for step in range(first_step, grpo.max_num_steps):
            started = time.perf_counter()
            groups = buffer.take(step)
            waited = time.perf_counter() - started
            record = _account(groups, metrics, window)
            try:
                record |= train_step(
                    run.policy,
                    groups,
                    sampling=run.sampling,
                    loss=config.loss_fn,
                    normalize_rewards=grpo.normalize_rewards,
                    micro_batch_size=config.policy.train_micro_batch_size,
                    metrics=metrics,
                    history=history,
                )
            except ValueError as error:
                raise _explained(error, step, enabled=alignment.enabled) from error
            if history is not None:
                history.keep(step + 1, run.policy)
            run.push_weights(step + 1)
            buffer.advance(step + 1)
            done = step + 1
            if run.validation and (
                done == grpo.max_num_steps or (grpo.val_period and done % grpo.val_period == 0)
            ):
                record |= run.evaluate()
            record |= metrics.flush()
            record |= {
                "train/weight_age": float(step - min(_versions(groups), default=step)),
                "rollout/engine_restarts": float(run.engine.restarts),
                "rollout/aligner_deaths": float(run.pool.deaths),
                "timing/step_s": time.perf_counter() - started,
                "timing/wait_for_rollouts_s": waited,
            }
            log.step(done, record)
            log.turns(done, metrics.turn_samples)
            for offence in metrics.new_offences():
                log.offence(done, offence)
            log.show(done, grpo.max_num_steps, record)
            if config.checkpointing.enabled and (
                done == grpo.max_num_steps or done % config.checkpointing.save_period == 0
            ):
                _save(run, done)
    finally:
        buffer.close()
        collector.join(timeout=30)
    return record


def _account(
    groups: Sequence[PromptGroup], metrics: AlignmentMetrics, window: MaskedWindow
) -> dict[str, float]:
    """Count every rollout of a step; the policy's reward is the mean over rollouts that are not masked."""
    rewards = []
    for group in groups:
        for rollout in group.rollouts:
            metrics.add_row(
                rollout.aligned,
                masked=rollout.masked,
                extra_reasons=rollout.extra_reasons,
                row_id=rollout.row_id,
            )
            window.add(rollout.reasons, masked=rollout.masked)
            if not rollout.masked:
                rewards.append(rollout.reward)
    return {
        "train/reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "train/num_rollouts": float(sum(len(group.rollouts) for group in groups)),
    }


def _versions(groups: Sequence[PromptGroup]) -> Iterator[int]:
    """The weights that each rollout's samples were drawn with."""
    for group in groups:
        for rollout in group.rollouts:
            for segment in rollout.segments:
                yield from segment.weight_versions()


def _explained(error: ValueError, step: int, *, enabled: bool) -> ValueError:
    if enabled or "feature vectors" not in str(error):
        return error
    return MediaAlignmentError(
        f"step {step + 1}: {error}. The engine gave this turn's media other patch grids than the training side's "
        "processor; with grpo.media_alignment.enabled=true the tensors are made again on the engine's grids"
    )


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def _saved_steps(folder: Path) -> list[int]:
    """Steps with a checkpoint, ascending; half-written ones never bear such a name."""
    if not folder.is_dir():
        return []
    names = (path.name.removeprefix("step_") for path in folder.glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def _latest_step(folder: Path) -> int:
    saved = _saved_steps(folder)
    if not saved:
        raise ValueError(
            f"--resume: no checkpoint in {folder}; start without --resume, or check checkpointing.*"
        )
    return saved[-1]


def _save(run: Run, step: int) -> None:
    import shutil

    folder = run.config.checkpoint_dir
    target = _checkpoint(folder, step)
    if target.exists():
        shutil.rmtree(target)
    run.policy.save(target)
    for old in _saved_steps(folder)[: -run.config.checkpointing.keep_top_k]:
        shutil.rmtree(_checkpoint(folder, old))
