# SPDX-License-Identifier: Apache-2.0
"""How a four-rank job ends when one rank dies, for each way of dying, under torchrun and plain multiprocessing.

    python -m benchmarks guards_failfast
    python -m benchmarks guards_failfast --ways "raises in a step" --launchers torchrun --json results.json

The ranks run gloo over loopback. One of them fails while its peers wait in an all-reduce (or for the process group,
where it fails before that exists). Prints, per way and launcher, the seconds from the failure until the last rank is
gone, which ranks the log names as having failed, and whether the culprit's traceback is in the log. `--without` runs
the same without the guard, where jobs end by the collective timeout if at all.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_RANKS = 4
MESSAGE = "a row that this rank cannot process"
LAUNCHERS = ("multiprocessing", "torchrun")


class UnreadableError(Exception):
    """An exception whose text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@contextlib.contextmanager
def polite_group() -> Iterator[None]:
    """What trainers commonly do at their end, as a context manager."""
    import torch.distributed as dist

    try:
        yield
    finally:
        dist.barrier()
        dist.destroy_process_group()


def bad_row() -> None:
    """Fail. The time is written down first."""
    failing()
    raise ValueError(MESSAGE)


def failing() -> None:
    folder = Path(os.environ["GUARDS_FAILFAST"])
    (folder / "failed_at.part").write_text(str(time.time()))
    (folder / "failed_at.part").rename(folder / "failed_at")


def steps(rank: int, culprit: int, fail: Callable[[], Any]) -> None:
    import torch
    import torch.distributed as dist

    for step in range(10):
        if rank == culprit and step == 1:
            time.sleep(0.5)  # peers wait in their all-reduce by now
            fail()
        dist.all_reduce(torch.ones(1024))


def with_full_stdout() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    os.dup2(writer, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1 << 16)
    sys.stdout.write("nobody reads this\n" * 10)
    bad_row()


def unreadable() -> None:
    failing()
    raise UnreadableError


def in_a_thread() -> None:
    threading.Thread(target=bad_row).start()


def by_signal(number: int) -> Callable[[], None]:
    def end() -> None:
        failing()
        os.kill(os.getpid(), number)

    return end


def by_exit() -> None:
    failing()
    os._exit(7)


def hanging_hook() -> None:
    from nemo_rl_ext.guards.failfast import flush_on_exit

    flush_on_exit(threading.Event().wait)
    bad_row()


def body_polite(rank: int, culprit: int, start: Callable[[], None]) -> None:
    import torch.distributed as dist

    start()
    try:
        steps(rank, culprit, bad_row)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def body_reraise(rank: int, culprit: int, start: Callable[[], None]) -> None:
    import torch.distributed as dist

    start()
    try:
        steps(rank, culprit, bad_row)
    except Exception:
        dist.barrier()
        raise


def body_context(rank: int, culprit: int, start: Callable[[], None]) -> None:
    start()
    with polite_group():
        steps(rank, culprit, bad_row)


def body_destroyed(rank: int, culprit: int, start: Callable[[], None]) -> None:
    import torch.distributed as dist

    start()
    try:
        steps(rank, culprit, bad_row)
    finally:
        dist.destroy_process_group()


def body_early(rank: int, culprit: int, start: Callable[[], None]) -> None:
    if rank == culprit:
        while len(list(Path(os.environ["GUARDS_FAILFAST"]).glob("pid*"))) < NUM_RANKS:
            time.sleep(0.02)
        time.sleep(0.5)  # peers wait for the process group by now
        bad_row()
    start()


def body_at_once(rank: int, culprit: int, start: Callable[[], None]) -> None:
    if rank == culprit:
        bad_row()
    time.sleep(0.5)
    start()


def dying(fail: Callable[[], Any]) -> Callable[[int, int, Callable[[], None]], None]:
    def body(rank: int, culprit: int, start: Callable[[], None]) -> None:
        start()
        steps(rank, culprit, fail)

    return body


@dataclass(frozen=True)
class Way:
    body: Callable[[int, int, Callable[[], None]], None]
    culprit: int = 2
    leaves: str | None = f"ValueError: {MESSAGE}"
    """What of the culprit's traceback has to be in the log; None where a process cannot leave one."""


WAYS = {
    "raises in a step": Way(dying(bad_row)),
    "rank 0, the store's host, raises": Way(dying(bad_row), culprit=0),
    "raises, stdout is a full pipe": Way(dying(with_full_stdout)),
    "raises, a flush hook hangs": Way(dying(hanging_hook)),
    "raises an exception whose text raises": Way(dying(unreadable), leaves="UnreadableError"),
    "raises, own `finally: barrier(); destroy_process_group()`": Way(body_polite),
    "the same as a context manager": Way(body_context),
    "raises, own `except: barrier(); raise`": Way(body_reraise),
    "raises, own `finally: destroy_process_group()`": Way(body_destroyed),
    "a background thread raises": Way(dying(in_a_thread)),
    "raises before the process group, peers wait for it": Way(body_early),
    "raises before the process group, peers come later": Way(body_at_once),
    "rank 0 raises before the process group": Way(body_early, culprit=0),
    "SIGKILL": Way(dying(by_signal(signal.SIGKILL)), leaves=None),
    "SIGKILL of rank 0": Way(dying(by_signal(signal.SIGKILL)), culprit=0, leaves=None),
    "SIGTERM": Way(dying(by_signal(signal.SIGTERM)), leaves=None),
    "SIGSEGV": Way(dying(by_signal(signal.SIGSEGV)), leaves="Fatal Python error: Segmentation fault"),
    "os._exit(7)": Way(dying(by_exit), leaves=None),
}


def run_rank(rank: int, name: str, guarded: bool, port: int | None, timeout: float) -> None:
    import torch.distributed as dist

    from nemo_rl_ext.guards.failfast import fail_fast

    (Path(os.environ["GUARDS_FAILFAST"]) / f"pid{rank}").write_text(str(os.getpid()))

    def start() -> None:
        dist.init_process_group(
            "gloo",
            init_method="env://" if port is None else f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=NUM_RANKS,
            timeout=datetime.timedelta(seconds=timeout),
        )

    way = WAYS[name]
    with fail_fast() if guarded else contextlib.nullcontext():
        way.body(rank, way.culprit, start)


def plain_job(name: str, guarded: bool, timeout: float) -> None:
    """Plain multiprocessing: the parent only waits. torch is imported once, before forking."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    assert dist.is_available()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_rank, args=(r, name, guarded, port, timeout)) for r in range(NUM_RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def command(name: str, launcher: str, guarded: bool, timeout: float, restarts: int = 0) -> list[str]:
    arguments = ["--way", name, "--collective-timeout", str(timeout), *([] if guarded else ["--without"])]
    if launcher == "multiprocessing":
        return [sys.executable, __file__, "--job", *arguments]
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(NUM_RANKS),
        "--standalone",
    ]
    torchrun += ["--local-addr", "127.0.0.1", "--max-restarts", str(restarts)]
    return [sys.executable, *torchrun, __file__, "--rank-of-job", *arguments]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def measure(name: str, launcher: str, *, guarded: bool, timeout: float, limit: float) -> dict[str, Any]:
    """Run one job. `seconds` is None when ranks had to be killed at the limit."""
    way = WAYS[name]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "GUARDS_FAILFAST": folder,
        }
        environment.pop("RANK", None)
        launched = subprocess.Popen(
            command(name, launcher, guarded, timeout),
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        deadline = time.time() + limit
        pids: list[int] = []
        gone: float | None = None
        while time.time() < deadline and gone is None:
            time.sleep(0.02)
            files = list(Path(folder).glob("pid*"))
            if len(files) == NUM_RANKS:
                pids = [int(text) for file in files if (text := file.read_text())]
            over = len(pids) == NUM_RANKS and not any(map(runs, pids))
            if over or launched.poll() is not None:
                gone = time.time()
        hung = sum(map(runs, pids)) if gone is None else 0
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if gone is None:
                os.killpg(launched.pid, signal.SIGKILL)
            launched.wait(60)
        launcher_gone = time.time()
        failed_at = Path(folder) / "failed_at"
        log.seek(0)
        text = log.read()
        if not failed_at.exists():
            raise RuntimeError(f"{name} under {launcher}: the job did not reach its failure:\n{text}")
        failed = float(failed_at.read_text())
    return {
        "way": name,
        "launcher": launcher,
        "guarded": guarded,
        "culprit": way.culprit,
        "seconds": None if gone is None else round(gone - failed, 2),
        "launcher_seconds": None if gone is None else round(launcher_gone - failed, 2),
        "left_alive": hung,
        "named": named(text),
        "traceback": None if way.leaves is None else way.leaves in text,
        "last_error": (re.findall(r"^(?:\[\w+\]: ?)?(\w*Error: .*)$", text, re.MULTILINE) or [None])[-1],
        "log": text,
    }


def named(text: str) -> list[str]:
    """Whom the log calls the first to fail: the guard's lines and torchrun's root cause."""
    who = r"(rank \d+|an unknown rank \([^)]*\))"
    found = re.findall(rf"fatal error on {who}|exits because {who} on ", text)
    root = re.findall(r"Root Cause[^:]*:\n(?:.*\n){0,4}?\s+rank +: (\d+)", text)
    return sorted({a or b for a, b in found} | {f"rank {rank}" for rank in root})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), help="Some of the ways of dying, by name.")
    parser.add_argument("--launchers", nargs="*", default=list(LAUNCHERS), choices=LAUNCHERS)
    parser.add_argument("--collective-timeout", type=float, default=60.0)
    parser.add_argument("--without", action="store_true", help="Run the ranks without the guard.")
    parser.add_argument("--json", type=Path, help="Write the results, with the jobs' logs, here.")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank-of-job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        plain_job(args.way, not args.without, args.collective_timeout)
        return
    if args.rank_of_job:
        run_rank(int(os.environ["RANK"]), args.way, not args.without, None, args.collective_timeout)
        return
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"unknown ways {sorted(unknown)}; known are {list(WAYS)}")
    results = []
    print(f"| {NUM_RANKS} gloo ranks, collective timeout {args.collective_timeout:.0f} s | launcher ", end="")
    print("| until all ranks are gone | named | traceback in the log |\n|---|---|---|---|---|", flush=True)
    for name in args.ways:
        for launcher in args.launchers:
            limit = args.collective_timeout + 60
            found = measure(
                name, launcher, guarded=not args.without, timeout=args.collective_timeout, limit=limit
            )
            results.append(found)
            seconds = "never" if found["seconds"] is None else f"{found['seconds']:.2f} s"
            trace = {None: "none to be had", True: "yes", False: "no"}[found["traceback"]]
            print(f"| {name} | {launcher} | {seconds} | {', '.join(found['named'])} | {trace} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
