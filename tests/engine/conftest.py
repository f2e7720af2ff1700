# SPDX-License-Identifier: Apache-2.0
"""What a run on the real engine starts from: a tiny checkpoint and a demo manifest."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CONFIG = Path(__file__).parents[2] / "configs" / "embedded_async.yaml"


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """`train.jsonl` and `validation.jsonl` in `folder`; read-only."""

    folder: Path
    checkpoint: Path
    config: Path = CONFIG

    def overrides(self, run_dir: Path) -> list[str]:
        """The configuration's overrides for a run of these inputs alone, without validation or event files."""
        return [
            f"policy.model_name={self.checkpoint}",
            f"data.train.data_path={self.folder}/train.jsonl",
            f"data.validation.data_path={self.folder}/validation.jsonl",
            "policy.build_tiny_checkpoint=false",
            "data.build_demo_manifest=false",
            f"logger.log_dir={run_dir}",
            "logger.tensorboard_enabled=false",
            "grpo.val_at_start=false",
            "grpo.val_period=0",
        ]


@pytest.fixture(scope="session")
def make_inputs(tmp_path_factory, tiny_checkpoint) -> Callable[[int, int], RunInputs]:
    """Inputs with so many rows and validation rows; the checkpoint is one for all."""
    from nemo_rl_ext.manifest.demo import build_demo_manifest

    def make(num_rows: int, num_validation_rows: int) -> RunInputs:
        folder = tmp_path_factory.mktemp("inputs")
        build_demo_manifest(folder, num_rows=num_rows, num_validation_rows=num_validation_rows, seed=0)
        return RunInputs(folder=folder, checkpoint=tiny_checkpoint)

    return make


@pytest.fixture(scope="module")
def in_process(tiny_checkpoint) -> Iterator[SimpleNamespace]:
    """The parts of a run in this process, on a float32 engine with its processor cache on: no Ray, nothing made up.

    `gap(group)` is the largest difference between the engine's and the policy's log-probs over the rollouts of a prompt
    group that are not masked; wrong pixels show in it.
    """
    import torch
    from transformers import AutoTokenizer

    from nemo_rl_ext.grpo.collecting.player import Sampling
    from nemo_rl_ext.grpo.collecting.prompts import PromptRenderer
    from nemo_rl_ext.grpo.engine.actor import EngineActor
    from nemo_rl_ext.grpo.engine.config import EngineConfig, LimitMMPerPromptConfig
    from nemo_rl_ext.grpo.training.batch import collate
    from nemo_rl_ext.grpo.training.policy import Policy
    from nemo_rl_ext.grpo.training.rows import training_rows
    from nemo_rl_ext.media.policy import MediaPolicy
    from nemo_rl_ext.models.tokenizer import SPECIAL_TOKENS
    from nemo_rl_ext.rollout.aligner import AlignerConfig, RolloutAligner

    banned = tuple(range(len(SPECIAL_TOKENS)))
    engine = EngineActor(
        EngineConfig(
            model=str(tiny_checkpoint),
            precision="float32",
            mm_processor_cache_gb=1.0,
            limit_mm_per_prompt=LimitMMPerPromptConfig(image=4, video=2),
        )
    )
    engine.start()
    policy = Policy.from_pretrained(tiny_checkpoint)

    def make_pool(**config: Any) -> SimpleNamespace:
        config = {"media_policy": MediaPolicy(), "num_frames": 4, **config}
        aligner = RolloutAligner(AlignerConfig(model_dir=tiny_checkpoint, identify=True, **config))

        def submit(method: str) -> Callable[[Sequence[Any]], Future]:
            def call(work: Sequence[Any]) -> Future:
                future: Future = Future()
                future.set_result(getattr(aligner, method)(list(work)))
                return future

            return call

        return SimpleNamespace(
            family=aligner.family,
            num_aligners=1,
            submit_static=submit("static"),
            submit_align=submit("align"),
        )

    def gap(group: Any) -> float:
        rows = [row for row in training_rows([group], normalize=False) if not row.masked]
        if not rows:
            return 0.0
        with torch.no_grad():
            ours = policy.forward_logprobs(collate(rows, pad_token_id=0), banned_token_ids=banned)
        return max(
            float((logprobs[: len(row.sampled) - 1] - row.engine_logprobs[1:])[row.sampled[1:]].abs().max())
            for row, logprobs in zip(rows, ours, strict=True)
        )

    yield SimpleNamespace(
        client=SimpleNamespace(generate=engine.generate, version=0),
        pool=make_pool(),
        make_pool=make_pool,
        renderer=PromptRenderer(AutoTokenizer.from_pretrained(str(tiny_checkpoint))),
        sampling=Sampling(temperature=1.0, max_new_tokens=3, banned_token_ids=banned),
        gap=gap,
    )
    engine.shutdown()
