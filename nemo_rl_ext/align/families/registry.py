# SPDX-License-Identifier: Apache-2.0
"""Which family a checkpoint or a processor is of. The only list of families there is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from nemo_rl_ext.align.families import internvl, nemotron, qwen_vl
from nemo_rl_ext.align.families.checkpoint import read_json
from nemo_rl_ext.align.families.family import Layout, MediaFamily


class FamilyModule(Protocol):
    """What a family's file offers: the names it goes by, and two ways to make it."""

    MODEL_TYPES: tuple[str, ...]
    """`model_type` of its configurations."""
    ARCHITECTURES: tuple[str, ...]
    """`architectures` of its checkpoints, for those that name a `model_type` of their own."""

    LIMIT_PLACES: tuple[Mapping[str, tuple[tuple[str, ...], ...]], ...]
    """Per side that reads a limit of its own, the files that may hold the images' limit, and the paths to it there."""

    def recognises(self, processor: Any) -> bool: ...
    def disagreement(self, model_dir: Path) -> str: ...
    def from_pretrained(
        self, model_dir: str | Path, *, layout: Layout, dtype: torch.dtype
    ) -> MediaFamily: ...
    def from_processor(self, processor: Any, *, layout: Layout, dtype: torch.dtype) -> MediaFamily: ...


FAMILIES: tuple[FamilyModule, ...] = (
    cast(FamilyModule, nemotron),
    cast(FamilyModule, qwen_vl),
    cast(FamilyModule, internvl),
)


def family_of(
    checkpoint_or_processor: str | Path | Any,
    *,
    layout: Layout = Layout.REMOTE,
    dtype: torch.dtype = torch.float32,
) -> MediaFamily:
    """The media family of a checkpoint directory, by its `model_type`, or of a live transformers processor.

    Tensors are made in `layout`, where the family knows several, and in `dtype`.

    Raises:
        ValueError: for a family that is not known, naming it and those that are; for a file that is missing or lacks
            a value, naming both.
    """
    if isinstance(checkpoint_or_processor, (str, Path)):
        model_dir = Path(checkpoint_or_processor)
        return _module_of(model_dir).from_pretrained(model_dir, layout=layout, dtype=dtype)
    for module in FAMILIES:
        if module.recognises(checkpoint_or_processor):
            return module.from_processor(checkpoint_or_processor, layout=layout, dtype=dtype)
    raise ValueError(_refusal(type(checkpoint_or_processor).__name__, "a processor"))


def default_family(**limits: Any) -> MediaFamily:
    """The family that numbers are taken for where no checkpoint is at hand, with the released limits or these."""
    return nemotron.sized_family(**limits)


def limit_places(model_dir: Path) -> tuple[Mapping[str, tuple[tuple[str, ...], ...]], ...]:
    """Where a checkpoint keeps the limit of its images: per side that reads one, files and the paths to it there."""
    return _module_of(model_dir).LIMIT_PLACES


def disagreement(model_dir: Path) -> str:
    """What engine and trainer read differently of a checkpoint's limits; empty where they agree."""
    return _module_of(model_dir).disagreement(model_dir)


def known_model_types() -> tuple[str, ...]:
    """Every `model_type` that `family_of` takes, sorted."""
    return tuple(sorted(name for module in FAMILIES for name in module.MODEL_TYPES))


def known_architectures() -> tuple[str, ...]:
    """Every entry of `architectures` that a known family's checkpoint may have."""
    return tuple(name for module in FAMILIES for name in module.ARCHITECTURES)


def _module_of(model_dir: Path) -> FamilyModule:
    if not model_dir.is_dir():
        raise ValueError(f"{model_dir} is not a directory; a checkpoint directory is expected")
    config = read_json(model_dir / "config.json")
    model_type, architectures = str(config.get("model_type", "")), config.get("architectures") or ()
    for module in FAMILIES:
        if model_type in module.MODEL_TYPES or any(name in module.ARCHITECTURES for name in architectures):
            return module
    raise ValueError(_refusal(model_type or "no model_type", str(model_dir / "config.json")))


def _refusal(found: str, where: str) -> str:
    return (
        f"{where}: media of the family {found!r} cannot be aligned; the known ones are "
        f"{', '.join(known_model_types())}"
    )
