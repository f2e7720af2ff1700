# SPDX-License-Identifier: Apache-2.0
"""SIGTERM, as Slurm and Kubernetes send it, ends a run as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """The process was asked to end."""


def raise_on_sigterm() -> None:
    """Raise `Terminated` in the main thread at the first SIGTERM and ignore further ones while the run is ending.

    `ray.init` puts a handler of its own in place, so this is called again after it.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


@contextlib.contextmanager
def handler_given_back() -> Iterator[None]:
    """Put the caller's own SIGTERM handler back afterwards, unless it is this module's, which ends with its process."""
    caller = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if (
            caller not in (_terminate, signal.SIG_IGN, None)
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(signal.SIGTERM, caller)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
