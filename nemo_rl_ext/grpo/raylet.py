# SPDX-License-Identifier: Apache-2.0
"""A run whose Ray node died ends with one sentence.

The raylet is the process of Ray's that a driver cannot do without. Where it is killed, Ray itself ends the driver some
seconds later, in the middle of whatever it does, with a stack trace. A watch is faster.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

import psutil

INTERVAL_S = 0.05


@contextlib.contextmanager
def raylet_watched(how_to_go_on: Callable[[], str]) -> Iterator[None]:
    """End this process, with a sentence on stderr and code 1, as soon as a raylet among its children is gone.

    Nothing is asked to end: no actor can be reached any more, and a keeper (`grpo.keeper`) ends what is left. What is
    on disk is as complete as after any kill.
    """
    raylets = [child for child in psutil.Process().children(recursive=True) if child.name() == "raylet"]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(INTERVAL_S):
            if any(map(_is_gone, raylets)) and not stop.is_set():
                print(
                    "error: Ray's node process (raylet) is gone: it was killed, or the machine ran out of memory "
                    f"(dmesg names what the kernel killed); {how_to_go_on()}",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    threading.Thread(target=watch, name="raylet-watch", daemon=True).start()
    try:
        yield
    finally:
        stop.set()


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
