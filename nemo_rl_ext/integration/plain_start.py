# SPDX-License-Identifier: Apache-2.0
"""The flag in a script that was not started by the launcher: taken up when the script loads its recipe, or refused.

`nemo_rl_ext/integration/autostart` on PYTHONPATH leads here. A script that has imported NeMo-RL by then holds some
functions under names of its own, which are replaced there, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from nemo_rl_ext.integration.launch import install_if_asked
from nemo_rl_ext.integration.probe import UnknownNemoRLError
from nemo_rl_ext.integration.script_recipe import complete_overrides, read_recipe
from nemo_rl_ext.integration.settings import BLOCK, RecipeError

_HELD_BY_SCRIPTS = (
    ("nemo_rl.algorithms.utils", "get_tokenizer"),
    ("nemo_rl.environments.nemo_gym", "setup_nemo_gym_config"),
)


def watch_recipe(config: Any) -> None:
    """Replace the loader and the override parser of `nemo_rl.utils.config`, given as the module.

    The first recipe that the driver's script loads decides, as its command line says; overrides of the block need no
    `++`.
    """
    load, parse = config.load_config, config.parse_hydra_overrides
    decided = False

    def load_config(*args: Any, **options: Any) -> Any:
        nonlocal decided
        if not decided:
            decided = True
            _decide(sys.argv[1:])
        return load(*args, **options)

    def parse_hydra_overrides(recipe: Any, overrides: Sequence[str], *args: Any, **options: Any) -> Any:
        return parse(recipe, complete_overrides(overrides), *args, **options)

    config.load_config, config.parse_hydra_overrides = load_config, parse_hydra_overrides


def _decide(arguments: Sequence[str]) -> None:
    if not any(word == "--config" or word.startswith("--config=") or BLOCK in word for word in arguments):
        return
    originals = {name: getattr(sys.modules.get(module), name, None) for module, name in _HELD_BY_SCRIPTS}
    try:
        if not install_if_asked(read_recipe(arguments)):
            return
    except (RecipeError, UnknownNemoRLError) as error:
        sys.exit(f"error: {error}")
    script = vars(sys.modules["__main__"])
    for module, name in _HELD_BY_SCRIPTS:
        if originals[name] is not None and script.get(name) is originals[name]:
            script[name] = getattr(sys.modules[module], name)
