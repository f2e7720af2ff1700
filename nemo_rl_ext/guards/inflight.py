# SPDX-License-Identifier: Apache-2.0
"""Exceptions that are on their way out of a thread, perhaps held up by a `finally` block that waits for other ranks.

An exception is visible while Python runs a `finally` block, an `__exit__` method or an `except` clause for it.
Whether it goes on from there is read from the code that is left: the exception tables of the frames between the
handler and the guard say which `except` clauses stand in its way.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

WAITS = (os.path.join("torch", "distributed", ""), os.path.join("torch", "cuda", ""))
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
# Their `except` clauses pass on what they are not made for.
_PASSING_ON = (
    contextlib.__file__,
    os.path.join("torch", "distributed", "elastic", "multiprocessing", "errors", "__init__.py"),
)
# Methods of torch's own objects, which have no Python frame.
_WAIT_METHODS = frozenset({"wait", "barrier", "monitored_barrier", "synchronize"})


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where a guard stands: an exception that gets there is fatal."""

    code: CodeType
    offset: int
    """Bytecode offset of the `with` statement; what begins before it lies outside the guard."""

    @classmethod
    def of(cls, frame: FrameType) -> Home:
        """The guard that the frame is entering, by a `with` statement or an exit stack."""
        while frame.f_code.co_filename == contextlib.__file__ and frame.f_back is not None:
            frame = frame.f_back
        return cls(code=frame.f_code, offset=frame.f_lasti)


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """An exception that a handler is running for."""

    error: BaseException
    fatal: bool
    """Nothing on its way catches it: the thread is lost whatever the other ranks do."""
    waits: bool
    """The handler waits for other ranks."""
    where: str
    """`file:line in function` of the handler's statement that runs."""


def in_flight(home: Home) -> list[InFlight]:
    """The exceptions in this process that have a handler running, of every thread but the calling one."""
    found = []
    frames = sys._current_frames()
    for thread_id, active in sys._current_exceptions().items():
        # Python 3.11 has (type, value, traceback) here, later versions the value alone.
        error: Any = active[1] if isinstance(active, tuple) else active
        frame = frames.get(thread_id)
        if thread_id == threading.get_ident() or not isinstance(error, BaseException) or frame is None:
            continue
        handler = error.__traceback__.tb_frame if error.__traceback__ else None
        stack = list(_outwards(frame))
        if handler is None or handler not in stack:
            continue
        depth = stack.index(handler)
        where = f"{handler.f_code.co_filename}:{handler.f_lineno} in {handler.f_code.co_name}"
        fatal, waits = _leaves(error, stack[depth:], home), _waits(stack[: depth + 1])
        found.append(InFlight(error=error, fatal=fatal, waits=waits, where=where))
    return found


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def waits_for_group() -> tuple[int, int] | None:
    """(rank, world size) that some thread gave to `init_process_group` and waits with; -1 where it gave none."""
    for top in sys._current_frames().values():
        for frame in _outwards(top):
            if _starts_group(frame):
                given = frame.f_locals
                return int(given.get("rank", -1)), int(given.get("world_size", -1))
    return None


def left_group_start(error: BaseException) -> bool:
    """Whether the error came out of `init_process_group`."""
    return any(_starts_group(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def _starts_group(frame: FrameType) -> bool:
    return frame.f_code.co_name == "init_process_group" and _C10D in frame.f_code.co_filename


def _waits(stack: list[FrameType]) -> bool:
    """Whether the innermost frames wait for other ranks."""
    if any(part in frame.f_code.co_filename for frame in stack[:-1] for part in WAITS):
        return True
    loads = [
        step.argval
        for step in _code(stack[0].f_code).steps
        if step.offset <= stack[0].f_lasti and step.opname in ("LOAD_METHOD", "LOAD_ATTR")
    ]
    return bool(loads) and loads[-1] in _WAIT_METHODS


# What does not occur between an `except` and its classes.
_STATEMENTS = (
    "POP_", "STORE_", "DELETE_", "RERAISE", "RAISE_", "RETURN_", "JUMP", "FOR_ITER", "PUSH_EXC_INFO", "BEFORE_",
    "WITH_EXCEPT_START", "COPY", "IMPORT_", "GET_ITER", "YIELD_", "SEND",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Code:
    steps: list[dis.Instruction]
    table: list[Any]
    """Entries with start, end (exclusive) and target; each offset lies in one at most."""

    def handler_of(self, offset: int) -> int | None:
        return next((entry.target for entry in self.table if entry.start <= offset < entry.end), None)

    def start_of(self, target: int) -> int:
        return int(min(entry.start for entry in self.table if entry.target == target))

    def after(self, offset: int) -> Iterator[dis.Instruction]:
        return (step for step in self.steps if step.offset >= offset and step.opname != "CACHE")


@functools.lru_cache(maxsize=256)
def _code(code: CodeType) -> _Code:
    bytecode = dis.Bytecode(code)
    return _Code(steps=list(bytecode), table=list(getattr(bytecode, "exception_entries", ())))


def _leaves(error: BaseException, stack: list[FrameType], home: Home) -> bool:
    """Whether the exception gets from its handler, in the first frame, to the guard or out of its thread."""
    code, handler = _code(stack[0].f_code), _running_handler(stack[0])
    if handler is None:
        return False
    if _clauses(code, handler.start, stack[0]) is not None and not _raises(code, stack[0].f_lasti):
        return False
    target = code.handler_of(handler.stop)
    for frame in stack:
        if frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "_bootstrap_inner":
            return not isinstance(error, SystemExit)  # which ends a thread and nothing else
        if frame is not stack[0]:
            target = _code(frame.f_code).handler_of(frame.f_lasti)
        is_home = frame.f_code is home.code
        outside = home.offset if is_home else -1
        if not frame.f_code.co_filename.endswith(_PASSING_ON) and _catches(
            error, frame, target, outside=outside
        ):
            return False
        if is_home:
            return True
    return False


def _running_handler(frame: FrameType) -> range | None:
    """The handler that the frame is running: from its first instruction to its cleanup."""
    code = _code(frame.f_code)
    target = code.handler_of(frame.f_lasti)
    while target is not None:
        name = next(code.after(target)).opname
        if name == "COPY":  # the cleanup of a handler that runs
            return range(code.start_of(target), target)
        if name == "PUSH_EXC_INFO":  # a handler that does not run, with a cleanup of its own
            cleanup = code.handler_of(target)
            target = None if cleanup is None else code.handler_of(cleanup)
        else:
            target = code.handler_of(target)
    return None


def _catches(error: BaseException, frame: FrameType, target: int | None, *, outside: int) -> bool:
    """Whether an `except` clause may end the exception, from a first handler outwards through the frame.

    Handlers of blocks that begin at or before the offset `outside` are not looked at.
    """
    code = _code(frame.f_code)
    while target is not None:
        is_handler = next(code.after(target)).opname == "PUSH_EXC_INFO" and code.start_of(target) > outside
        for kinds, body in (_clauses(code, target, frame) if is_handler else None) or ():
            if kinds is None or isinstance(error, kinds):
                if _raises(code, body):
                    break
                return True
        target = code.handler_of(target)
    return False


def _clauses(code: _Code, handler: int, frame: FrameType) -> list[tuple[Any, int]] | None:
    """What the `except` clauses at a handler take, each with the offset of its body; None for another handler.

    A clause whose classes cannot be resolved, or a bare one, takes everything: (None, body).
    """
    found: list[tuple[Any, int]] = []
    names: list[Any] = []
    steps = code.after(handler + 2)
    while (step := next(steps, None)) is not None:
        if step.opname.startswith("CHECK_E"):
            jump = next(steps)
            found.append((_classes(names), jump.offset))
            names, steps = [], code.after(jump.argval)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"):
            scopes = (frame.f_locals, frame.f_globals, vars(builtins))
            names.append(next((scope[step.argval] for scope in scopes if step.argval in scope), None))
        elif step.opname == "LOAD_ATTR" and names:
            names[-1] = getattr(names[-1], step.argval, None)
        elif step.opname == "POP_TOP" and not names:  # a bare `except`
            return [*found, (None, step.offset)]
        elif step.opname.startswith(_STATEMENTS):  # another statement: the clauses, if any, are over
            return found or None
        elif step.opname not in ("BUILD_TUPLE", "NOP", "EXTENDED_ARG"):
            names.append(None)  # an expression that is not followed
    return found or None


def _classes(found: list[Any]) -> Any:
    classes = tuple(c for entry in found for c in (entry if isinstance(entry, tuple) else (entry,)))
    return classes if classes and all(isinstance(c, type) for c in classes) else None


def _raises(code: _Code, offset: int) -> bool:
    """Whether every way on from the instruction at an offset ends in `raise` before the handler is over."""
    todo, seen = [next(step.offset for step in code.after(offset + 2))], set[int]()
    while todo:
        for step in code.after(todo.pop()):
            if step.offset in seen or step.opname in ("RAISE_VARARGS", "RERAISE"):
                break
            seen.add(step.offset)
            if step.opname == "POP_EXCEPT" or step.opname.startswith("RETURN_"):
                return False
            if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
                todo.append(step.argval)
                if step.opname.startswith("JUMP_") and "_IF_" not in step.opname:
                    break
    return True
