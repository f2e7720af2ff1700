# SPDX-License-Identifier: Apache-2.0
"""The command ``nemo-rl-ext``: registers each area's command, and turns exceptions into exit codes.

Exit codes: 0 done, 1 unexpected error, 2 the user's fault (usage, configuration, input files), 130 Ctrl-C,
143 SIGTERM.
A command may end with a code of its own through ``typer.Exit``. The common options stand before the command or after
it, and reach it as ``ctx.obj`` (``CommonOptions``) when it takes a ``typer.Context``.
"""

import errno
import importlib
import itertools
import json
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.logging import RichHandler

from nemo_rl_ext import cpu_wheels
from nemo_rl_ext.versions import installed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Command:
    """Where a command's function lives, its line in the list of commands, and an invocation that ``--help`` shows."""

    name: str
    summary: str
    function: str
    example: str
    # Everything after the first argument belongs to another program and is handed on as it stands.
    passes_through: bool = False


COMMANDS = (
    Command(
        name="grpo",
        summary="Train a VLM with async GRPO on this machine.",
        function="nemo_rl_ext.grpo.command:grpo",
        example="nemo-rl-ext grpo --config configs/embedded_async.yaml grpo.max_num_steps=20",
    ),
    Command(
        name="demo",
        summary="Run the demo, a tiny VLM, in a directory of its own.",
        function="nemo_rl_ext.grpo.command:demo",
        example="nemo-rl-ext demo",
    ),
    Command(
        name="check",
        summary="Validate a manifest; forecast runs and re-sized images.",
        function="nemo_rl_ext.manifest.command:check",
        example="nemo-rl-ext check manifest.jsonl",
    ),
    Command(
        name="census",
        summary="Find literal media markers such as <image> in data files.",
        function="nemo_rl_ext.manifest.census_command:census",
        example="nemo-rl-ext census data/*.jsonl",
    ),
    Command(
        name="fit",
        summary="Re-size a manifest's images once, so that no engine does.",
        function="nemo_rl_ext.manifest.fit_command:fit",
        example="nemo-rl-ext fit manifest.jsonl OUT --model CHECKPOINT --max-model-len 16384",
    ),
    Command(
        name="pin",
        summary="Limit images to fewer patches, for engine and trainer.",
        function="nemo_rl_ext.models.command:pin",
        example="nemo-rl-ext pin CHECKPOINT PINNED --max-num-patches 8190",
    ),
    Command(
        name="size",
        summary="Cores, memory and network that alignment takes per step.",
        function="nemo_rl_ext.rollout.command:size",
        example="nemo-rl-ext size CHECKPOINT --prompts 64,256 --gpus 8,64",
    ),
    Command(
        name="inspect",
        summary="Check stored rollouts against their media.",
        function="nemo_rl_ext.report.command:inspect",
        example="nemo-rl-ext inspect rollouts.jsonl --model CHECKPOINT",
    ),
    Command(
        name="report",
        summary="Write a run's report, one HTML file.",
        function="nemo_rl_ext.report.command:report",
        example="nemo-rl-ext report runs/demo",
    ),
    Command(
        name="distill",
        summary="Distil a teacher into a student on prompt/response pairs.",
        function="nemo_rl_ext.distill.command:distill",
        example="nemo-rl-ext distill --student DIR --teacher DIR --sft --sft-dataset-root DIR",
    ),
    Command(
        name="launch",
        summary="Run a NeMo-RL script with media alignment.",
        function="nemo_rl_ext.integration.command:launch",
        example="nemo-rl-ext launch run_grpo_nemo_gym.py --config recipe.yaml",
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
    """Options of every command."""

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
        # Rich's tables cut long option names on a terminal of 80 columns.
        rich_markup_mode=None,
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
                short_help=command.summary,
                epilog=_as_epilog([command.example]),
                context_settings=settings if command.passes_through else None,
            )(function)
    return app


def _as_epilog(examples: list[str]) -> str:
    # \b keeps the lines of a paragraph apart.
    lines = "\n".join(f"  {example}" for example in examples)
    return (
        f"\b\n{'Examples' if len(examples) > 1 else 'Example'}:\n{lines}\n\n"
        "--debug, --quiet (-q) and --log-format stand before the command or after it."
    )


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
    cpu_wheels.activate()
    options = CommonOptions()
    try:
        build_app()(hoisted(sys.argv[1:]), obj=options)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        sys.exit(report_error(error, options))


def hoisted(arguments: Sequence[str]) -> list[str]:
    """The arguments with the common options that follow the command moved before it.

    What follows `--`, or a command that hands its arguments on, stays as it stands.
    """
    names = [command.name for command in COMMANDS]
    place = next((index for index, argument in enumerate(arguments) if argument in names), len(arguments))
    command = COMMANDS[names.index(arguments[place])] if place < len(arguments) else None
    if command is None or command.passes_through:
        return list(arguments)
    common, own = list(arguments[:place]), [arguments[place]]
    rest = iter(arguments[place + 1 :])
    for argument in rest:
        if argument == "--":
            own += [argument, *rest]
        elif argument in ("--debug", "--quiet", "-q") or argument.startswith("--log-format="):
            common.append(argument)
        elif argument == "--log-format":
            common += [argument, *itertools.islice(rest, 1)]
        else:
            own.append(argument)
    return common + own


def report_error(error: Exception, options: CommonOptions) -> int:
    """Print an exception as one message, with its traceback under ``--debug``; return the exit code."""
    if options.debug:
        traceback.print_exception(error)
    # Ray wraps what a task raised into an error whose text is the remote traceback.
    cause = getattr(error, "cause", None)
    fault = cause if isinstance(cause, Exception) else error
    message = (of_the_system(fault) if isinstance(fault, OSError) else str(fault)) or type(fault).__name__
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


_ADVICE = {
    errno.EACCES: "give this user the right to it, or name another place",
    errno.EDQUOT: "free space there, or name another place",
    errno.EISDIR: "name a file",
    errno.ENOENT: "look for a typing error; relative paths start in the current directory",
    errno.ENOSPC: "free space there, or name another place",
    errno.ENOTDIR: "a part of this path is a file",
    errno.EROFS: "name a place that can be written to",
}


def of_the_system(error: OSError) -> str:
    """What the operating system refused: the path, its words, and what to do, without `[Errno]`."""
    if error.errno is None or error.strerror is None:
        return str(error)
    paths = " -> ".join(str(path) for path in (error.filename, error.filename2) if path is not None)
    said = error.strerror[:1].lower() + error.strerror[1:]
    advice = _ADVICE.get(error.errno)
    return (f"{paths}: {said}" if paths else said) + (f"; {advice}" if advice else "")


def _print_error(message: str, options: CommonOptions) -> None:
    if options.log_format == "json":
        logger.error(message)
    else:
        print(f"error: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
