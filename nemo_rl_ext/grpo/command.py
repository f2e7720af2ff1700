# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-ext grpo`: the embedded run, and its report when it ends."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nemo_rl_ext.grpo.config import Config

logger = logging.getLogger(__name__)


def grpo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file.")
    ] = None,
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML configuration.")] = Path(
        "configs/embedded_async.yaml"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run that logger.log_dir holds and start over.")
    ] = False,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="With --resume: take on settings that make it another run."),
    ] = False,
) -> None:
    """Train a VLM with async GRPO on this machine, every turn's media aligned with its rollout."""
    from nemo_rl_ext.grpo.config import load_config
    from nemo_rl_ext.grpo.termination import EXIT_CODE, Terminated, raise_on_sigterm

    raise_on_sigterm()
    loaded = load_config(config, overrides or [])
    try:
        _run(loaded, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
    except Terminated:
        raise typer.Exit(EXIT_CODE) from None


def _run(config: "Config", *, resume: bool, overwrite: bool, allow_changes: bool) -> None:
    from rich.console import Console

    from nemo_rl_ext.grpo.loop import run_grpo

    console = Console()

    def report() -> None:
        """Write the run's page; a fault of the page must never hide what ended the run."""
        from nemo_rl_ext.report.page import write_report

        try:
            console.print(f"report: {write_report(config.logger.log_dir)}", highlight=False, soft_wrap=True)
        except Exception as error:
            logger.warning("no report was written: %s", error)

    run_grpo(
        config,
        resume=resume,
        overwrite=overwrite,
        allow_changes=allow_changes,
        console=console,
        at_end=report if config.logger.report_enabled else None,
    )
