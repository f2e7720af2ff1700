# SPDX-License-Identifier: Apache-2.0
"""End a distributed job at once when one rank fails.

A rank that dies politely waits in its teardown for peers, which wait in a collective for it, until the
collective timeout. A guarded rank says what happened, flushes its loggers and exits without any teardown; its
peers learn of it through the job's store and exit as well, with one line each, so that the last traceback in the
log is the culprit's.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import json
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

logger = logging.getLogger("nemo_rl_ext.guards.failfast")

_STORE_KEY = "nemo_rl_ext/failed_rank"
_POLL_SECONDS = 0.25
_FLUSH_SECONDS = 1.0
_STORE_SECONDS = 1.0
# Exceptions by which control leaves a block without anything being wrong.
_NOT_FATAL = (asyncio.CancelledError, GeneratorExit)


class fail_fast:  # noqa: N801 - reads as the decorator and context manager that it is
    """Decorator and context manager for the entry point of every rank, sync or async.

        @fail_fast()
        def main(): ...

        async with fail_fast(exit_code=3): ...

    On an exception: traceback with rank and host on stderr, loggers flushed (stdlib, wandb, TensorBoard), and
    `os._exit` without process-group teardown. Child processes of `multiprocessing` are killed. A clean end
    destroys the default process group, when there is one. `sys.exit` with a non-zero code leaves at once too.

    Works under torchrun, whose error file it fills, and under plain multiprocessing. Inside a Ray driver or
    actor it does nothing but say so: there, an exception has to travel as itself.

    `flush` adds callables to be called before exit; all flushing together is bounded to about a second.
    """

    def __init__(
        self, *, exit_code: int = 1, teardown: bool = True, flush: tuple[Callable[[], Any], ...] = ()
    ) -> None:
        if not 1 <= exit_code <= 255:
            raise ValueError(f"fail_fast: exit_code must lie in 1..255, got {exit_code}")
        self._exit_code, self._teardown, self._flush = exit_code, teardown, flush
        self._watch: _PeerWatch | None = None

    def __call__(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        def fresh() -> fail_fast:
            return fail_fast(exit_code=self._exit_code, teardown=self._teardown, flush=self._flush)

        if inspect.iscoroutinefunction(entry):

            @functools.wraps(entry)
            async def guarded_async(*args: Any, **kwargs: Any) -> Any:
                async with fresh():
                    return await entry(*args, **kwargs)

            return guarded_async

        @functools.wraps(entry)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with fresh():
                return entry(*args, **kwargs)

        return guarded

    def __enter__(self) -> fail_fast:
        if _in_ray():
            logger.warning(
                "fail_fast does nothing inside a Ray driver or actor: ending the process would hide the error "
                "from Ray. Let the exception propagate, and guard the processes that torchrun starts"
            )
        else:
            self._watch = _PeerWatch(self._exit_code, self._flush)
            self._watch.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if error is None or isinstance(error, _NOT_FATAL) or _is_clean_exit(error):
            watch.stop()
            if error is None and self._teardown:
                _destroy_process_group()
            return
        if _in_ray():
            watch.stop()
            logger.warning("fail_fast lets %s propagate: Ray was started in this process", kind.__name__)
            return
        watch.fail(error)

    async def __aenter__(self) -> fail_fast:
        return self.__enter__()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.__exit__(kind, error, trace)


class _PeerWatch(threading.Thread):
    """Looks into the job's store for a failed peer, and ends this process in either case."""

    def __init__(self, exit_code: int, flush: tuple[Callable[[], Any], ...]) -> None:
        super().__init__(name="fail_fast", daemon=True)
        self._exit_code, self._flush = exit_code, flush
        self._store: Any = None
        self._done = threading.Event()
        self._ending = threading.Lock()

    def run(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            culprit = self._failed_peer()
            if culprit and not self._done.is_set() and self._ending.acquire(blocking=False):
                self._leave(culprit)

    def stop(self) -> None:
        self._done.set()

    def fail(self, error: BaseException) -> NoReturn:
        """Say what happened and end the process; does not return."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # the watching thread is already ending this process
        rank = _rank()
        claim = json.dumps({"rank": rank, "host": socket.gethostname(), "error": _summary(error)})
        culprit = self._claim(claim)
        if culprit is not None and culprit["rank"] != rank:
            self._leave(culprit)
        code = self._exit_code
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else self._exit_code
        elif isinstance(error, KeyboardInterrupt):
            code = 130
        _record_for_torchrun(error)
        _flush_loggers(self._flush)
        head = f"fatal error on rank {rank}, host {socket.gethostname()}, pid {os.getpid()}; exiting without teardown"
        _say(head + "\n" + "".join(traceback.format_exception(error)))
        if self._store is not None:
            # Peers read the claim from a store that may live in this very process.
            time.sleep(2 * _POLL_SECONDS)
        _exit(code & 0xFF or self._exit_code)

    def _leave(self, culprit: dict[str, Any]) -> NoReturn:
        _flush_loggers(self._flush)
        _say(
            f"rank {_rank()} exits because rank {culprit['rank']} on {culprit['host']} failed: {culprit['error']}\n"
        )
        _exit(self._exit_code)

    def _claim(self, claim: str) -> dict[str, Any] | None:
        """The first rank to fail is the culprit; the later ones failed because of it."""
        store = self._connected()
        if store is None:
            return None
        with suppress(Exception):
            return json.loads(store.compare_set(_STORE_KEY, "", claim))
        return None

    def _failed_peer(self) -> dict[str, Any] | None:
        store = self._connected()
        with suppress(Exception):
            if store is not None and store.check([_STORE_KEY]):
                return json.loads(store.get(_STORE_KEY))
        return None

    def _connected(self) -> Any:
        """A connection of our own to the default process group's store: its main one may be blocked in a wait."""
        if self._store is None and "torch.distributed" in sys.modules:
            import torch.distributed as dist

            with suppress(Exception):
                if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                    store = dist.distributed_c10d._get_default_store().clone()
                    store.set_timeout(timedelta(seconds=_STORE_SECONDS))
                    self._store = store
        return self._store


def _in_ray() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized())


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _destroy_process_group() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


def _summary(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _record_for_torchrun(error: BaseException) -> None:
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)


def _flush_loggers(extra: tuple[Callable[[], Any], ...]) -> None:
    """Flush what can be flushed within a second; a logger that hangs must not keep the job alive."""
    calls: list[Callable[[], Any]] = [ref().flush for ref in logging._handlerList if ref() is not None]
    calls += [*extra, *_tensorboard_flushes(), *_wandb_finishes()]
    threads = [threading.Thread(target=_quietly, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _FLUSH_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _quietly(call: Callable[[], Any]) -> None:
    with suppress(Exception):
        call()


def _tensorboard_flushes() -> list[Callable[[], Any]]:
    modules = [sys.modules.get(name) for name in ("torch.utils.tensorboard.writer", "tensorboardX.writer")]
    classes = tuple(m.SummaryWriter for m in modules if m is not None and hasattr(m, "SummaryWriter"))
    if not classes:
        return []
    return [o.flush for o in gc.get_objects() if isinstance(o, classes)]


def _wandb_finishes() -> list[Callable[[], Any]]:
    run = getattr(sys.modules.get("wandb"), "run", None)
    return [] if run is None else [functools.partial(run.finish, exit_code=1)]


def _say(text: str) -> None:
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    with suppress(OSError):
        # One write, so that lines of several ranks do not mix.
        os.write(2, text.encode("utf-8", "backslashreplace"))


def _exit(code: int) -> NoReturn:
    for child in multiprocessing.active_children():
        with suppress(Exception):
            child.kill()
    os._exit(code)
