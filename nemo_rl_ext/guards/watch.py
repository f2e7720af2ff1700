# SPDX-License-Identifier: Apache-2.0
"""The thread beside a guarded rank: it looks for failed peers and for errors that do not reach the guard by
themselves, and ends the process for either."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from nemo_rl_ext.guards import lastwords
from nemo_rl_ext.guards.claims import (
    LINGER_SECONDS,
    STORE_SECONDS,
    Claim,
    JobStore,
    Notes,
    job_of_environment,
    now,
)
from nemo_rl_ext.guards.inflight import Home, InFlight, in_flight, left_group_start, waits_for_group
from nemo_rl_ext.guards.neighbours import Neighbours, started_at

_POLL_SECONDS, _POLL_SECONDS_BEFORE_GROUP = 0.25, 0.05
# How long a `finally` block may wait for other ranks while its exception is on the way to the guard.
_CLEANUP_SECONDS = 1.0
# When an exception is reported that may yet be caught, or whose cleanup takes its time.
_REPORT_SECONDS = 5.0
_PEERS_SECONDS = 0.5
# torchrun names the first rank that it sees ending; those that leave because of another one let it go first.
_AGENT_SECONDS = 1.5
# How a collective ends when the process at its other end is gone.
_LOST_PEER = re.compile(
    r"connection (?:closed|reset|refused|aborted)|broken pipe|DistNetworkError|remote (?:process|worker)",
    re.I,
)
_NOT_FATAL = (asyncio.CancelledError, GeneratorExit)
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")

# One ending per process, whichever thread and guard begins it.
_ending = threading.Lock()


@dataclass(kw_only=True)
class _Leaving:
    """An exception of this process on its way out, with the moments it was first seen and began to wait."""

    error: BaseException
    since: float
    waits_since: float
    reported: bool


class Watch(threading.Thread):
    """Looks for a failed peer and for exceptions that do not reach the guard, and ends this process for either."""

    def __init__(
        self, exit_code: int, flush: tuple[Callable[[], Any], ...], rank: int | None, home: Home
    ) -> None:
        super().__init__(name="fail_fast", daemon=True)
        self.pid = os.getpid()
        self._exit_code, self._flush, self._rank, self._home = exit_code, flush, rank, home
        self._world_size = 1
        self._store: JobStore | None = None
        self._store_lost = False
        self._neighbours: Neighbours | None = None
        self._notes = Notes(started_at(self.pid) or now())
        self._connecting = threading.Lock()
        self._done = threading.Event()
        self._leaving: _Leaving | None = None
        self._counted = False
        self._hook_before = threading.excepthook

    def start(self) -> None:
        """Watch from now on."""
        threading.excepthook = self._on_thread_error
        super().start()

    def run(self) -> None:
        while not self._done.wait(_POLL_SECONDS if self._store else _POLL_SECONDS_BEFORE_GROUP):
            culprit = self._failed_peer()
            if culprit is not None and not self._done.is_set():
                self._end(culprit, None)
            with suppress(Exception):  # frames of running threads change under our hands
                self._look_at_own_exceptions()

    def stop(self) -> None:
        """A clean end."""
        self._done.set()
        if threading.excepthook == self._on_thread_error:
            threading.excepthook = self._hook_before
        if self._neighbours is not None:
            with suppress(Exception):
                self._neighbours.leave()
        # Python aborts when it ends while a thread is inside the store's native code.
        self.join(2 * STORE_SECONDS)

    def fail(self, error: BaseException, held_up_at: str = "") -> NoReturn:
        """Say what happened and end the process; does not return."""
        self._end(None, error, held_up_at)

    def _end(self, culprit: Claim | None, error: BaseException | None, held_up_at: str = "") -> NoReturn:
        if not _ending.acquire(blocking=False):
            while True:  # another thread is ending this process
                with suppress(BaseException):
                    threading.Event().wait()
        lastwords.arm_last_resort()
        self._done.set()
        code = self._exit_code if error is None else _exit_code(error, self._exit_code)
        try:
            own = ""
            if error is not None:
                culprit = self._report(error, held_up_at)
                line, _ = lastwords.describe(error)
                own = "" if _LOST_PEER.search(line) else f" (its own error: {line})"
            if culprit is not None:
                who = f"{culprit.who} on {culprit.host}"
                lastwords.say(f"{self._who()} exits because {who} failed: {culprit.error}{own}\n")
            lastwords.flush_everything(self._flush)
            self._keep_store_for_peers()
            if culprit is not None and "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(_AGENT_SECONDS)
        except BaseException as fault:
            lastwords.say(f"{self._who()} exits; its report failed: {lastwords.describe(fault)[1]}")
        finally:
            lastwords.leave(code)

    def _report(self, error: BaseException, held_up_at: str) -> Claim | None:
        """Report this rank's error as the job's, unless another rank failed before: that rank then."""
        line, text = lastwords.describe(error)
        # Peers that end while the group is being made break its connections too: the store may be theirs.
        forming = left_group_start(error)
        lost_peer = bool(_LOST_PEER.search(line)) and (forming or self._joined() > 1)
        if lost_peer and (culprit := self._lost_peer(forming=forming)) is not None:
            return culprit
        own = Claim.of_this_process(
            rank=(rank := self._rank_now()),
            hint=lastwords.rank_variable(error) if rank is None else "",
            error=f"lost its connection to a rank that said nothing: {line}" if lost_peer else line,
            joined=self._joined() > 1,
        )
        claimed = self._claim(own)
        if claimed is not None and claimed != own:
            return claimed
        since = now()
        posted = claimed is None and self._notes.post(own)
        held = f"the exception was held up by a wait for other ranks at {held_up_at}\n" if held_up_at else ""
        lost = "the connection to a rank was lost that said nothing\n" if lost_peer else ""
        lastwords.say(
            f"fatal error on {own.who}, host {own.host}, pid {own.pid}; exiting without teardown\n{held}{lost}{text}"
        )
        lastwords.record_for_torchrun(line, text)
        if posted:
            # The launcher's next attempt starts when this process is gone, and so is told from this one.
            lastwords.flush_everything(self._flush)
            time.sleep(max(0.0, since + LINGER_SECONDS - now()))
        return None

    def _claim(self, own: Claim) -> Claim | None:
        """The claim that counts; None without a store."""
        with suppress(Exception):
            if (store := self._connected()) is not None:
                return store.claim(own)
        return None

    def _failed_peer(self) -> Claim | None:
        """A peer that failed and said so, or that is gone without a word."""
        try:
            if (store := self._connected()) is not None:
                if (claim := store.claimed()) is not None:
                    return claim
                if self._neighbours is not None:
                    before = {gone.rank for gone in self._neighbours.gone()}
                    self._neighbours.refresh(at_once=bool(before))
                    # Seen twice, so that a claim made or a clean end stated just before the end is known.
                    missing = [gone for gone in self._neighbours.gone() if gone.rank in before]
                    if missing and store.claimed() is None:
                        return store.claim(self._claim_for(missing[0].rank, missing[0].pid, missing[0].how))
        except Exception:
            # It went with its process. A new connection could be accepted by a dying one and never answered.
            self._store, self._store_lost = None, True
        with suppress(Exception):
            for note in self._notes.read():
                if (note.job is not None and note.job == job_of_environment()) or (
                    not note.joined and self._waits_for_group()
                ):
                    return note
        return None

    def _waits_for_group(self) -> bool:
        """Whether this rank waits in `init_process_group`, where a rank that failed before will never come."""
        waiting = waits_for_group()
        if waiting is None:
            return False
        rank, world_size = waiting
        if self._rank is None and rank >= 0:
            self._rank = rank
        return world_size != 1 and not (world_size == -1 and os.environ.get("WORLD_SIZE") == "1")

    def _lost_peer(self, *, forming: bool) -> Claim | None:
        """Whose end broke a connection of this rank: it takes a moment until it is known."""
        deadline = time.monotonic() + _PEERS_SECONDS
        while time.monotonic() < deadline:
            if (claim := self._failed_peer()) is not None:
                return claim
            # A peer that found the culprit without a store left a note before it ended itself.
            if notes := [note for note in self._notes.read() if note.joined or forming]:
                return notes[0]
            if self._neighbours is not None and (gone := self._neighbours.gone()):
                found = self._claim_for(gone[0].rank, gone[0].pid, gone[0].how)
                if (claimed := self._claim(found)) is None:
                    self._notes.post(found)
                return claimed or found
            time.sleep(0.02)
        return None

    def _look_at_own_exceptions(self) -> None:
        found = [e for e in in_flight(self._home) if (e.fatal or e.waits) and not is_no_failure(e.error)]
        self._count(any(e.fatal for e in found))
        if found:
            self._look_at(min(found, key=lambda e: (not e.fatal, not e.waits)))
        else:
            self._leaving = None

    def _look_at(self, found: InFlight) -> None:
        moment, before = time.monotonic(), self._leaving
        if before is None or before.error is not found.error:
            before = self._leaving = _Leaving(
                error=found.error, since=moment, waits_since=moment, reported=False
            )
        if not found.waits:
            before.waits_since = moment
        waited = moment - before.waits_since
        if found.fatal and waited >= _CLEANUP_SECONDS and not self._everyone_is_leaving():
            self.fail(found.error, found.where)
        if moment - before.since >= _REPORT_SECONDS and not before.reported:
            before.reported = True
            _, text = lastwords.describe(found.error)
            what = "waits for other ranks" if found.waits else "cleans up"
            lastwords.say(f"{self._who()} {what} at {found.where}, handling this:\n{text}")

    def _count(self, leaving: bool) -> None:
        """Let the other ranks know that an exception is on its way out of this one."""
        if leaving != self._counted and self._store is not None:
            self._counted = leaving
            self._store.count("leaving", 1 if leaving else -1)

    def _everyone_is_leaving(self) -> bool:
        """All ranks raised and meet in their cleanup, such as one that saves a checkpoint: nobody is missing."""
        with suppress(Exception):
            return self._store is not None and self._store.count("leaving") >= self._world_size
        return False

    def _keep_store_for_peers(self) -> None:
        """Peers read the claim from a store that may live in this very process: wait until they have."""
        with suppress(Exception):
            if self._store is None:
                return
            self._store.count("read", 1)
            hosts_store = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            deadline = time.monotonic() + _PEERS_SECONDS
            while (
                hosts_store and time.monotonic() < deadline and self._store.count("read") < self._world_size
            ):
                time.sleep(0.02)

    def _connected(self) -> JobStore | None:
        with self._connecting:
            if self._store is None and not self._store_lost and self._joined() > 1:
                import torch.distributed as dist

                self._store = JobStore.connect(dist.distributed_c10d._get_default_store())
                if self._store is not None and self._rank is not None:
                    with suppress(Exception):  # a store without lists
                        self._neighbours = Neighbours(self._store, self._rank)
                        self._neighbours.refresh()
            return self._store

    def _joined(self) -> int:
        """The size of the process group, now or before it was destroyed; 1 without one."""
        if (dist := initialised()) is not None:
            with suppress(Exception):
                self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        return self._world_size

    def _rank_now(self) -> int | None:
        self._joined()
        if self._rank is not None:
            return self._rank
        return next((int(v) for name in _RANK_VARIABLES if (v := os.environ.get(name, "")).isdigit()), None)

    def _who(self) -> str:
        rank = self._rank_now()
        return f"an unknown rank (pid {self.pid})" if rank is None else f"rank {rank}"

    def _claim_for(self, rank: int, pid: int, how: str) -> Claim:
        claim = Claim.of_this_process(rank=rank, error=how, joined=True)
        return replace(claim, pid=pid, process="")

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        if os.getpid() != self.pid or in_ray() or self._done.is_set():
            self._hook_before(args)
        elif args.exc_value is not None and not isinstance(args.exc_value, (SystemExit, *_NOT_FATAL)):
            if self._hook_before is not threading.__excepthook__ and not isinstance(
                getattr(self._hook_before, "__self__", None), Watch
            ):
                lastwords.bounded([functools.partial(self._hook_before, args)], lastwords.SAY_SECONDS)
            self.fail(args.exc_value)


def initialised() -> Any:
    """`torch.distributed` when this process has a default process group, else None."""
    dist = sys.modules.get("torch.distributed")
    with suppress(AttributeError):  # while it is being imported
        return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
    return None


def in_ray() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized())


def is_no_failure(error: BaseException) -> bool:
    """By which control leaves a block without anything being wrong."""
    return isinstance(error, _NOT_FATAL) or (isinstance(error, SystemExit) and error.code in (None, 0))


def _exit_code(error: BaseException, default: int) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF or default
    return 130 if isinstance(error, KeyboardInterrupt) else default
