# SPDX-License-Identifier: Apache-2.0
"""The recipe that a script's command line names, read before the script reads it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from nemo_rl_ext.integration.probe import find_root
from nemo_rl_ext.integration.settings import BLOCK, RecipeError, settings_of


def complete_overrides(arguments: Sequence[str]) -> list[str]:
    """The arguments with `++` before overrides of this package's block: no recipe of NeMo-RL's own has its keys."""
    return [f"++{word}" if word.startswith((f"{BLOCK}.", f"{BLOCK}=")) else word for word in arguments]


def read_recipe(arguments: Sequence[str]) -> Any:
    """The recipe as the script will read it: NeMo-RL's own loader and override syntax.

    Without `--config` a script falls back to a recipe of its own, which knows nothing of this package: then only the
    overrides count.

    Raises:
        UnknownNemoRLError: when NeMo-RL is not on the import path.
    """
    find_root()
    from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config")
    known, overrides = parser.parse_known_args(list(arguments))
    if known.config is None:
        overrides = [word for word in overrides if BLOCK in word]
        return (
            parse_hydra_overrides(OmegaConf.create({"grpo": {}}), overrides)
            if overrides
            else OmegaConf.create({})
        )
    register_omegaconf_resolvers()
    recipe = load_config(known.config)
    if overrides:
        recipe = parse_hydra_overrides(recipe, overrides)
    OmegaConf.set_struct(recipe, False)
    return recipe


def require_hooks() -> None:
    """Stop a run that sets the flag and never bound anything: called where a data set of this package is made.

    Raises:
        RecipeError: naming the ways to start such a recipe.
    """
    # Loads torch, which a run without the flag is spared.
    from nemo_rl_ext.integration.in_process import driver_is_bound

    arguments = sys.argv[1:]
    if driver_is_bound() or not any(word.startswith("--config") or BLOCK in word for word in arguments):
        return
    if settings_of(read_recipe(arguments)).enabled:
        raise RecipeError(
            f"{BLOCK}.enabled is set, but this script was started without nemo_rl_ext: nothing would be aligned. Start "
            "it with `python -m nemo_rl_ext.launch SCRIPT ...`, or put nemo_rl_ext/integration/autostart on PYTHONPATH"
        )
