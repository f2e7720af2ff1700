# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories: what the embedded run needs to know of one, and a tiny one that needs no download.

The tiny checkpoint is a random NemotronH-Omni of about 0.24 M parameters. vLLM's `nano_nemotron_vl` model and
transformers' `nemotron_h_omni` both load it, from the same files and without remote code.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from nemo_rl_ext.align.families.registry import known_architectures
from nemo_rl_ext.models.tiny_model import write_tiny_model

logger = logging.getLogger(__name__)

ARCHITECTURES = (
    "NemotronH_Nano_VL_V2",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
    "NemotronH_Omni_Reasoning_V3",
)
_STAMP = "tiny_checkpoint.json"
_FORMAT = 2
_LAYER_KINDS = {"*": "attention", "-": "mlp", "M": "mamba", "E": "moe"}


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint directory says about its model.

    `max_num_patches` is 0 when images have no cap of their own. `vision_hidden_size` is None when the
    configuration does not state it. The four numbers are 0 where the family keeps its limits in processor files.
    """

    path: Path
    architecture: str
    model_type: str
    dtype: str
    needs_remote_code: bool
    patch_size: int = 0
    merge_size: int = 0
    min_num_patches: int = 0
    max_num_patches: int = 0
    vision_hidden_size: int | None = None

    @property
    def engine_overrides(self) -> dict[str, Any]:
        """`hf_overrides` for vLLM.

        transformers renames `vit_hidden_size` while it reads the configuration, and vLLM's model reads the
        old name.
        """
        if self.model_type != "nemotron_h_omni" or self.vision_hidden_size is None:
            return {}
        return {"vit_hidden_size": self.vision_hidden_size}


def require_checkpoint(path: Path | str) -> CheckpointInfo:
    """Read a checkpoint directory of a family that is known.

    Raises ValueError, with everything that is missing in one message, when the directory is not one.
    """
    path = Path(path)
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise ValueError(f"model directory {path}: expected a checkpoint directory, found {found}")
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not (path / "tokenizer.json").is_file():
        missing.append("tokenizer.json")
    if not (path / "tokenizer_config.json").is_file():
        missing.append("tokenizer_config.json")
    missing += _missing_weights(path)
    if missing:
        raise ValueError(
            f"model directory {path} is not a usable checkpoint: missing {', '.join(missing)}. "
            "Expected the files of a Hugging Face checkpoint (config.json, a tokenizer, *.safetensors)."
        )
    config = _read_json(path / "config.json")
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        if architecture not in known_architectures():
            raise ValueError(
                f"{path / 'config.json'}: architecture {architecture!r} is not supported; "
                f"known ones are {', '.join(known_architectures())}"
            )
        return CheckpointInfo(
            path=path.resolve(),
            architecture=architecture,
            model_type=str(config.get("model_type", "")),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            needs_remote_code="auto_map" in config,
        )
    vision = config.get("vision_config") or {}
    args = vision.get("args") or {}
    try:
        return CheckpointInfo(
            path=path.resolve(),
            architecture=architecture,
            model_type=str(config.get("model_type", "")),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            patch_size=int(config["patch_size"]),
            merge_size=round(1 / float(config["downsample_ratio"])),
            min_num_patches=int(args["min_num_patches"]),
            max_num_patches=int(args["max_num_patches"]),
            vision_hidden_size=config.get("vit_hidden_size") or config.get("vision_hidden_size"),
            needs_remote_code="auto_map" in config,
        )
    except KeyError as error:
        raise ValueError(
            f"{path / 'config.json'}: no {error.args[0]!r}. Expected a checkpoint with dynamic image "
            "resolution (patch_size, downsample_ratio, and min_num_patches and max_num_patches in "
            "vision_config.args)."
        ) from error


def weight_names(path: Path) -> frozenset[str]:
    """Names of all weights in a checkpoint directory's safetensors files."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            names.update(weights.keys())
    return frozenset(names)


def _missing_weights(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
        return [shard for shard in shards if not (path / shard).is_file()] or (
            [] if shards else ["any weights"]
        )
    return [] if any(path.glob("*.safetensors")) else ["*.safetensors"]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def build_tiny_checkpoint(
    out_dir: Path | str,
    *,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    pattern: str = "*-*-",
    min_num_patches: int = 16,
    max_num_patches: int = 1024,
) -> Path:
    """Write the tiny checkpoint to `out_dir`, or return at once when the same one is already there.

    `pattern` names the layers as NemotronH does: `*` attention, `-` MLP, `M` Mamba, `E` mixture of experts.
    Equal arguments give equal bytes. The directory appears complete or not at all.

    Raises ValueError for a bad argument, or when `out_dir` holds anything but a tiny checkpoint.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype: expected 'float32' or 'bfloat16', found {dtype!r}")
    unknown = sorted(set(pattern) - set(_LAYER_KINDS))
    if unknown or not pattern:
        raise ValueError(f"pattern {pattern!r}: expected layers out of {_LAYER_KINDS}")
    if not 4 <= min_num_patches <= max_num_patches:
        raise ValueError(
            f"expected 4 <= min_num_patches <= max_num_patches, found {min_num_patches}, {max_num_patches}"
        )
    out_dir = Path(out_dir)
    stamp = {
        "format": _FORMAT,
        "seed": seed,
        "dtype": dtype,
        "pattern": pattern,
        "min_num_patches": min_num_patches,
        "max_num_patches": max_num_patches,
        "transformers": version("transformers"),
        "torch": version("torch"),
    }
    if _has_stamp(out_dir, stamp):
        return out_dir
    if out_dir.exists() and not (out_dir / _STAMP).is_file() and any(out_dir.iterdir()):
        raise ValueError(
            f"{out_dir} exists and is not a tiny checkpoint; remove it or choose another directory"
        )
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        write_tiny_model(
            fresh,
            seed=seed,
            dtype=dtype,
            pattern=pattern,
            min_num_patches=min_num_patches,
            max_num_patches=max_num_patches,
        )
        (fresh / _STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
        if out_dir.exists():
            out_dir.rename(scratch / "old")
        try:
            fresh.rename(out_dir)
        except OSError:
            # Another process built it meanwhile; only an equal one will do.
            if not _has_stamp(out_dir, stamp):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("built tiny checkpoint %s (pattern %s, %s, seed %d)", out_dir, pattern, dtype, seed)
    return out_dir


def _has_stamp(path: Path, stamp: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads((path / _STAMP).read_text(encoding="utf-8")) == dict(stamp))
    except (OSError, ValueError):
        return False
