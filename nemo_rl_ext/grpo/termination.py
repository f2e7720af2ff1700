# SPDX-License-Identifier: Apache-2.0
"""SIGTERM, as Slurm and Kubernetes send it, ends a run as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
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


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
