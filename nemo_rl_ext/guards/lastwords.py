# SPDX-License-Identifier: Apache-2.0
"""What a process says and flushes before `os._exit`, each step bounded: nothing here may keep it alive.

A pipe that nobody reads, a logger that waits for its server, or an exception whose text raises must not hold the
exit up, so every step runs in a thread of its own and is left behind when its time is over.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

SAY_SECONDS = 0.5
FLUSH_SECONDS = 1.0
# From here on the exit needs no thread of Python's: code that holds the interpreter's lock cannot stop it.
LAST_RESORT_SECONDS = 2.6
_LONGEST_REPORT = 1 << 18

_registered: list[Callable[[], Any]] = []
_T = TypeVar("_T")


def flush_on_exit(target: _T) -> _T:
    """Have something flushed when a guarded process exits without teardown: a callable, or an object with `flush`.

        events = flush_on_exit(open("events.jsonl", "a"))

    Usable as a decorator; returns its argument. `os._exit` loses what is buffered in this process: files that are
    open for writing, `atexit` handlers, `finally` blocks. Registered in every rank that has something to lose,
    since the ranks that leave because of another one exit in the same way.

    Raises:
        TypeError: for an object that is neither callable nor has `flush`.
    """
    call = getattr(target, "flush", target)
    if not callable(call):
        raise TypeError(
            f"flush_on_exit: expected a callable or an object with flush(), got {type(target).__name__}"
        )
    _registered.append(call)
    return target


def bounded(calls: Sequence[Callable[[], Any]], seconds: float) -> bool:
    """Run calls at the same time, for so many seconds in all; what they raise is dropped. False when no thread could
    be had for one of them."""

    def quietly(call: Callable[[], Any]) -> None:
        with suppress(BaseException):
            call()

    threads = []
    for call in calls:
        thread = threading.Thread(target=quietly, args=(call,), daemon=True)
        with suppress(RuntimeError):  # no more threads to be had
            thread.start()
            threads.append(thread)
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return len(threads) == len(calls)


def describe(error: BaseException) -> tuple[str, str]:
    """One line, and the traceback, of any exception; also of one whose text raises, hangs or has no end."""
    found: list[tuple[str, str]] = []

    def read() -> None:
        text = "".join(traceback.format_exception(error))
        if len(text) > _LONGEST_REPORT:
            half = _LONGEST_REPORT // 2
            text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
        found.append((summary(error), text))

    bounded([read], SAY_SECONDS)
    if found:
        return found[0]
    line = f"{type(error).__name__}: <its text cannot be read>"
    frames = "".join(
        f"  File {frame.f_code.co_filename!r}, line {line_number}, in {frame.f_code.co_name}\n"
        for frame, line_number in traceback.walk_tb(error.__traceback__)
    )
    return line, f"Traceback (most recent call last):\n{frames}{line}\n"


def summary(error: BaseException) -> str:
    """Class and first line of an exception."""
    try:
        lines = str(error).splitlines() or [""]
    except BaseException:
        lines = ["<its text cannot be read>"]
    return f"{type(error).__name__}: {lines[0][:200]}"


def say(text: str) -> None:
    """Write to standard error, as one write so that lines of several ranks do not mix."""
    raw = text.encode("utf-8", "backslashreplace")

    def write() -> None:
        rest = raw
        while rest:
            rest = rest[os.write(2, rest) :]

    if not bounded([write], SAY_SECONDS):
        with suppress(OSError):
            write()


def flush_everything(extra: Sequence[Callable[[], Any]] = ()) -> None:
    """Flush logging handlers, standard streams, TensorBoard writers, wandb's run, and what was registered."""
    handlers = [handler for ref in getattr(logging, "_handlerList", ()) if (handler := ref()) is not None]
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "flush")]
    calls: list[Callable[[], Any]] = [item.flush for item in (*handlers, *streams)]
    bounded([*extra, *_registered, *calls, _flush_tensorboard, *_wandb_finishes()], FLUSH_SECONDS)


def _flush_tensorboard() -> None:
    modules = [sys.modules.get(name) for name in ("torch.utils.tensorboard.writer", "tensorboardX.writer")]
    classes = tuple(m.SummaryWriter for m in modules if m is not None and hasattr(m, "SummaryWriter"))
    if classes:
        # By type: isinstance would ask proxies for their __class__, and some of them raise.
        for writer in [o for o in gc.get_objects() if issubclass(type(o), classes)]:
            with suppress(Exception):
                writer.flush()


def _wandb_finishes() -> list[Callable[[], Any]]:
    run = getattr(sys.modules.get("wandb"), "run", None)
    return [] if run is None else [functools.partial(run.finish, exit_code=1)]


def rank_variable(error: BaseException) -> str:
    """What a function on the exception's way calls `rank`: a hint for readers where nothing else says it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        value = frame.f_locals.get("rank")
        if type(value) is int:
            return f", `rank` is {value} in {frame.f_code.co_name}"
    return ""


def record_for_torchrun(line: str, text: str) -> None:
    """Fill torchrun's error file, so that its summary names this rank and shows this traceback.

    In the form of torch's own `ErrorHandler.record_exception`, which reads the exception's text again and needs
    torch, whose import takes longer than there is time.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        record = json.dumps({"message": {"message": line, "extraInfo": extra}})
        bounded([lambda: Path(path).write_text(record, encoding="utf-8")], SAY_SECONDS)


def arm_last_resort() -> None:
    """End the process in a few seconds, whatever happens until then."""
    with suppress(Exception):
        faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True, file=open(os.devnull, "w"))


def leave(code: int) -> NoReturn:
    """Exit without any teardown; child processes of `multiprocessing` are killed."""
    try:
        children = multiprocessing.active_children()
        for child in children:
            with suppress(Exception):
                child.kill()
        deadline = time.monotonic() + SAY_SECONDS
        for child in children:
            with suppress(Exception):
                child.join(max(0.0, deadline - time.monotonic()))
    finally:
        os._exit(code)
