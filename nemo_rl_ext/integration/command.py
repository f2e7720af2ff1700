# SPDX-License-Identifier: Apache-2.0
"""The command ``nemo-rl-ext launch``."""

from __future__ import annotations

from typing import Annotated

import typer


def launch(
    script: Annotated[str, typer.Argument(help="NeMo-RL script, as examples/nemo_gym/run_grpo_nemo_gym.py.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGUMENTS]...", help="The script's own: --config FILE and key=value overrides."
        ),
    ] = None,
) -> None:
    """Run a NeMo-RL script, with media alignment where its recipe asks for it."""
    from nemo_rl_ext.integration.launch import run

    run(script, arguments or [])
