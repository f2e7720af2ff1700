# SPDX-License-Identifier: Apache-2.0
"""Is it known how the engine expands media for this checkpoint? Answered before an actor starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_rl_ext.integration.settings import BLOCK, RecipeError, pick

_NEEDED = ("patch_size", "min_num_patches", "max_num_patches")


def check_checkpoint(config: Any) -> None:
    """Refuse a recipe whose checkpoint is on this machine and does not size images by patches.

    Raises:
        RecipeError: naming the processor and what it lacks.
    """
    name = pick(config, "policy.tokenizer.name") or pick(config, "policy.model_name")
    path = Path(str(name)) / "preprocessor_config.json"
    if not path.is_file():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    _refuse(found.get("processor_class") or str(name), [key for key in _NEEDED if key not in found])


def check_processor(processor: Any) -> None:
    """Refuse a loaded processor that does not size images by patches.

    Raises:
        RecipeError: naming the processor and what it lacks.
    """
    images = getattr(processor, "image_processor", None)
    _refuse(type(processor).__name__, [key for key in _NEEDED if not hasattr(images, key)])


def _refuse(name: str, missing: list[str]) -> None:
    if missing:
        raise RecipeError(
            f"{name} has no {', '.join(missing)}: {BLOCK} aligns Nemotron checkpoints with dynamic resolution, whose "
            "images are sized by patches, and does not know how many tokens the engine gives this one's (fixed tiles, "
            "or another family). Use such a checkpoint, or switch the block off"
        )
