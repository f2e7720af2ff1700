# SPDX-License-Identifier: Apache-2.0
"""Who failed first: how the ranks of a job learn of it, through the job's store or beside it.

The store of the default process group reaches every rank, once there is one. Before that, and when it is gone, ranks
that one launcher started on a host leave a note in the temporary directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

STORE_SECONDS = 1.0
# A note's author stays alive for so long, and so does the launcher's wait for it: whoever started after that belongs
# to the launcher's next attempt.
LINGER_SECONDS = 0.5
_STALE_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A rank that failed, as its peers name it."""

    rank: int | None
    host: str
    pid: int
    process: str
    """The name that `multiprocessing` gave the process."""
    hint: str = ""
    """What else may tell the rank, for readers."""
    error: str
    """One line."""
    at: float
    """Seconds since this host booted."""
    joined: bool
    """The rank had been in the default process group."""
    job: str | None
    """The rendezvous that the launcher put into the environment."""

    @classmethod
    def of_this_process(cls, *, rank: int | None, error: str, joined: bool, hint: str = "") -> Claim:
        """A claim of this process for itself."""
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            process=multiprocessing.current_process().name,
            hint=hint,
            error=error,
            at=now(),
            joined=joined,
            job=job_of_environment(),
        )

    @property
    def who(self) -> str:
        """`rank 2`, or what else tells the process."""
        if self.rank is not None:
            return f"rank {self.rank}"
        return f"an unknown rank (process {self.process!r}{self.hint})"

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))


def now() -> float:
    """Seconds since this host booted, as the kernel dates processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def job_of_environment() -> str | None:
    """What tells this job from others, when a launcher set all of it; None otherwise."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    if any(not os.environ.get(name) for name in names) or os.environ["WORLD_SIZE"] == "1":
        return None
    further = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    parts = [os.environ.get(name, "") for name in (*names[:3], *further)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def attempt() -> str:
    """Which of torchrun's attempts this is: its store, and so every key in it, outlives a restart."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


class JobStore:
    """A connection of our own to the default process group's store: its main one may be blocked in a wait."""

    def __init__(self, main: Any) -> None:
        # The server lives in the main store, in rank 0, and user code may destroy the process group.
        self._main = main
        self._own = main.clone()
        self._own.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._claim_key = f"nemo_rl_ext/failed_rank/{attempt()}"

    @classmethod
    def connect(cls, main: Any) -> JobStore | None:
        """None while the store's host does not answer: `clone` would try for the whole collective timeout."""
        base = main
        while hasattr(base, "underlying_store"):
            base = base.underlying_store
        if hasattr(base, "host"):
            try:
                socket.create_connection((base.host, base.port), timeout=STORE_SECONDS).close()
            except OSError:
                return None
        return cls(main)

    def claim(self, claim: Claim) -> Claim:
        """The first rank to claim failed first; later ones failed because of it."""
        return Claim(**json.loads(self._own.compare_set(self._claim_key, "", claim.to_json())))

    def claimed(self) -> Claim | None:
        """The claim, if there is one."""
        if not self._own.check([self._claim_key]):
            return None
        return Claim(**json.loads(self._own.get(self._claim_key)))

    def count(self, what: str, amount: int = 0) -> int:
        """Add to a counter of this attempt."""
        return int(self._own.add(f"nemo_rl_ext/{what}/{attempt()}", amount))

    def append(self, what: str, line: str) -> None:
        """Add a line to a list of this attempt. Not every store can."""
        self._own.append(f"nemo_rl_ext/{what}/{attempt()}", f"{line}\n")

    def lines(self, what: str) -> list[str]:
        """The lines so far."""
        key = f"nemo_rl_ext/{what}/{attempt()}"
        return self._own.get(key).decode().splitlines() if self._own.check([key]) else []


class Notes:
    """Claims in files of this user, by launcher and by job."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._parent = os.getppid()
        self._directory = Path(tempfile.gettempdir()) / f"nemo_rl_ext-fail_fast-{os.getuid()}"

    def _files(self) -> list[Path]:
        job = job_of_environment()
        keys = [f"launcher-{self._parent}", *([] if job is None else [f"job-{job}"])]
        return [self._directory / key for key in keys]

    def post(self, claim: Claim) -> bool:
        """Leave a claim. False when this process is no rank of anything, or the directory cannot be used."""
        if claim.job is None and multiprocessing.parent_process() is None:
            return False
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            if not self._is_ours():
                return False
            self._sweep()
            for path in self._files():
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(claim.to_json() + "\n")
        except OSError:
            return False
        return True

    def read(self) -> list[Claim]:
        """Claims of this launcher's or job's present attempt, without this process's own; earliest first."""
        lines: list[str] = []
        for path in self._files():
            if path.exists() and self._is_ours():
                lines += path.read_text(encoding="utf-8").splitlines()
        claims: set[Claim] = set()
        for line in lines:
            with suppress(ValueError, TypeError):
                claims.add(Claim(**json.loads(line)))
        job = job_of_environment()
        return sorted(
            (
                c
                for c in claims
                if c.at + LINGER_SECONDS > self._started
                and c.pid != os.getpid()
                and c.host == socket.gethostname()
                and (job is None or c.job is None or c.job == job)
            ),
            key=lambda c: c.at,
        )

    def _is_ours(self) -> bool:
        found = os.lstat(self._directory)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022

    def _sweep(self) -> None:
        for path in self._directory.iterdir():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
