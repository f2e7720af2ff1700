# SPDX-License-Identifier: Apache-2.0
"""Fail fast on four gloo ranks: every way of dying ends the job long before the collective timeout, and no way of
living does."""

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from benchmarks.guards_failfast import WAYS, command, measure
from nemo_rl_ext.guards.claims import Claim, JobStore

pytestmark = pytest.mark.slow

TIMEOUT, LIMIT = 600.0, 120.0


def assert_ends_at_once(name, launcher):
    found = measure(name, launcher, guarded=True, timeout=TIMEOUT, limit=LIMIT)
    log, way = found["log"], WAYS[name]
    assert found["seconds"] is not None, f"{found['left_alive']} ranks were still there:\n{log}"
    assert found["traceback"] in (True, None), log
    before_group = launcher == "multiprocessing" and "before the process group" in name
    who = rf"an unknown rank \(process 'ForkProcess-{way.culprit + 1}', `rank` is {way.culprit} in run_rank\)"
    assert len(found["named"]) == 1, log
    assert re.fullmatch(who if before_group else f"rank {way.culprit}", found["named"][0]), log
    assert log.count("Traceback (most recent call last)") <= 1 or launcher == "torchrun", log
    if launcher == "multiprocessing":
        assert log.count(" exits because ") == 3, log
    return log


@pytest.mark.parametrize("name", WAYS)
def test_a_dying_rank_ends_all_and_is_named(name):
    log = assert_ends_at_once(name, "multiprocessing")
    if name.startswith("SIG") and WAYS[name].culprit:
        number = getattr(signal, name)
        assert f"ended by signal {number:d} ({name})" in log


@pytest.mark.parametrize(
    "name",
    [
        "raises in a step",
        "raises an exception whose text raises",
        "raises, own `finally: barrier(); destroy_process_group()`",
        "rank 0 raises before the process group",
    ],
)
def test_torchruns_own_summary_names_the_culprit(name):
    log = assert_ends_at_once(name, "torchrun")
    assert re.search(rf"Root Cause[^:]*:\n(?:.*\n){{0,4}}?\s+rank +: {WAYS[name].culprit} ", log), log


def test_a_restart_by_torchrun_is_not_ended_by_the_attempt_before(tmp_path, monkeypatch):
    # With torchrun's shared store gloo meets its own addresses of the attempt before, guarded or not.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent("""
            import os, time
            import torch, torch.distributed as dist
            from nemo_rl_ext.guards.failfast import fail_fast

            @fail_fast()
            def main():
                dist.init_process_group("gloo")
                for step in range(8):
                    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "2" and step == 2:
                        raise ValueError("only once")
                    time.sleep(0.2)  # long enough for the watching threads to look
                    dist.all_reduce(torch.ones(8))
                os.write(1, f"finished {os.environ['RANK']}\\n".encode())
                dist.destroy_process_group()

            main()
        """)
    )
    launcher = command("raises in a step", "torchrun", True, TIMEOUT, restarts=1)
    launcher = [*launcher[: next(i for i, part in enumerate(launcher) if part.endswith(".py"))], str(script)]
    code, text = run(launcher)
    assert code == 0, text
    assert sorted(re.findall(r"finished (\d)", text)) == ["0", "1", "2", "3"]
    assert text.count("fatal error on rank 2") == 1


def test_a_store_that_outlives_its_attempt_keeps_the_attempts_apart(monkeypatch):
    """By default torchrun has one store for all attempts."""
    from torch.distributed import HashStore

    store = HashStore()
    claim = Claim.of_this_process(rank=2, error="ValueError: x", joined=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = JobStore(store)
    assert first.claimed() is None and first.claim(claim) == claim == first.claimed()
    assert first.claim(Claim.of_this_process(rank=1, error="later", joined=True)) == claim
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert JobStore(store).claimed() is None


def run(arguments):
    done = subprocess.Popen(
        arguments,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = done.communicate(timeout=LIMIT)
    finally:
        try:
            os.killpg(done.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return done.returncode, text


JOB = """
    import datetime, multiprocessing, socket, sys, time
    import torch, torch.distributed as dist
    from nemo_rl_ext.guards.failfast import fail_fast
    torch.set_num_threads(1)

    def start(rank, port, ranks=4):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=ranks,
                                timeout=datetime.timedelta(seconds=600))

    def free_port():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def guarded(rank, port, attempt):
        with fail_fast():
            body(rank, port, attempt)

    def attempt(number):
        context, port = multiprocessing.get_context("fork"), free_port()
        ranks = [context.Process(target=guarded, args=(r, port, number)) for r in range(4)]
        for p in ranks: p.start()
        for p in ranks: p.join()
        print([p.exitcode for p in ranks], flush=True)

    {body}

    for number in range({attempts}): attempt(number)
"""


def job(body, attempts=1):
    script = textwrap.dedent(JOB).format(body=textwrap.dedent(body), attempts=attempts)
    code, text = run([sys.executable, "-c", script])
    assert code == 0, text
    return text


def test_a_rank_that_handles_its_error_together_with_late_peers_lives():
    """A batch that one rank cannot use, agreed upon in an `except` clause and in a `finally` block further in."""
    text = job("""
        def step(rank):
            try:
                if rank == 2: raise ValueError("a bad batch")
                time.sleep(3)
            finally:
                dist.barrier()

        def body(rank, port, attempt):
            start(rank, port)
            try:
                step(rank)
                bad = torch.zeros(1)
                time.sleep(3)
            except ValueError:
                bad = torch.ones(1)
                dist.all_reduce(bad)
            else:
                dist.all_reduce(bad)
            assert bad.item() == 1
    """)
    assert text.endswith("[0, 0, 0, 0]\n"), text


def test_ranks_that_all_raise_may_finish_their_common_cleanup():
    text = job("""
        def body(rank, port, attempt):
            start(rank, port)
            try:
                raise TimeoutError("the time is up")
            finally:
                time.sleep(3 if rank == 0 else 0)
                dist.barrier()
                print("saved", rank, flush=True)
    """)
    assert text.count("saved") == 4 and "[1, 1, 1, 1]" in text, text


def test_a_clean_exit_may_wait_in_its_cleanup():
    text = job("""
        def body(rank, port, attempt):
            start(rank, port)
            try:
                time.sleep(3 * rank % 4)
                sys.exit(0)
            finally:
                dist.barrier()
    """)
    assert text.endswith("[0, 0, 0, 0]\n"), text


def test_ranks_may_end_one_after_the_other():
    text = job("""
        def body(rank, port, attempt):
            start(rank, port)
            dist.barrier()
            time.sleep(rank)
    """)
    assert text.endswith("[0, 0, 0, 0]\n"), text


def test_a_launcher_that_tries_again_is_not_ended_by_its_attempt_before():
    text = job(
        """
        def body(rank, port, attempt):
            if attempt == 0 and rank == 1: raise ValueError("before the process group")
            start(rank, port)
            time.sleep(0.5)
            dist.barrier()
        """,
        attempts=2,
    )
    assert "[1, 1, 1, 1]\n" in text and text.endswith("[0, 0, 0, 0]\n"), text


def test_a_store_that_goes_while_the_group_is_made_names_who_failed_before():
    """Rank 0 leaves because of rank 2, and its store with it: rank 1 loses a connection, and is no culprit."""
    text = job("""
        def lost(*args, **kwargs):
            raise dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.")

        def body(rank, port, attempt):
            if rank == 2: raise ValueError("a row that this rank cannot process")
            if rank == 1:
                time.sleep(0.2)  # within the half second in which the failed one stays
                dist.distributed_c10d._new_process_group_helper = lost  # what gloo says when the store is gone
                dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=4)
    """)
    assert text.count("fatal error on") == 1, text
    assert re.search(r" exits because .*Process-3.* failed: ValueError: a row that", text), text
    assert "[0, 1, 1, 0]" in text, text


def test_guarded_processes_of_one_launcher_that_are_no_ranks_do_not_end_each_other():
    text = job("""
        def body(rank, port, attempt):
            if rank == 1: raise ValueError("one of four experiments")
            time.sleep(0.5)
            start(0, free_port(), ranks=1)
            time.sleep(1)
    """)
    assert text.endswith("[0, 1, 0, 0]\n"), text


def test_an_error_that_may_be_caught_is_reported_while_its_rank_waits():
    """Peers that never come: the job ends by its timeout, but the log says what happened."""
    script = textwrap.dedent(JOB).replace("seconds=600", "seconds=9")
    body = """
        def body(rank, port, attempt):
            start(rank, port)
            if rank != 2:
                dist.all_reduce(torch.ones(8))
                time.sleep(1)
                dist.all_reduce(torch.ones(8))
            try:
                dist.all_reduce(torch.ones(8))
                raise ValueError("only here")
            except ValueError:
                dist.barrier()
    """
    _, text = run([sys.executable, "-c", script.format(body=textwrap.dedent(body), attempts=1)])
    assert "rank 2 waits for other ranks at <string>" in text and "ValueError: only here" in text, text
