# SPDX-License-Identifier: Apache-2.0
"""End a distributed job at once when one rank fails.

A rank that dies politely waits in its teardown for peers, which wait in a collective for it, until the
collective timeout. A guarded rank says what happened, flushes its loggers and exits without any teardown; its
peers learn of it through the job's store and exit as well, with one line each, so that the last traceback in the
log is the culprit's.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from nemo_rl_ext.guards.inflight import Home
from nemo_rl_ext.guards.lastwords import flush_on_exit
from nemo_rl_ext.guards.watch import Watch, in_ray, initialised, is_no_failure

__all__ = ["fail_fast", "flush_on_exit"]

logger = logging.getLogger("nemo_rl_ext.guards.failfast")


class fail_fast:
    """Decorator and context manager for the entry point of every rank, sync or async.

        @fail_fast()
        def main(): ...

        async with fail_fast(exit_code=3): ...

    On an exception: traceback with rank and host on stderr, everything flushed that can be (stdlib loggers, wandb,
    TensorBoard, `flush_on_exit`), and `os._exit` without process-group teardown. Child processes of
    `multiprocessing` are killed. A clean end destroys the default process group, when there is one. `sys.exit` with
    a non-zero code leaves at once too. So does an exception that ends a background thread, and one that waits for
    other ranks in a `finally` block on its way here.

    Works under torchrun, whose error file it fills, and under plain multiprocessing. Inside a Ray driver or
    actor it does nothing but say so: there, an exception has to travel as itself.

    `flush` adds callables to be called before exit; all flushing together is bounded to about a second. `rank` is
    for ranks that fail before the process group exists, where no launcher put the rank into the environment.
    """

    def __init__(
        self,
        *,
        exit_code: int = 1,
        teardown: bool = True,
        flush: tuple[Callable[[], Any], ...] = (),
        rank: int | None = None,
    ) -> None:
        if not 1 <= exit_code <= 255:
            raise ValueError(f"fail_fast: exit_code must lie in 1..255, got {exit_code}")
        self._exit_code, self._teardown, self._flush, self._rank = exit_code, teardown, flush, rank
        self._watch: Watch | None = None

    def __call__(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        def fresh() -> fail_fast:
            return fail_fast(
                exit_code=self._exit_code, teardown=self._teardown, flush=self._flush, rank=self._rank
            )

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
        self._start(sys._getframe(1))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        watch, self._watch = self._watch, None
        if watch is None or watch.pid != os.getpid():  # a forked child is no rank
            return
        if error is None or is_no_failure(error):
            if error is None and self._teardown:
                try:
                    _destroy_process_group()
                except Exception as fault:
                    watch.fail(fault)
            watch.stop()
            return
        if in_ray():
            watch.stop()
            logger.warning("fail_fast lets %s propagate: Ray was started in this process", kind.__name__)
            return
        watch.fail(error)

    async def __aenter__(self) -> fail_fast:
        self._start(sys._getframe(1))
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.__exit__(kind, error, trace)

    def _start(self, entered_from: FrameType) -> None:
        if in_ray():
            logger.warning(
                "fail_fast does nothing inside a Ray driver or actor: ending the process would hide the error "
                "from Ray. Let the exception propagate, and guard the processes that torchrun starts"
            )
            return
        if not faulthandler.is_enabled():  # a crash in native code then leaves its Python traceback
            with suppress(Exception):
                faulthandler.enable()
        self._watch = Watch(self._exit_code, self._flush, self._rank, Home.of(entered_from))
        self._watch.start()


def _destroy_process_group() -> None:
    dist = initialised()
    if dist is not None:
        dist.destroy_process_group()
