# SPDX-License-Identifier: Apache-2.0
"""Ends what a killed driver leaves behind.

Ray's processes end with the driver that started them, however it ended; only two of its agents first spend a minute
on telling the control store, which is gone as well. A keeper is a small process beside the driver that knows the
driver's descendants. It sees the driver's death by the end of its standard input, gives them a moment to end by
themselves, and ends the rest.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator

import psutil

GRACE_S = 3.0
"""How long processes may take to end by themselves once the driver is gone."""


class Keeper:
    """Made by `keeper`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None, "a keeper is written to"
        self._process = process
        self._pipe = process.stdin
        self._others = _descendants()

    def watch(self) -> None:
        """Note every process that this one has started since the keeper was made, directly or not."""
        self._send(sorted(_descendants() - self._others))

    def _send(self, message: list[tuple[int, float]] | None) -> None:
        # A keeper that somebody ended is missed only by those who kill the driver too.
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(json.dumps(message).encode() + b"\n")
            self._pipe.flush()

    def close(self) -> None:
        """Let the keeper go: whatever runs now is meant to."""
        self._send(None)
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        self._process.wait()


@contextlib.contextmanager
def keeper() -> Iterator[Keeper]:
    """A keeper beside this process, dismissed on the way out."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C and the end of a terminal are the driver's to deal with.
        start_new_session=True,
    )
    made = Keeper(process)
    try:
        yield made
    finally:
        made.close()


def _descendants() -> set[tuple[int, float]]:
    """(pid, start time) of every process under this one."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add((child.pid, child.create_time()))
    return found


def end(watched: Iterable[tuple[int, float]]) -> None:
    """End the processes with these (pid, start time); a pid that has another owner by now is left alone."""
    running = []
    for pid, created in watched:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                running.append(process)
    _, left = psutil.wait_procs(running, timeout=GRACE_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def main() -> None:
    """The keeper itself: lists of (pid, start time) on standard input, then null; or its end, when the driver died."""
    watched: set[tuple[int, float]] = set()
    for line in sys.stdin:
        message = json.loads(line)
        if message is None:
            return
        watched.update((pid, created) for pid, created in message)
    end(watched)


if __name__ == "__main__":
    main()
