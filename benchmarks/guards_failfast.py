# SPDX-License-Identifier: Apache-2.0
"""How long a four-rank job lives after one rank raised: `fail_fast` against a graceful teardown.

    python benchmarks/guards_failfast.py --collective-timeout 20

Rank 2 raises in its second step while its peers wait in an all-reduce (gloo over loopback). `graceful` is what
trainers commonly do in a `finally` block: a barrier, then `destroy_process_group`. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time

NUM_RANKS, CULPRIT = 4, 2


def train(rank: int) -> None:
    import torch
    import torch.distributed as dist

    for step in range(10):
        if rank == CULPRIT and step == 1:
            print(f"FAILED_AT {time.time()}", flush=True)
            raise ValueError("a row that this rank cannot process")
        dist.all_reduce(torch.ones(1024))


def run_rank(rank: int, mode: str, port: int | None, timeout: float) -> None:
    import torch.distributed as dist

    from nemo_rl_ext.guards.failfast import fail_fast

    def start() -> None:
        dist.init_process_group(
            "gloo",
            init_method="env://" if port is None else f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=NUM_RANKS,
            timeout=datetime.timedelta(seconds=timeout),
        )

    if mode == "fail_fast":
        with fail_fast():
            start()
            train(rank)
        return
    try:
        start()
        train(rank)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def job(mode: str, timeout: float) -> None:
    """Plain multiprocessing: the parent only waits. torch is imported once, before forking."""
    import torch

    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(r, mode, port, timeout)) for r in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    print(f"GONE_AT {time.time()} {[p.exitcode for p in ranks]}", flush=True)


def measure(command: list[str], limit: float) -> dict[str, object]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        hung = False
    except subprocess.TimeoutExpired:
        hung = True
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    gone = time.time()
    if match := re.search(r"GONE_AT ([\d.]+)", output):
        gone = float(match.group(1))
    failed_at = re.search(r"FAILED_AT ([\d.]+)", output)
    if failed_at is None:
        raise SystemExit(f"the job did not reach its failing step:\n{output}")
    failed = float(failed_at.group(1))
    errors = re.findall(r"^(?:\[\w+\]: ?)?(\w*Error): (.*)$", output, re.MULTILINE)
    return {
        "seconds_from_error_to_gone": None if hung else round(gone - failed, 2),
        "hung": hung,
        "num_tracebacks": output.count("Traceback (most recent call last)"),
        "last_traceback": f"{errors[-1][0]}: {errors[-1][1][:80]}" if errors else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collective-timeout", type=float, default=20.0)
    parser.add_argument("--job", choices=["fail_fast", "graceful"], help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", choices=["fail_fast", "graceful"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job, args.collective_timeout)
        return
    if args.rank_of:
        run_rank(int(os.environ["RANK"]), args.rank_of, None, args.collective_timeout)
        return
    timeout = ["--collective-timeout", str(args.collective_timeout)]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(NUM_RANKS),
    ]
    launcher += ["--standalone", "--local-addr", "127.0.0.1"]
    out: dict[str, object] = {"ranks": NUM_RANKS, "collective_timeout_s": args.collective_timeout}
    limit = args.collective_timeout + 90
    for mode in ("fail_fast", "graceful"):
        plain = [sys.executable, __file__, "--job", mode, *timeout]
        out[f"{mode}, plain multiprocessing"] = measure(plain, limit)
        torchrun = [*launcher, __file__, "--rank-of", mode, *timeout]
        out[f"{mode}, torchrun"] = measure(torchrun, limit)
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
