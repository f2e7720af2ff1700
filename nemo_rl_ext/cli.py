# SPDX-License-Identifier: Apache-2.0
"""The command ``nemo-rl-ext``: registers each area's command, and turns exceptions into exit codes.

Exit codes: 0 done, 1 unexpected error, 2 the user's fault (usage, configuration, input files), 130 Ctrl-C,
143 SIGTERM.
A command may end with a code of its own through ``typer.Exit``. The options given before the command reach it
as ``ctx.obj`` (``CommonOptions``) when it takes a ``typer.Context``.
"""

import importlib
import json
import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.logging import RichHandler

from nemo_rl_ext.versions import installed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Command:
    """Where a command's function lives, and an invocation that its ``--help`` shows."""

    name: str
    function: str
    example: str
    # Everything after the first argument belongs to another program and is handed on as it stands.
    passes_through: bool = False


COMMANDS = (
    Command(
        name="grpo",
        function="nemo_rl_ext.grpo.command:grpo",
        example="nemo-rl-ext grpo --config configs/embedded_async.yaml grpo.max_num_steps=20",
    ),
    Command(
        name="check",
        function="nemo_rl_ext.manifest.command:check",
        example="nemo-rl-ext check manifest.jsonl",
    ),
    Command(
        name="census",
        function="nemo_rl_ext.manifest.census_command:census",
        example="nemo-rl-ext census data/*.jsonl",
    ),
    Command(
        name="fit",
        function="nemo_rl_ext.manifest.fit_command:fit",
        example="nemo-rl-ext fit manifest.jsonl fitted --model CHECKPOINT --max-model-len 16384",
    ),
    Command(
        name="pin",
        function="nemo_rl_ext.models.command:pin",
        example="nemo-rl-ext pin CHECKPOINT PINNED --max-num-patches 8190",
    ),
    Command(
        name="inspect",
        function="nemo_rl_ext.report.command:inspect",
        example="nemo-rl-ext inspect rollouts.jsonl --model CHECKPOINT",
    ),
    Command(
        name="report",
        function="nemo_rl_ext.report.command:report",
        example="nemo-rl-ext report runs/demo",
    ),
    Command(
        name="distill",
        function="nemo_rl_ext.distill.command:distill",
        example="nemo-rl-ext distill --student DIR --teacher DIR --sft --sft-dataset-root DATA",
    ),
    Command(
        name="launch",
        function="nemo_rl_ext.integration.command:launch",
        example="nemo-rl-ext launch examples/nemo_gym/run_grpo_nemo_gym.py --config recipe.yaml",
        passes_through=True,
    ),
)
ENGINE_MODULES = {
    "torch",
    "ray",
    "vllm",
    "transformers",
    "accelerate",
    "safetensors",
    "tensorboard",
    "cv2",
}


@dataclass(kw_only=True)
class CommonOptions:
    """Options given before the command."""

    debug: bool = False
    quiet: bool = False
    log_format: Literal["text", "json"] = "text"


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(options: CommonOptions) -> None:
    """Send ``nemo_rl_ext.*`` to stderr in the chosen format; quiet keeps warnings and errors only."""
    if options.log_format == "json":
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
    else:
        handler = RichHandler(console=Console(stderr=True), show_path=options.debug, log_time_format="[%X]")
    package = logging.getLogger("nemo_rl_ext")
    package.handlers = [handler]
    package.propagate = False
    package.setLevel(logging.DEBUG if options.debug else logging.WARNING if options.quiet else logging.INFO)


def versions() -> str:
    """One line per component: this package, then what is installed of what it works with."""
    return "\n".join(f"{name} {version}" for name, version in installed().items())


def load_command(function: str) -> Callable[..., Any] | None:
    """The function that ``module:name`` names; None when this installation has no such module."""
    module, _, name = function.partition(":")
    try:
        present = find_spec(module) is not None
    except ModuleNotFoundError as error:
        # A missing parent package is an absent area; anything else missing is a fault that must show.
        if not module.startswith(f"{error.name}."):
            raise
        present = False
    return getattr(importlib.import_module(module), name) if present else None


def build_app() -> typer.Typer:
    """The Typer application with every command that this installation has."""
    app = typer.Typer(
        name="nemo-rl-ext",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    registered = [(command, load_command(command.function)) for command in COMMANDS]
    examples = [command.example for command, function in registered if function is not None]
    app.callback(epilog=_as_epilog(examples))(_common_options)
    for command, function in registered:
        if function is not None:
            settings = {"allow_interspersed_args": False, "ignore_unknown_options": True}
            app.command(
                command.name,
                epilog=_as_epilog([command.example]),
                context_settings=settings if command.passes_through else None,
            )(function)
    return app


def _as_epilog(examples: list[str]) -> str:
    # A blank line between them, or rich joins the lines of a paragraph.
    return "\n\n".join(["Examples:" if len(examples) > 1 else "Example:", *examples])


def _show_versions(value: bool) -> None:
    if value:
        print(versions())
        raise typer.Exit()


def _common_options(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and results.")] = False,
    log_format: Annotated[
        Literal["text", "json"], typer.Option("--log-format", help="How log lines on stderr look.")
    ] = "text",
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_versions, is_eager=True, help="Show versions and exit."),
    ] = False,
) -> None:
    """Keep what a VLM policy trains on equal to what it saw while it generated."""
    options = ctx.ensure_object(CommonOptions)
    options.debug, options.quiet, options.log_format = debug, quiet, log_format
    configure_logging(options)


def main() -> None:
    """Entry point of ``nemo-rl-ext``."""
    options = CommonOptions()
    try:
        build_app()(obj=options)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        sys.exit(report_error(error, options))


def report_error(error: Exception, options: CommonOptions) -> int:
    """Print an exception as one message, with its traceback under ``--debug``; return the exit code."""
    if options.debug:
        traceback.print_exception(error)
    # Ray wraps what a task raised into an error whose text is the remote traceback.
    cause = getattr(error, "cause", None)
    fault = cause if isinstance(cause, Exception) else error
    message = str(fault) or type(fault).__name__
    if isinstance(fault, ValueError | OSError):
        _print_error(message, options)
        return 2
    if isinstance(fault, ImportError) and (fault.name or "").partition(".")[0] in ENGINE_MODULES:
        message += "; install the engine with `pip install 'nemo-rl-ext[engine]'`"
    else:
        message = f"{type(fault).__name__}: {message}"
    if not options.debug:
        message += "\nrun `nemo-rl-ext --debug ...` for the traceback"
    _print_error(message, options)
    return 1


def _print_error(message: str, options: CommonOptions) -> None:
    if options.log_format == "json":
        logger.error(message)
    else:
        print(f"error: {message}", file=sys.stderr)
