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
import re
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

_CLAIM, _ACKS = "nemo_rl_ext/failed_rank", "nemo_rl_ext/failed_rank_read"
_POLL_SECONDS = 0.25
_FLUSH_SECONDS = 1.0
_STORE_SECONDS = 1.0
# How a collective ends when the process at its other end is gone.
_LOST_PEER = re.compile(
    r"connection (?:closed|reset|refused)|broken pipe|DistNetworkError|remote (?:process|worker)", re.I
)
# Exceptions by which control leaves a block without anything being wrong.
_NOT_FATAL = (asyncio.CancelledError, GeneratorExit)


class fail_fast:
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
        self._connecting = threading.Lock()
        self._done = threading.Event()
        self._ending = threading.Lock()

    def run(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            try:
                store = self._connected()
                if store is None or not store.check([_CLAIM]) or self._done.is_set():
                    continue
                culprit = json.loads(store.get(_CLAIM))
            except Exception:
                return  # the store went with its process; the collectives will tell
            if self._ending.acquire(blocking=False):
                self._leave(culprit)

    def stop(self) -> None:
        self._done.set()

    def fail(self, error: BaseException) -> NoReturn:
        """Say what happened and end the process; does not return."""
        self._done.set()
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the watching thread is already ending this process
        rank, host = _rank(), socket.gethostname()
        culprit = self._claim({"rank": rank, "host": host, "error": _summary(error)})
        if culprit is not None and culprit["rank"] != rank:
            self._leave(culprit)
        if culprit is None and _world_size() > 1 and _LOST_PEER.search(f"{type(error).__name__}: {error}"):
            self._leave({"rank": "?", "host": "a lost host", "error": _summary(error)})
        code = self._exit_code
        if isinstance(error, SystemExit):
            code = error.code & 0xFF if isinstance(error.code, int) else code
        elif isinstance(error, KeyboardInterrupt):
            code = 130
        _record_for_torchrun(error)
        _flush_loggers(self._flush)
        head = f"fatal error on rank {rank}, host {host}, pid {os.getpid()}; exiting without teardown\n"
        _say(head + "".join(traceback.format_exception(error)))
        self._keep_store_for_peers()
        _exit(code or self._exit_code)

    def _leave(self, culprit: dict[str, Any]) -> NoReturn:
        """Exit as a victim: one line, no traceback."""
        _flush_loggers(self._flush)
        _say(
            f"rank {_rank()} exits because rank {culprit['rank']} on {culprit['host']} failed: {culprit['error']}\n"
        )
        self._keep_store_for_peers()
        _exit(self._exit_code)

    def _claim(self, claim: dict[str, Any]) -> dict[str, Any] | None:
        """The first rank to fail is the culprit; later ones failed because of it. None without a store."""
        with suppress(Exception):
            store = self._connected()
            if store is not None:
                first: dict[str, Any] = json.loads(store.compare_set(_CLAIM, "", json.dumps(claim)))
                return first
        return None

    def _keep_store_for_peers(self) -> None:
        """Peers read the claim from a store that may live in this very process: wait until they have."""
        with suppress(Exception):
            if self._store is None:
                return
            self._store.add(_ACKS, 1)
            hosts_store = _rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            deadline = time.monotonic() + _STORE_SECONDS
            while hosts_store and time.monotonic() < deadline and self._store.add(_ACKS, 0) < _world_size():
                time.sleep(0.02)

    def _connected(self) -> Any:
        """A connection of our own to the default process group's store: its main one may be blocked in a wait."""
        with self._connecting:
            if self._store is None and _world_size() > 1:
                import torch.distributed as dist

                main: Any = dist.distributed_c10d._get_default_store()
                if _answers(main):
                    self._store = main.clone()
                    self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
            return self._store


def _answers(store: Any) -> bool:
    """Whether a TCP store's host accepts connections. `clone` itself would retry for the whole collective timeout."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "host"):
        return True
    with suppress(OSError), socket.create_connection((store.host, store.port), timeout=_STORE_SECONDS):
        return True
    return False


def _initialised() -> Any:
    """`torch.distributed` when this process has a default process group, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _world_size() -> int:
    dist = _initialised()
    return 1 if dist is None else dist.get_world_size()


def _rank() -> int:
    dist = _initialised()
    return int(os.environ.get("RANK", 0)) if dist is None else dist.get_rank()


def _in_ray() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized())


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _destroy_process_group() -> None:
    dist = _initialised()
    if dist is not None:
        dist.destroy_process_group()


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
    calls: list[Callable[[], Any]] = [handler.flush for handler in _log_handlers()]
    calls += [*extra, *_tensorboard_flushes(), *_wandb_finishes()]
    threads = [threading.Thread(target=_quietly, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _FLUSH_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _log_handlers() -> list[logging.Handler]:
    references: list[Callable[[], logging.Handler | None]] = vars(logging)["_handlerList"]
    return [handler for reference in references if (handler := reference()) is not None]


def _quietly(call: Callable[[], Any]) -> None:
    with suppress(Exception):
        call()


def _tensorboard_flushes() -> list[Callable[[], Any]]:
    modules = [sys.modules.get(name) for name in ("torch.utils.tensorboard.writer", "tensorboardX.writer")]
    classes = tuple(m.SummaryWriter for m in modules if m is not None and hasattr(m, "SummaryWriter"))
    if not classes:
        return []
    # By type: isinstance would ask proxies for their __class__, and some of them raise.
    return [o.flush for o in gc.get_objects() if issubclass(type(o), classes)]


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
    children = multiprocessing.active_children()
    for child in children:
        with suppress(Exception):
            child.kill()
    for child in children:
        with suppress(Exception):
            child.join(0.5)
    os._exit(code)
