# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-ext grpo`: the embedded run, and its report when it ends."""

import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nemo_rl_ext.grpo.config import Config

logger = logging.getLogger(__name__)


Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file.")
]


def grpo(
    overrides: Overrides = None,
    config: Annotated[
        Path,
        typer.Option("--config", "-c", help="YAML configuration; configs/... are found in the package, too."),
    ] = Path("configs/embedded_async.yaml"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run that logger.log_dir holds and start over.")
    ] = False,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="With --resume: take on settings that make it another run."),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every setting as YAML, defaults included, and exit.")
    ] = False,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, show the first prompts, forecast tokens and memory; start no engine.",
        ),
    ] = False,
) -> None:
    """Train a VLM with async GRPO on this machine, every turn's media aligned with its rollout."""
    from nemo_rl_ext.config.shipped import config_path
    from nemo_rl_ext.grpo.config import load_config

    loaded = load_config(config_path(config), overrides or [])
    if print_config:
        typer.echo(loaded.to_yaml(), nl=False)
        return
    if dry:
        from rich.console import Console

        from nemo_rl_ext.grpo.dry_run import dry_run

        choices = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
        if not dry_run(loaded, **choices, console=Console()):
            raise typer.Exit(1)
        return
    _end_as_asked(loaded, resume=resume, overwrite=overwrite, allow_changes=allow_changes)


def demo(overrides: Overrides = None) -> None:
    """Train a tiny VLM on this machine: the demo, in a directory of its own (runs/demo, runs/demo-2, ...)."""
    from nemo_rl_ext.config.shipped import EMBEDDED
    from nemo_rl_ext.grpo.config import load_config

    given = overrides or []
    if not any(override.lstrip("+").startswith("logger.log_dir=") for override in given):
        given = [f"logger.log_dir={_unused(Path('runs/demo'))}", *given]
    _end_as_asked(load_config(EMBEDDED, given), resume=False, overwrite=False, allow_changes=False)


def _unused(path: Path) -> Path:
    """The path, or the first of `path-2`, `path-3`, ... where nothing lies."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    )
    return next(place for place in names if not (place.exists() and any(place.iterdir())))


def _end_as_asked(config: "Config", *, resume: bool, overwrite: bool, allow_changes: bool) -> None:
    """Run; SIGTERM ends with its own code."""
    from nemo_rl_ext.disk import require_home
    from nemo_rl_ext.grpo.termination import EXIT_CODE, Terminated, raise_on_sigterm

    # Before anything is imported that looks for its caches.
    require_home()
    raise_on_sigterm()
    try:
        _run(config, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
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
