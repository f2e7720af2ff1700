# SPDX-License-Identifier: Apache-2.0
"""`grpo --dry-run`: every check of a run, its first prompts, and a forecast of tokens and memory, without an engine."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from nemo_rl_ext.align.grids import RESERVED_TOKENS
from nemo_rl_ext.grpo.components import prevention_engine
from nemo_rl_ext.grpo.config import Config
from nemo_rl_ext.grpo.run_dir import open_run_directory
from nemo_rl_ext.grpo.setup import OBJECT_STORE_BYTES, Inputs, prepare
from nemo_rl_ext.manifest.check import check_manifest
from nemo_rl_ext.manifest.check_output import print_report
from nemo_rl_ext.manifest.measuring import CheckConfig
from nemo_rl_ext.manifest.row_order import steps_of
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.policy import MediaPolicy

NUM_PROMPTS = 3
BYTES = {"bfloat16": 2, "float32": 4}
CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a run's parts hold, from shapes alone: activations, libraries and interpreters come on top."""

    policy: int
    """Weights and gradients in `policy.precision`, two AdamW moments in the weights' precision."""
    engine: int
    """Weights in `vllm_cfg.precision`."""
    kv_cache: int
    aligner_caches: int
    object_store: int
    longest_row: int
    """Pixels of the images of a row that fills the engine's context, in `policy.precision`."""


def memory_of(config: Config, *, num_parameters: int, patch_size: int, merge_size: int) -> Memory:
    """Forecast from the configuration and the checkpoint's number of parameters."""
    vllm, alignment = config.policy.generation.vllm_cfg, config.grpo.media_alignment
    precision = BYTES[config.policy.precision]
    patches = (config.max_model_len - RESERVED_TOKENS) * merge_size**2
    return Memory(
        policy=num_parameters * precision * 4,
        engine=num_parameters * BYTES[vllm.precision],
        kv_cache=vllm.kv_cache_memory_bytes,
        aligner_caches=alignment.num_aligners * alignment.cache_bytes,
        object_store=OBJECT_STORE_BYTES,
        longest_row=patches * patch_size**2 * CHANNELS * precision,
    )


def num_parameters(model_dir: Path) -> int:
    """Parameters of a checkpoint, from the headers of its safetensors files.

    Raises:
        ValueError: there is no such file, or its header cannot be read.
    """
    total = 0
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_dir}: expected *.safetensors, found none")
    for file in files:
        try:
            with file.open("rb") as handle:
                header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
            total += sum(
                math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise ValueError(f"{file}: not a safetensors file: {error}") from None
    return total


def dry_run(config: Config, *, resume: bool, overwrite: bool, allow_changes: bool, console: Console) -> bool:
    """Print what a run would start with; returns whether it could start.

    Raises:
        ValueError: what would stop the run, in the same words.
    """
    directory = open_run_directory(config, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
    inputs = prepare(config)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    grpo = config.grpo
    say(
        f"{grpo.max_num_steps - directory.first_step} steps of {grpo.num_prompts_per_step} prompts x "
        f"{grpo.num_generations_per_prompt} generations, from step {directory.first_step}, into {directory.path}"
    )
    say(f"first of {len(inputs.train)} prompts:")
    for row in _first_rows(config, inputs, directory.first_step):
        say(f"  {_described(row)}")
    failed = _forecast_tokens(config, inputs, console)
    for line in _memory_lines(config):
        say(line)
    say("nothing was started")
    return not failed


def _first_rows(config: Config, inputs: Inputs, first: int) -> Sequence[ManifestRow]:
    grpo = config.grpo
    steps = steps_of(
        inputs.train,
        per_step=grpo.num_prompts_per_step,
        first=first,
        last=first + 1,
        shuffle=config.data.shuffle,
        seed=grpo.seed,
    )
    return next((rows[:NUM_PROMPTS] for _, rows in steps), ())


def _described(row: ManifestRow) -> str:
    media = [ref.kind for ref in row.media_refs()]
    text = " ".join(
        getattr(part, "text", "")
        for message in row.messages(0)
        for part in message.parts
        if hasattr(part, "text")
    )
    kinds = ", ".join(f"{media.count(kind)} x {kind}" for kind in dict.fromkeys(media)) or "text alone"
    return f"{row.row_id} ({row.where}; {kinds}): {text[:60]}{'...' if len(text) > 60 else ''}"


def _forecast_tokens(config: Config, inputs: Inputs, console: Console) -> bool:
    try:
        engine = prevention_engine(config)
    except ValueError as error:
        console.print(f"no forecast of tokens: {error}", highlight=False, markup=False, soft_wrap=True)
        return False
    policy: MediaPolicy = inputs.media_policy
    checks = CheckConfig(policy=policy, engine=engine, decode=False, video_backend=config.data.video.backend)
    found = check_manifest(config.data.train.data_path, checks)
    print_report(console, found, engine, show=5, estimated=False)
    return found.failed


def _memory_lines(config: Config) -> Sequence[str]:
    from nemo_rl_ext.align.families.registry import family_of

    model_dir = Path(config.policy.model_name)
    family = family_of(model_dir)
    memory = memory_of(
        config,
        num_parameters=num_parameters(model_dir),
        patch_size=int(getattr(getattr(family, "tiler", None), "patch_size", 16)),
        merge_size=int(getattr(getattr(family, "tiler", None), "merge_size", 2)),
    )
    parts = {
        "policy, gradients and optimizer": memory.policy,
        "engine's weights": memory.engine,
        "key/value cache": memory.kv_cache,
        "aligners' caches, at most": memory.aligner_caches,
        "object store, at most": memory.object_store,
        "pixels of one row that fills the context": memory.longest_row,
    }
    lines = [f"  {name}: {size / 2**20:,.1f} MiB" for name, size in parts.items()]
    return ["memory, without activations and libraries:", *lines]
