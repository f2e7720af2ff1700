# SPDX-License-Identifier: Apache-2.0
"""The limits of images in a checkpoint, which the engine and the trainer may read from different files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_ext.align.families.registry import disagreement, family_of
from nemo_rl_ext.align.sizer import Sizer

_ENGINE_ALONE = (
    "vision_config",
    "patch_size",
    "downsample_ratio",
    "force_image_size",
    "max_dynamic_patch",
    "min_dynamic_patch",
    "dynamic_image_size",
    "use_thumbnail",
)
"""Keys of config.json from which an engine takes its arithmetic, and which `hf_overrides` may replace."""


def shared_limits(checkpoint: str | Path) -> Sizer:
    """The arithmetic of a checkpoint's images, with limits that are equal in all of its files.

    Raises:
        ValueError: for a family that is not known, or a checkpoint whose files disagree.
    """
    if problem := disagreement(Path(checkpoint)):
        raise ValueError(
            f"{checkpoint}: engine and trainer disagree: {problem}; correct the checkpoint first"
        )
    return family_of(checkpoint).sizer


def run_limits(
    model: str | Path,
    *,
    processor: str | Path | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Sizer:
    """The arithmetic of a run whose engine and trainer size an image alike when it is alone.

    `processor`: the directory that the trainer's processor comes from, where it is another one. `arguments`: the
    engine's `mm_processor_kwargs`.

    Raises:
        ValueError: where they do not, naming what differs.
    """
    replaced = [key for key in _ENGINE_ALONE if key in (hf_overrides or {})]
    if replaced:
        raise ValueError(
            f"hf_overrides.{replaced[0]} reaches the engine alone, so that its limits are not the trainer's; change "
            "the checkpoint instead, as `nemo-rl-ext pin` does"
        )
    sizer, family = shared_limits(model), family_of(processor or model)
    trainer = family.sizer
    if trainer != sizer:
        raise ValueError(
            f"the engine sizes images as {model} says, {sizer}, and the trainer as {processor} says, {trainer}; give "
            "both one directory"
        )
    served = family_of(model).served_with(arguments).sizer if arguments else sizer
    if served != sizer:
        smaller = max(min(served.limit, sizer.limit), sizer.least_limit)
        raise ValueError(
            f"mm_processor_kwargs {dict(arguments or {})} reach the engine alone: its {served.limit_name} is "
            f"{served.limit}, the trainer's {sizer.limit}; leave them out, and pin {served.limit_name} to the smaller "
            f"of the two, {smaller}, with `nemo-rl-ext pin`"
        )
    # A training processor may cap an image by a context length of its own.
    own = getattr(family, "processor_max_model_len", 0)
    cap = sizer.merge_size**2 * (own - sizer.reserved_tokens)
    if own and not 0 < sizer.limit <= cap:
        raise ValueError(
            f"{processor or model}: the image processor's max_model_len {own} caps an image at {cap} patches, the "
            f"engine at {sizer.limit_name} {sizer.limit}; raise that max_model_len, or pin {sizer.limit_name} to {cap} "
            "at most"
        )
    return sizer
