# SPDX-License-Identifier: Apache-2.0
"""The limits of an image's patches in a checkpoint, which the engine and the trainer read from different files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_ext.align.families.checkpoint import read_json
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.grids import RESERVED_TOKENS, DynamicTiler

_LIMITS = ("min_num_patches", "max_num_patches")
_ENGINE_ALONE = ("vision_config", "patch_size", "downsample_ratio")
"""Keys of config.json from which the engine takes its arithmetic, and which `hf_overrides` may replace."""


def shared_limits(checkpoint: str | Path) -> DynamicTiler:
    """The arithmetic of a checkpoint's images, with limits that are equal in all of its files.

    Raises:
        ValueError: for a checkpoint whose images are not limited in patches, or whose files disagree.
    """
    checkpoint = Path(checkpoint)
    tiler = getattr(family_of(checkpoint), "tiler", None)
    if not isinstance(tiler, DynamicTiler):
        raise ValueError(
            f"{checkpoint}: its images are not limited in patches that share a context, so that there is nothing to pin"
        )
    args = (read_json(checkpoint / "config.json").get("vision_config") or {}).get("args") or {}
    for key in _LIMITS:
        trainer = getattr(tiler, key)
        if (args.get(key) or 0) != trainer and key in args:
            raise ValueError(
                f"{checkpoint}: engine and trainer disagree: config.json has {key} {args[key]}, the image processor "
                f"{trainer}; correct the checkpoint first"
            )
    return tiler


def run_limits(
    model: str | Path, *, processor: str | Path | None = None, hf_overrides: Mapping[str, Any] | None = None
) -> DynamicTiler:
    """The arithmetic of a run whose engine and trainer size an image alike when it is alone.

    `processor`: the directory that the trainer's processor comes from, where it is another one.

    Raises:
        ValueError: where they do not, naming what differs.
    """
    replaced = [key for key in _ENGINE_ALONE if key in (hf_overrides or {})]
    if replaced:
        raise ValueError(
            f"hf_overrides.{replaced[0]} reaches the engine alone, so that its limits are not the trainer's; change "
            "the checkpoint instead, as `nemo-rl-ext pin` does"
        )
    tiler, family = shared_limits(model), family_of(processor or model)
    trainer = getattr(family, "tiler", None)
    if trainer != tiler:
        raise ValueError(
            f"the engine sizes images as {model} says, {tiler}, and the trainer as {processor} says, {trainer}; give "
            "both one directory"
        )
    # Nemotron's training processor may cap an image by a context length of its own.
    own = getattr(family, "processor_max_model_len", 0)
    cap = tiler.merge_size**2 * (own - RESERVED_TOKENS)
    if own and not 0 < tiler.max_num_patches <= cap:
        raise ValueError(
            f"{processor or model}: the image processor's max_model_len {own} caps an image at {cap} patches, the "
            f"engine at max_num_patches {tiler.max_num_patches}; raise that max_model_len, or pin max_num_patches to "
            f"{cap} at most"
        )
    return tiler
