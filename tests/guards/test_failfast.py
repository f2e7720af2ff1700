# SPDX-License-Identifier: Apache-2.0
"""Fail fast: real processes, judged by how they end and by what they print last."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from nemo_rl_ext.guards.failfast import fail_fast


def run(script, *arguments, timeout=60, **environment):
    """Run a script in its own session; nothing of it survives, whatever happens."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, *arguments, "-c", textwrap.dedent(script)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
            left_behind = True
        except ProcessLookupError:
            left_behind = False
    return process.returncode, out, err, left_behind


SYNC = """
    import atexit, sys
    from nemo_rl_ext.guards.failfast import fail_fast
    atexit.register(print, "polite shutdown ran")
    @fail_fast()
    def main(): {body}
    main()
"""
ASYNC = """
    import asyncio, atexit
    from nemo_rl_ext.guards.failfast import fail_fast
    atexit.register(print, "polite shutdown ran")
    @fail_fast()
    async def main(): {body}
    asyncio.run(main())
"""
CONTEXT = """
    import atexit, sys
    from nemo_rl_ext.guards.failfast import fail_fast
    atexit.register(print, "polite shutdown ran")
    with fail_fast(): {body}
"""
FORMS = pytest.mark.parametrize("form", [SYNC, ASYNC, CONTEXT], ids=["decorator", "async", "context manager"])


@FORMS
def test_an_error_ends_the_process_at_once_with_rank_host_and_traceback_last(form):
    code, out, err, _ = run(form.format(body="raise ValueError('bad row 17')"), RANK="5")
    assert code == 1 and "polite shutdown ran" not in out
    assert "fatal error on rank 5, host " in err and "exiting without teardown" in err
    assert err.rstrip().splitlines()[-1] == "ValueError: bad row 17"


@FORMS
def test_the_clean_path_is_untouched(form):
    code, out, err, left_behind = run(form.format(body="print('worked')"))
    assert (code, out, err, left_behind) == (0, "worked\npolite shutdown ran\n", "", False)


def test_exit_codes_are_kept():
    assert run(SYNC.format(body="sys.exit(7)"))[0] == 7
    assert run(SYNC.format(body="sys.exit('said why')"))[0] == 1
    code, out, _, _ = run(SYNC.format(body="sys.exit(0)"))
    assert code == 0 and "polite shutdown ran" in out
    code, _, err, _ = run(SYNC.format(body="raise KeyboardInterrupt"))
    assert code == 130 and "KeyboardInterrupt" in err
    assert run(SYNC.format(body="raise OSError").replace("fail_fast()", "fail_fast(exit_code=9)"))[0] == 9
    with pytest.raises(ValueError, match="exit_code must lie in 1..255"):
        fail_fast(exit_code=0)


def test_values_and_cancellation_pass_through():
    import asyncio

    @fail_fast()
    def double(x):
        return 2 * x

    @fail_fast()
    async def wait_for_ever():
        await asyncio.Event().wait()

    async def cancel_it():
        task = asyncio.ensure_future(wait_for_ever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert double(3) == 6 and double.__name__ == "double"
    asyncio.run(cancel_it())


def test_loggers_are_flushed_and_a_hanging_one_does_not_keep_the_job_alive(tmp_path):
    script = f"""
        import logging, logging.handlers, threading
        from nemo_rl_ext.guards.failfast import fail_fast
        target = logging.FileHandler({str(tmp_path / "log")!r})
        logging.getLogger().addHandler(logging.handlers.MemoryHandler(1000, 100, target))
        with fail_fast(flush=(threading.Event().wait, lambda: open({str(tmp_path / "own")!r}, "w").close())):
            logging.getLogger().warning("last words")
            raise RuntimeError("x")
    """
    assert run(script)[0] == 1
    assert (tmp_path / "log").read_text() == "last words\n" and (tmp_path / "own").exists()


@pytest.mark.slow
def test_tensorboard_events_reach_the_disk(tmp_path):
    pytest.importorskip("tensorboard")
    script = f"""
        from torch.utils.tensorboard import SummaryWriter
        from nemo_rl_ext.guards.failfast import fail_fast
        with fail_fast():
            writer = SummaryWriter({str(tmp_path)!r}, flush_secs=10_000)
            writer.add_scalar("train/loss", 0.25, 3)
            raise RuntimeError("x")
    """
    assert run(script)[0] == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 0.25)]


def test_a_wandb_run_is_finished_as_failed(tmp_path):
    """wandb talks to a network, so its module is a fake here."""
    script = f"""
        import pathlib, sys, types
        from nemo_rl_ext.guards.failfast import fail_fast
        finish = lambda exit_code: pathlib.Path({str(tmp_path / "code")!r}).write_text(str(exit_code))
        sys.modules["wandb"] = types.SimpleNamespace(run=types.SimpleNamespace(finish=finish))
        with fail_fast():
            raise RuntimeError("x")
    """
    assert run(script)[0] == 1
    assert (tmp_path / "code").read_text() == "1"


def test_children_do_not_outlive_the_process():
    script = """
        import multiprocessing, time
        from nemo_rl_ext.guards.failfast import fail_fast
        with fail_fast():
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            raise RuntimeError("x")
    """
    code, _, _, left_behind = run(script)
    assert code == 1 and not left_behind


JOB = """
    import datetime, multiprocessing, socket, sys, time
    import torch, torch.distributed as dist
    from nemo_rl_ext.guards.failfast import fail_fast
    torch.set_num_threads(1)
    MODE, CULPRIT = {mode!r}, {culprit}

    def body(rank, port):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=4,
                                timeout=datetime.timedelta(seconds=4))
        for step in range(5):
            if rank == CULPRIT and step == 1:
                raise ValueError(f"rank {{rank}} met a bad row")
            dist.all_reduce(torch.ones(8))

    def rank_main(rank, port):
        if MODE == "guarded":
            with fail_fast():
                body(rank, port)
            assert not dist.is_initialized()
            return
        try:
            body(rank, port)
        finally:
            dist.barrier()
            dist.destroy_process_group()

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [multiprocessing.get_context("fork").Process(target=rank_main, args=(r, port)) for r in range(4)]
    for p in ranks: p.start()
    for p in ranks: p.join()
    print([p.exitcode for p in ranks])
"""


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 2], ids=["rank 0, which hosts the store", "rank 2"])
def test_four_gloo_ranks_are_gone_with_only_the_culprits_traceback(culprit):
    code, out, err, left_behind = run(JOB.format(mode="guarded", culprit=culprit), timeout=120)
    assert out == "[1, 1, 1, 1]\n" and code == 0 and not left_behind, err
    assert err.count("Traceback (most recent call last)") == 1, err
    assert f"ValueError: rank {culprit} met a bad row\n" in err
    for victim in {0, 1, 2, 3} - {culprit}:
        assert f"rank {victim} exits because rank {culprit} on " in err, err
    assert "imed out" not in err


@pytest.mark.slow
def test_a_graceful_teardown_waits_for_the_collective_timeout():
    _, out, err, left_behind = run(JOB.format(mode="graceful", culprit=2), timeout=120)
    assert "imed out" in err and not left_behind
    assert out == "[1, 1, 1, 1]\n"


@pytest.mark.slow
def test_four_gloo_ranks_end_cleanly_and_tear_down():
    code, out, err, left_behind = run(JOB.format(mode="guarded", culprit=None), timeout=120)
    assert out == "[0, 0, 0, 0]\n" and code == 0 and not left_behind, err
    assert "Traceback" not in err


@pytest.mark.slow
def test_inside_ray_it_says_so_and_the_exception_propagates_typed():
    pytest.importorskip("ray")
    script = """
        import ray
        from nemo_rl_ext.guards.failfast import fail_fast
        ray.init(num_cpus=1, include_dashboard=False, namespace="guards-fail-fast", log_to_driver=True)

        @ray.remote
        class Actor:
            def work(self):
                with fail_fast():
                    raise LookupError("typed")

        actor = Actor.remote()
        try:
            ray.get(actor.work.remote())
        except LookupError as error:
            print("actor:", type(error).__mro__[1].__name__)
        try:
            with fail_fast():
                raise KeyError("driver")
        except KeyError:
            print("driver: KeyError")
        ray.shutdown()
    """
    code, out, err, _ = run(script, timeout=120)
    assert code == 0, err
    assert "driver: KeyError" in out and "actor:" in out
    assert "fail_fast does nothing inside a Ray driver or actor" in err
