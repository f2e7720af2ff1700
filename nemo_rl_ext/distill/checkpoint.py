# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: a Hugging Face directory, the optimizer's tensors, and where the run stands.

``step_000100/model`` loads with transformers or vLLM like any checkpoint; ``optimizer.safetensors`` and
``state.json`` are what resuming needs besides. Nothing is a pickle. A checkpoint appears under its name only
when it is complete. ``run.json`` beside them says whose directory it is: what a resumed run must share.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.distill.config import DistillConfig
from nemo_rl_ext.models.weights import LAYER_SCALE

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d{6,})")
_STATE = "state.json"
_OPTIMIZER = "optimizer.safetensors"
_RUN = "run.json"

# Changing one of these in the middle of a run gives a run that nobody can name.
_FIXED = ("student", "teacher", "data", "loss", "train")
_FREE_TRAIN = ("iters", "micro_batch_size", "cp_size", "cp_forward", "gradient_checkpointing", "timeout_s")
# The digest of the data files stands for their place.
_FREE_DATA = (
    "sft_dataset_root",
    "data_paths",
    "media_roots",
    "max_record_bytes",
    "max_pixels",
    "max_media_bytes",
)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A complete checkpoint."""

    path: Path
    step: int

    @property
    def model_dir(self) -> Path:
        return self.path / "model"


def newest(output_dir: Path) -> Saved | None:
    """The complete checkpoint with the highest step, if there is one."""
    return max(_complete(output_dir), key=lambda saved: saved.step, default=None)


def _complete(output_dir: Path) -> list[Saved]:
    found = []
    for path in (output_dir / "checkpoints").glob("step_*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / _STATE).is_file():
            found.append(Saved(path=path, step=int(match[1])))
    return found


def save(
    output_dir: Path,
    *,
    step: int,
    model: Any,
    tokenizer: Any,
    source_dir: Path,
    optimizer: torch.optim.Optimizer,
    names: dict[torch.nn.Parameter, str],
    keep: int,
) -> Path:
    """Write ``checkpoints/step_NNNNNN`` and drop the oldest beyond ``keep``."""
    final = output_dir / "checkpoints" / f"step_{step:06d}"
    scratch = final.with_name(f".{final.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        model_dir = scratch / "model"
        model_dir.mkdir(parents=True)
        weights = {k: v for k, v in model.state_dict().items() if not LAYER_SCALE.match(k)}
        model.save_pretrained(model_dir, state_dict=weights)
        tokenizer.save_pretrained(model_dir)
        for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
            if (source_dir / name).is_file() and not (model_dir / name).exists():
                shutil.copyfile(source_dir / name, model_dir / name)
        _keep_config(source_dir / "config.json", model_dir / "config.json")
        tensors = {
            f"{key}/{names[cast(torch.nn.Parameter, parameter)]}": torch.as_tensor(value)
            .detach()
            .cpu()
            .contiguous()
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }
        save_file(tensors, scratch / _OPTIMIZER)
        (scratch / _STATE).write_text(json.dumps({"step": step}) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for old in sorted(_complete(output_dir), key=lambda saved: saved.step)[:-keep]:
        shutil.rmtree(old.path, ignore_errors=True)
    logger.info("step %d saved to %s", step, final)
    return final


def _keep_config(source: Path, target: Path) -> None:
    # The architecture is the source's, and transformers drops keys that only an engine reads (vit_hidden_size).
    config = json.loads(source.read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = "float32"
    target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if "auto_map" in config:
        for code in source.parent.glob("*.py"):
            shutil.copyfile(code, target.parent / code.name)


def restore_optimizer(
    saved: Saved, optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str]
) -> None:
    """Fill the optimizer's state from a checkpoint.

    Raises:
        ValueError: the file is broken or was written by another model.
    """
    path = saved.path / _OPTIMIZER
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    parameters = {name: parameter for parameter, name in names.items()}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        states.setdefault(name, {})[kind] = tensor
    if states.keys() != parameters.keys():
        odd = sorted(states.keys() ^ parameters.keys())
        raise ValueError(
            f"{path}: state of {counted(len(odd), 'parameter')} is missing or left over, the first {odd[0]!r}"
        )
    for name, state in states.items():
        parameter = parameters[name]
        # AdamW keeps its step counter on the CPU.
        optimizer.state[parameter] = {
            k: v if k == "step" else v.to(parameter.device) for k, v in state.items()
        }


def fingerprint(config: DistillConfig, data_digest: str) -> dict[str, Any]:
    """What a resumed run must share with the run that it continues."""
    kept = config.model_dump(mode="json", include=set(_FIXED))
    for name in _FREE_TRAIN:
        kept["train"].pop(name)
    for name in _FREE_DATA:
        kept["data"].pop(name)
    for role in ("student", "teacher"):
        kept[role] = str(Path(kept[role]).resolve())
    return {**kept, "data_digest": data_digest}


def require_output_dir(config: DistillConfig) -> None:
    """Refuse an output directory that holds something else than the run to resume, or that cannot be written.

    Nothing is written here.

    Raises:
        ValueError: naming the directory and what to do.
    """
    name, path = f"--output-dir {config.output_dir}", config.output_dir
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise ValueError(f"{name}: {there} is not a directory; choose another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{name}: {there} cannot be written to; choose another one")
    if there != path or not any(path.iterdir()):
        return
    if not config.resume:
        raise ValueError(f"{name}: not empty; choose another one or give --resume")
    if not (path / _RUN).is_file():
        raise ValueError(
            f"{name}: --resume, but no distillation run wrote it (no {_RUN}); choose another one"
        )


def write_run(output_dir: Path, fingerprint: dict[str, Any]) -> None:
    """Say whose directory this is."""
    (output_dir / _RUN).write_text(json.dumps({"fingerprint": fingerprint}, indent=1) + "\n")


def require_same_run(output_dir: Path, now: dict[str, Any]) -> None:
    """Refuse to continue with other models, data or hyperparameters.

    Raises:
        ValueError: naming the keys that changed, with both values.
    """
    try:
        before = json.loads((output_dir / _RUN).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{output_dir / _RUN}: cannot be read: {error}") from None
    old, new = _flatten(before), _flatten(now)
    changed = [
        f"{k}: {old.get(k)!r} -> {new.get(k)!r}"
        for k in sorted(old.keys() | new.keys())
        if old.get(k) != new.get(k)
    ]
    if changed:
        raise ValueError(
            f"--resume: the run in {output_dir} was started differently; {'; '.join(changed)}. "
            "Use the same settings or another --output-dir"
        )


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        k: v for name, sub in tree.items() for k, v in _flatten(sub, f"{prefix}.{name}".lstrip(".")).items()
    }
