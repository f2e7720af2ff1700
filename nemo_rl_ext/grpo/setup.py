# SPDX-License-Identifier: Apache-2.0
"""Everything a run needs, checked before anything is written and started before the first step."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.grpo.collecting.collector import Collector
from nemo_rl_ext.grpo.collecting.endpoint import Completions, serve
from nemo_rl_ext.grpo.collecting.gym_player import GymPlayer
from nemo_rl_ext.grpo.collecting.gym_servers import start_gym
from nemo_rl_ext.grpo.collecting.player import Player, Sampling
from nemo_rl_ext.grpo.collecting.prompts import PromptRenderer, require_prompts
from nemo_rl_ext.grpo.components import (
    aligner_config,
    alignment_options,
    engine_config,
    gym_config,
    new_policy,
    prevention_engine,
    reward_of,
    sampling_of,
)
from nemo_rl_ext.grpo.config import Config
from nemo_rl_ext.grpo.engine.actor import start_engine
from nemo_rl_ext.grpo.engine.client import EngineClient
from nemo_rl_ext.grpo.keeper import keeper
from nemo_rl_ext.grpo.raylet import raylet_watched
from nemo_rl_ext.grpo.termination import handler_given_back, raise_on_sigterm
from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.grpo.training.trainer import Objective
from nemo_rl_ext.grpo.training.weight_history import Weights, snapshot
from nemo_rl_ext.manifest.demo import build_demo_manifest
from nemo_rl_ext.manifest.loading import Manifest, load_manifest
from nemo_rl_ext.manifest.prevention import require_prevention
from nemo_rl_ext.manifest.row_order import steps_of
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.manifest.scoring import require_answers
from nemo_rl_ext.manifest.verify import verify_media
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.sources import reference_kind
from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint, require_checkpoint
from nemo_rl_ext.receipts.store import ReceiptStore
from nemo_rl_ext.rollout.broker import end_brokers, start_brokers
from nemo_rl_ext.rollout.pool import AlignerPool

logger = logging.getLogger(__name__)

DEMO_ROWS, DEMO_VALIDATION_ROWS = 480, 96
OBJECT_STORE_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A configuration's files, found and valid."""

    train: Manifest
    validation: Manifest | None
    media_policy: MediaPolicy
    reward: Callable[[ManifestRow, str], float]


def prepare(config: Config) -> Inputs:
    """Build what the configuration asks to be built, and validate checkpoint and manifests.

    Raises:
        ValueError: naming the file (and line) that is missing or wrong, or the limits under which images are re-sized
            although `grpo.media_alignment.prevent` is set.
    """
    if config.policy.build_tiny_checkpoint:
        build_tiny_checkpoint(config.policy.model_name, seed=config.grpo.seed)
    require_checkpoint(config.policy.model_name)
    if config.data.build_demo_manifest:
        _build_demo(config)
    policy = MediaPolicy(
        roots=tuple(config.data.media_roots),
        allow_remote=config.data.allow_remote,
        max_pixels=config.data.max_image_pixels,
        max_bytes=config.data.max_media_bytes,
        timeout_s=config.data.video.decode_timeout_s,
    )
    train = load_manifest(config.data.train.data_path, policy=policy)
    validation = None
    if config.data.validation is not None:
        validation = load_manifest(config.data.validation.data_path, policy=policy)
    if validation is not None:
        _require_one_base(train, validation)
    if config.env.reward_function is None:
        for manifest in filter(None, (train, validation)):
            require_answers(manifest, own_score=not config.env.should_use_nemo_gym)
    reward = reward_of(config)
    for manifest in filter(None, (train, validation)):
        require_prompts(manifest, lambda: PromptRenderer(_tokenizer(config)))
    if config.data.verify_media:
        for manifest in filter(None, (train, validation)):
            verify_media(manifest, video_backend=config.data.video.backend)
    if config.grpo.media_alignment.prevent:
        require_prevention(
            train,
            prevention_engine(config),
            video_backend=config.data.video.backend,
            any_images=config.env.should_use_nemo_gym,
        )
    logger.info(
        "%s to train on, %s held out, checked",
        counted(len(train), "row"),
        counted(0 if validation is None else len(validation), "row"),
    )
    return Inputs(train=train, validation=validation, media_policy=policy, reward=reward)


def _tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(config.policy.model_name), local_files_only=True)


def _require_one_base(train: Manifest, validation: Manifest) -> None:
    """Refuse held-out media that would be looked up beside the training manifest, where they are not.

    Raises:
        ValueError: naming both directories and the first such row.
    """
    if train.base_dir.resolve() == validation.base_dir.resolve():
        return
    for row in validation:
        for media in row.media_refs():
            local = reference_kind(media.ref, where=row.where) == "local"
            if local and not media.ref[:5].lower() == "file:" and not Path(media.ref).is_absolute():
                raise ValueError(
                    f"data.validation.data_path: {row.where} names {media.ref!r}, and relative media are looked up in "
                    f"{train.base_dir}, the directory of data.train.data_path; put both manifests into one directory, "
                    "or give absolute paths and name their directories in data.media_roots"
                )


def _build_demo(config: Config) -> None:
    train = config.data.train.data_path
    validation = (
        config.data.validation.data_path if config.data.validation else train.parent / "validation.jsonl"
    )
    if (train.name, validation) != ("train.jsonl", train.parent / "validation.jsonl"):
        raise ValueError(
            "data.build_demo_manifest writes train.jsonl and validation.jsonl into one directory; "
            f"data.train.data_path is {train} and data.validation.data_path is {validation}"
        )
    build_demo_manifest(
        train.parent, num_rows=DEMO_ROWS, num_validation_rows=DEMO_VALIDATION_ROWS, seed=config.grpo.seed
    )


@dataclass(kw_only=True)
class Run:
    """The live parts of a run."""

    config: Config
    policy: Policy
    engine: EngineClient
    pool: AlignerPool
    collector: Collector
    sampling: Sampling
    reference: Weights | None
    """The checkpoint's own weights, where the loss has a KL penalty."""
    train: Sequence[ManifestRow]
    validation: Sequence[ManifestRow]

    def steps(self, first: int) -> Iterator[tuple[int, list[ManifestRow]]]:
        """Rows of every step from `first` on."""
        grpo = self.config.grpo
        return steps_of(
            self.train,
            per_step=grpo.num_prompts_per_step,
            first=first,
            last=grpo.max_num_steps,
            shuffle=self.config.data.shuffle,
            seed=grpo.seed,
        )

    @property
    def objective(self) -> Objective:
        """What a training step takes of the configuration."""
        return Objective(
            loss=self.config.loss_fn,
            normalize_rewards=self.config.grpo.normalize_rewards,
            use_leave_one_out_baseline=self.config.grpo.use_leave_one_out_baseline,
            rollouts_per_update=self.config.policy.train_global_batch_size,
            micro_batch_size=self.config.policy.train_micro_batch_size,
        )

    def push_weights(self, version: int) -> None:
        """Give the engine the policy's weights as version `version`."""
        dtype = getattr(torch, self.config.policy.generation.vllm_cfg.precision)
        in_flight = (
            self.config.grpo.async_grpo.enabled and self.config.grpo.async_grpo.in_flight_weight_updates
        )
        self.engine.update_weights(self.policy.state_dict_for_engine(dtype), version, in_flight=in_flight)

    def evaluate(self) -> dict[str, float]:
        """Share of held-out rows that the greedy policy answers right; a row without an answer is wrong.

        `eval/accuracy` over all of them, and `eval/accuracy_image`, `_video` and `_text` over those whose media are
        images, hold a video, or are none.
        """
        greedy = Sampling(
            temperature=0.0,
            max_new_tokens=self.sampling.max_new_tokens,
            allowed_token_ids=self.sampling.allowed_token_ids,
            banned_token_ids=self.sampling.banned_token_ids,
        )
        scores = self.collector.scores(self.validation, greedy)
        by_kind: dict[str, list[float]] = {}
        for row, value in zip(self.validation, scores, strict=True):
            by_kind.setdefault(_modality(row), []).append(value)
        accuracies = {
            f"eval/accuracy_{kind}": float(np.mean(values)) for kind, values in sorted(by_kind.items())
        }
        return {"eval/accuracy": float(np.mean(scores)), **accuracies}


def _modality(row: ManifestRow) -> str:
    kinds = {ref.kind for ref in row.media_refs()}
    return "video" if kinds - {"image"} else "image" if kinds else "text"


@contextlib.contextmanager
def start(config: Config, inputs: Inputs, *, how_to_go_on: Callable[[], str] = lambda: "") -> Iterator[Run]:
    """Start Ray, the engine, the aligners and the policy; end all of them on the way out, however it comes.

    `how_to_go_on` is what to tell a user whose Ray node is killed, which ends this process.
    """
    import ray

    with contextlib.ExitStack() as parts:
        kept = None
        if not ray.is_initialized():
            kept = parts.enter_context(keeper())
            parts.enter_context(handler_given_back())
            parts.callback(ray.shutdown)
            logger.info("starting Ray")
            _start_ray(config.grpo.media_alignment)
            raise_on_sigterm()
            kept.watch()
            parts.enter_context(raylet_watched(how_to_go_on))
        run = _start_parts(config, inputs, parts)
        if kept is not None:
            kept.watch()
        yield run


def _start_parts(config: Config, inputs: Inputs, parts: contextlib.ExitStack) -> Run:
    alignment = config.grpo.media_alignment
    parts.callback(end_brokers, start_brokers())
    pool = AlignerPool(
        aligner_config(config, inputs.media_policy, inputs.train.base_dir),
        alignment.num_aligners,
        num_cpus=alignment.aligner_cpus,
        timeout_s=alignment.aligner_timeout_s,
    )
    parts.callback(pool.shutdown)
    logger.info(
        "starting %s and the vLLM engine on %s; its imports take longest",
        counted(alignment.num_aligners, "aligner"),
        config.policy.model_name,
    )
    began = time.monotonic()
    with ThreadPoolExecutor(1) as executor:
        starting = executor.submit(EngineClient, lambda: start_engine(engine_config(config)))
        try:
            policy = new_policy(config)
        finally:
            engine = starting.result()
            parts.callback(engine.shutdown)
    tokenizer = _tokenizer(config)
    renderer, sampling = PromptRenderer(tokenizer), sampling_of(config, tokenizer, pool.family.grammars)
    player = parts.enter_context(_player(config, inputs, engine, pool, renderer, sampling))
    collector = Collector(
        player=player,
        pool=pool,
        reward=inputs.reward,
        sampling=sampling,
        options=alignment_options(config),
        num_generations=config.grpo.num_generations_per_prompt,
    )
    logger.info("engine, aligners and policy are ready after %.0f s", time.monotonic() - began)
    validation = inputs.validation[: config.grpo.max_val_samples] if inputs.validation is not None else ()
    return Run(
        config=config,
        policy=policy,
        engine=engine,
        pool=pool,
        collector=collector,
        sampling=sampling,
        reference=snapshot(policy) if config.loss_fn.reference_policy_kl_penalty else None,
        train=inputs.train,
        validation=validation,
    )


def _start_ray(alignment: MediaAlignmentConfig) -> None:
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray makes its workers nicer than the driver; here the engine is as busy a part of the step as the trainer.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        num_cpus=max(2, os.cpu_count() or 1) + math.ceil(alignment.num_aligners * alignment.aligner_cpus),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )


@contextlib.contextmanager
def _player(
    config: Config,
    inputs: Inputs,
    engine: EngineClient,
    pool: AlignerPool,
    renderer: PromptRenderer,
    sampling: Sampling,
) -> Iterator[Player | GymPlayer]:
    """Rows are played on the engine directly, or through Gym's servers on the engine's endpoint."""
    max_turns = config.grpo.max_rollout_turns
    receipts = config.grpo.media_alignment.evidence == "receipt"
    if not config.env.should_use_nemo_gym:
        yield Player(engine=engine, pool=pool, renderer=renderer, max_turns=max_turns, receipts=receipts)
        return
    store = ReceiptStore() if receipts else None
    completions = Completions(
        engine=engine,
        renderer=renderer,
        sampling=sampling,
        media_policy=inputs.media_policy,
        model_name=str(config.policy.model_name),
        receipts=store,
    )
    with serve(completions) as base_url, start_gym(gym_config(config, base_url)) as servers:
        yield GymPlayer(
            servers=servers,
            engine=engine,
            pool=pool,
            renderer=renderer,
            media_policy=inputs.media_policy,
            base_dir=inputs.train.base_dir,
            max_turns=max_turns,
            receipts=store,
            samples=completions.samples,
        )
