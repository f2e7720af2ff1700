# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-ext grpo`: the embedded run, and its report when it ends."""

import logging
from pathlib import Path
from typing import Annotated

import typer

logger = logging.getLogger(__name__)


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

    from rich.console import Console

    from nemo_rl_ext.grpo.loop import run_grpo

    console = Console()

    def report() -> None:
        """Write the run's page; a fault of the page must never hide what ended the run."""
        from nemo_rl_ext.report.page import write_report

        try:
            console.print(f"report: {write_report(loaded.logger.log_dir)}", highlight=False, soft_wrap=True)
        except ValueError as error:
            logger.warning("no report was written: %s", error)

    run_grpo(loaded, resume=resume, console=console, at_end=report if loaded.logger.report_enabled else None)
