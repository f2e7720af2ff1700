# SPDX-License-Identifier: Apache-2.0
"""`python -m nemo_rl_ext.launch SCRIPT --config RECIPE [key=value ...]`: a NeMo-RL script, with one flag understood.

The script runs unchanged, as `__main__`. Whether anything is installed first depends on
`grpo.media_alignment.enabled` in the recipe and its overrides alone.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_ext.integration.probe import UnknownNemoRLError, probe
from nemo_rl_ext.integration.script_recipe import complete_overrides, read_recipe
from nemo_rl_ext.integration.settings import RecipeError, settings_of

logger = logging.getLogger(__name__)


def run(script: str, arguments: Sequence[str]) -> None:
    """Run a NeMo-RL script with its own arguments.

    Raises:
        RecipeError: for a recipe that cannot run as it is.
        UnknownNemoRLError: when the recipe asks for alignment and NeMo-RL is not what the hooks know.
    """
    path = Path(script)
    if not path.is_file():
        raise RecipeError(
            f"{script} is not a file; name a script of NeMo-RL, as examples/nemo_gym/run_grpo_nemo_gym.py"
        )
    arguments = complete_overrides(arguments)
    install_if_asked(read_recipe(arguments))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(script, run_name="__main__")


def install_if_asked(recipe: Any) -> bool:
    """Check a recipe and bind the driver's names, where the recipe sets the flag; returns whether it does.

    Raises:
        RecipeError: for a recipe that cannot run as it is.
        UnknownNemoRLError: when NeMo-RL is not what the hooks know.
    """
    if not settings_of(recipe).enabled:
        return False
    from nemo_rl_ext.integration.known_processor import check_checkpoint
    from nemo_rl_ext.integration.recipe_checks import check_recipe, comes_through_gym

    check_recipe(recipe)
    through_gym = comes_through_gym(recipe)
    if through_gym:
        check_checkpoint(recipe)
    found = probe()
    logger.info("NeMo-RL in %s, which calls itself %s, is known", found.root, found.version)
    share_with_workers()
    if not through_gym:
        from nemo_rl_ext.integration.comparison_install import install_comparison

        install_comparison()
        return True
    from nemo_rl_ext.integration.install import install_driver

    install_driver()
    return True


def share_with_workers() -> None:
    """Put this package on `PYTHONPATH`, which NeMo-RL hands to every actor and which survives `uv sync`.

    From a `site-packages` directory only the package itself is shared, through a link: the rest of that directory
    belongs to this environment and not to the actors'.
    """
    package = Path(__file__).resolve().parents[1]
    shared = package.parent
    if shared.name in ("site-packages", "dist-packages"):
        shared = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nemo-rl-ext" / "path"
        shared.mkdir(parents=True, exist_ok=True)
        link = shared / package.name
        if not link.exists() or link.resolve() != package:
            fresh = shared / f".{package.name}.{os.getpid()}"
            fresh.symlink_to(package)
            fresh.replace(link)
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(shared) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join((str(shared), *paths))


def main() -> None:
    """Entry point of `python -m nemo_rl_ext.launch`."""
    logging.basicConfig(level=logging.INFO)
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip(), file=sys.stdout if len(sys.argv) > 1 else sys.stderr)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    try:
        run(sys.argv[1], sys.argv[2:])
    except (RecipeError, UnknownNemoRLError) as error:
        sys.exit(f"error: {error}")
