# SPDX-License-Identifier: Apache-2.0
"""The embedded run: engine, aligners, collector and policy on one machine, step by step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.console import Console

from nemo_rl_ext.align.verdict import MediaAlignmentError
from nemo_rl_ext.grpo.collecting.buffer import TrajectoryBuffer
from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup
from nemo_rl_ext.grpo.config import Config
from nemo_rl_ext.grpo.run_dir import RunDirectory, open_run_directory
from nemo_rl_ext.grpo.run_log import RunLog, accuracy_line
from nemo_rl_ext.grpo.setup import Run, prepare, start
from nemo_rl_ext.grpo.training.trainer import train_step
from nemo_rl_ext.grpo.training.weight_history import WeightHistory
from nemo_rl_ext.rollout.metrics import AlignmentMetrics, MaskedWindow

logger = logging.getLogger(__name__)


def run_grpo(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    console: Console | None = None,
    at_end: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Run GRPO as configured; returns the last step's metrics, none for a run that is finished already.

    A directory that holds a run is refused unless it is resumed or overwritten; `allow_changes` resumes with settings
    that make it another run. `at_end` is called once the run directory is complete, after a failure, too.

    Raises:
        ValueError: for bad input, before anything is written; for a masked share over the limit; and, with
            alignment switched off, for the first turn whose media do not fit its tokens.
    """
    console = console or Console()
    directory = open_run_directory(config, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
    if directory.finished:
        console.print(
            f"nothing to do: step {directory.first_step} of {config.grpo.max_num_steps} is saved in "
            f"{directory.path}; raise grpo.max_num_steps to go on",
            highlight=False,
            soft_wrap=True,
        )
        return {}
    inputs = prepare(config)
    directory.claim()
    try:
        with directory.recording(), start(config, inputs, how_to_go_on=directory.interruption) as run:
            return _run(run, directory, console)
    except KeyboardInterrupt:
        console.print(directory.interruption(), highlight=False, soft_wrap=True)
        raise
    finally:
        if at_end is not None:
            at_end()


def _run(run: Run, directory: RunDirectory, console: Console) -> dict[str, float]:
    if directory.resumed:
        run.policy.load(directory.checkpoint(directory.first_step))
    with directory.writing():
        log = RunLog(
            directory.path,
            resume_from=directory.first_step if directory.resumed else None,
            tensorboard=run.config.logger.tensorboard_enabled,
            console=console,
        )
    try:
        return _train(run, log, directory)
    finally:
        # What ended the run matters more than a file that cannot be closed on a full disk.
        with contextlib.suppress(OSError):
            log.close()


def _train(run: Run, log: RunLog, directory: RunDirectory) -> dict[str, float]:
    first_step = directory.first_step
    config = run.config
    grpo, alignment = config.grpo, config.grpo.media_alignment
    metrics = AlignmentMetrics(
        on_ambiguous=alignment.on_ambiguous,
        on_unalignable=alignment.on_unalignable,
        reported=log.reported_reasons(),
    )
    window = MaskedWindow(size=alignment.masked_window, max_fraction=alignment.max_masked_fraction)
    max_age = grpo.async_grpo.max_trajectory_age_steps if grpo.async_grpo.enabled else 0
    buffer = TrajectoryBuffer(max_age=max_age, first_step=first_step)
    history = WeightHistory(max_age + 1) if alignment.measure_logprob_gap else None
    if history is not None:
        history.keep(first_step, run.policy)
    if first_step:
        run.push_weights(first_step)
    said_flat = False
    record: dict[str, float] = {}
    if first_step == 0 and grpo.val_at_start and run.validation:
        record = run.evaluate()
        with directory.writing():
            log.step(0, record)
        log.console.print(f"before training: {accuracy_line(record)}", highlight=False)
    collector = run.collector.run(buffer, run.steps(first_step))
    try:
        for step in range(first_step, grpo.max_num_steps):
            started = time.perf_counter()
            groups = buffer.take(step)
            waited = time.perf_counter() - started
            record = _account(groups, metrics, window)
            if not said_flat and all(group.is_flat for group in groups):
                said_flat = True
                logger.warning(
                    "step %d: the rollouts of every prompt have equal rewards, so it trains nothing; that is right "
                    "where all answers are right or all wrong, else look at the rows' answers and at the rewards "
                    "(said once)",
                    step + 1,
                )
            try:
                record |= train_step(
                    run.policy,
                    groups,
                    sampling=run.sampling,
                    objective=run.objective,
                    metrics=metrics,
                    history=history,
                    reference=run.reference,
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
                "timing/step_s": (step_s := time.perf_counter() - started),
                "timing/wait_for_rollouts_s": waited,
                "timing/tokens_per_s": sum(r.num_sampled for g in groups for r in g.rollouts) / step_s,
            }
            directory.step = done
            with directory.writing():
                log.step(done, record)
                log.turns(done, metrics.turn_samples)
                for occurrence in metrics.new_occurrences():
                    log.occurrence(done, occurrence)
            log.show(done, grpo.max_num_steps, record)
            if config.checkpointing.enabled and (
                done == grpo.max_num_steps or done % config.checkpointing.save_period == 0
            ):
                directory.save(run.policy, done)
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
            if not rollout.masked and rollout.reward is not None:
                rewards.append(rollout.reward)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    versions = [segment.weight_versions() for rollout in rollouts for segment in rollout.segments]
    return {
        "train/reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "train/num_rollouts": float(len(rollouts)),
        "train/groups_without_variance": float(np.mean([group.is_flat for group in groups])),
        "train/mean_gen_tokens_per_sample": float(np.mean([rollout.num_sampled for rollout in rollouts])),
        "train/truncation_rate": float(np.mean([rollout.truncated for rollout in rollouts])),
        "train/mixed_rows": float(np.mean([len(found) > 1 for found in versions])),
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
