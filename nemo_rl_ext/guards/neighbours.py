# SPDX-License-Identifier: Apache-2.0
"""Ranks on the same host that ended without a word: by a signal, or by `os._exit`."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_ext.guards.claims import JobStore, now

_GATHER_SECONDS, _SELDOM_SECONDS = 10.0, 2.0


@dataclass(frozen=True)
class Gone:
    """A rank whose process ended, and what is known of how."""

    rank: int
    pid: int
    how: str


def started_at(pid: int) -> float | None:
    """When a process started, in seconds since boot; None when there is none that runs."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None


class Neighbours:
    """The guarded ranks of this host, as they put themselves down in the job's store."""

    def __init__(self, store: JobStore, rank: int) -> None:
        namespace = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        self._list = f"ranks/{socket.gethostname()}/{namespace}"
        self._store, self._rank = store, rank
        self._known: dict[int, tuple[int, float]] = {}
        self._left: set[int] = set()
        self._gone: dict[int, Gone] = {}
        self._since, self._read_at = now(), 0.0
        self._store.append(self._list, f"{rank} {os.getpid()} {started_at(os.getpid()) or 0.0}")

    def leave(self) -> None:
        """Say that this rank is done, so that nobody misses it."""
        self._store.append(self._list, f"{self._rank} left")

    def refresh(self, *, at_once: bool = True) -> None:
        """Read who is there; seldom, unless at once, when all have had the time to put themselves down: with
        hundreds of ranks one store answers all of them. Raises what the store raises."""
        if not at_once and now() - self._read_at < _SELDOM_SECONDS and now() - self._since > _GATHER_SECONDS:
            return
        self._read_at = now()
        for line in self._store.lines(self._list):
            rank, *rest = line.split()
            if rest == ["left"]:
                self._left.add(int(rank))
            elif int(rank) != self._rank:
                self._known[int(rank)] = (int(rest[0]), float(rest[1]))

    def gone(self) -> list[Gone]:
        """Ranks whose process ended and that did not say they were done; those that a signal ended first."""
        for rank, (pid, started) in self._known.items():
            if rank not in self._left and rank not in self._gone and started_at(pid) != started:
                how = _ending(pid)
                if how is None:
                    self._left.add(rank)
                else:
                    self._gone[rank] = Gone(rank, pid, how)
        found = [gone for rank, gone in self._gone.items() if rank not in self._left]
        return sorted(found, key=lambda gone: "signal " not in gone.how)


def _ending(pid: int) -> str | None:
    """How a process ended, while its parent has not asked for it yet; None for a clean end."""
    fields = _stat(pid)
    if fields is None or fields[0] not in "ZX":
        return "ended without a word: by a signal (SIGKILL, out of memory) or by os._exit"
    status = int(fields[49])
    if status == 0:
        return None
    if number := status & 0x7F:
        with suppress(ValueError):
            return f"ended by signal {number} ({signal.Signals(number).name})"
        return f"ended by signal {number}"
    return f"ended without a word, with exit code {status >> 8}"
