# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-ext grpo`: the embedded run."""

from pathlib import Path
from typing import Annotated

import typer


def grpo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file.")
    ] = None,
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML configuration.")] = Path(
        "configs/embedded_async.yaml"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
) -> None:
    """Train a VLM with async GRPO on this machine, every turn's media aligned with its rollout."""
    from nemo_rl_ext.grpo.config import load_config

    loaded = load_config(config, overrides or [])

    from nemo_rl_ext.grpo.loop import run_grpo

    run_grpo(loaded, resume=resume)
