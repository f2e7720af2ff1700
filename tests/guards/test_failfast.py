# SPDX-License-Identifier: Apache-2.0
"""Fail fast: real processes, judged by how they end and by what they print last."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from nemo_rl_ext.guards.failfast import fail_fast, flush_on_exit


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


def run_in_background(script, **environment):
    """Start a script whose standard output nobody reads."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_full_pipe_does_not_keep_the_process_alive_and_the_traceback_comes_first():
    process = run_in_background("""
        import sys
        from nemo_rl_ext.guards.failfast import fail_fast
        sys.stdout = open(1, "w", buffering=1 << 22)
        with fail_fast():
            sys.stdout.write("nobody reads this" * 100_000)
            raise ValueError("bad row 17")
    """)
    assert process.wait(timeout=60) == 1
    assert process.stderr.read().rstrip().endswith("ValueError: bad row 17")
    process.communicate()


def test_both_streams_full_still_ends():
    process = run_in_background("""
        import os, threading
        from nemo_rl_ext.guards.failfast import fail_fast
        os.dup2(1, 2)
        filling = threading.Thread(target=lambda: os.write(1, b"x" * 10_000_000), daemon=True)
        filling.start()
        with fail_fast(exit_code=9):
            filling.join(0.5)
            raise ValueError("nowhere to go")
    """)
    assert process.wait(timeout=60) == 9
    process.communicate()


UNREADABLE = {
    "raises": "raise RuntimeError('no text')",
    "exits": "raise SystemExit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "hangs": "__import__('threading').Event().wait()",
    "no string": "return 7",
    "itself": "raise self",
    "recurses": "return str(self)",
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
def test_an_exception_whose_text_cannot_be_read_is_reported_by_its_class(body):
    code, _, err, _ = run(f"""
        from nemo_rl_ext.guards.failfast import fail_fast
        class OddError(Exception):
            def __str__(self): {body}
            __repr__ = __str__
        def failing_function(): raise OddError
        with fail_fast(exit_code=5): failing_function()
    """)
    assert code == 5 and "fatal error on " in err
    assert "in failing_function" in err and "OddError" in err.rstrip().splitlines()[-1], err


def test_a_report_without_end_is_cut():
    code, _, err, _ = run(SYNC.format(body="raise ValueError('x' * 2_000_000 + ' end of text')"))
    assert code == 1 and len(err) < 400_000 and err.endswith("end of text\n") and "characters left out" in err


def test_an_error_in_a_background_thread_is_fatal_and_a_handler_of_it_still_runs():
    script = """
        import sys, threading, time
        from nemo_rl_ext.guards.failfast import fail_fast
        threading.excepthook = lambda args: print("own hook:", args.exc_value, flush=True)
        def work(): {body}
        with fail_fast(exit_code=6):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            print("went on", flush=True)
        assert threading.excepthook.__name__ == "<lambda>"
    """
    code, out, err, _ = run(script.format(body="raise ValueError('in a thread')"))
    assert code == 6 and out == "own hook: in a thread\n" and err.rstrip().endswith("ValueError: in a thread")
    code, out, err, _ = run(script.format(body="sys.exit(3)"))
    assert (code, out, err) == (0, "went on\n", "")


def test_a_thread_of_a_forked_child_does_not_speak_for_its_rank():
    code, out, err, _ = run("""
        import multiprocessing, threading
        from nemo_rl_ext.guards.failfast import fail_fast
        def work(): raise ValueError("in a data loader")
        def child():
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        with fail_fast():
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            process.join()
            print("went on", process.exitcode)
    """)
    assert (code, out) == (0, "went on 0\n") and "fatal error" not in err and "in a data loader" in err


def test_an_interrupt_during_the_report_ends_the_process_as_well():
    code, _, _, _ = run("""
        import _thread, threading, time
        from nemo_rl_ext.guards.failfast import fail_fast
        def interrupt():
            time.sleep(0.2)
            _thread.interrupt_main()
            return time.sleep(60)
        with fail_fast(exit_code=4, flush=(interrupt,)):
            raise ValueError("x")
    """)
    assert code == 4


def test_what_is_registered_is_flushed_from_anywhere(tmp_path):
    script = f"""
        from nemo_rl_ext.guards.failfast import fail_fast, flush_on_exit
        lost = open({str(tmp_path / "lost")!r}, "w")
        kept = flush_on_exit(open({str(tmp_path / "kept")!r}, "w"))
        @flush_on_exit
        def counts(): open({str(tmp_path / "called")!r}, "w").write("yes")
        with fail_fast():
            lost.write("buffered")
            kept.write("buffered")
            raise RuntimeError("x")
    """
    assert run(script)[0] == 1
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "lost": "",
        "kept": "buffered",
        "called": "yes",
    }
    with pytest.raises(TypeError, match="a callable or an object with flush"):
        flush_on_exit(7)


def test_a_rank_without_a_number_is_not_called_rank_0():
    script = SYNC.format(body="raise ValueError('x')").replace("fail_fast()", "fail_fast({})")
    environment = {
        name: "" for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    }
    _, _, err, _ = run(script.format(""), **environment)
    assert "fatal error on an unknown rank (process 'MainProcess'), host " in err
    _, _, err, _ = run(script.format("rank=3"), **environment)
    assert "fatal error on rank 3, host " in err
    _, _, err, _ = run(script.format(""), **{**environment, "SLURM_PROCID": "5"})
    assert "fatal error on rank 5, host " in err


def test_torchruns_error_file_holds_the_traceback(tmp_path):
    import json

    for body in ("raise ValueError('x')", "raise type('Odd', (Exception,), dict(__str__=lambda s: 1 / 0))()"):
        path = tmp_path / "error.json"
        assert run(SYNC.format(body=body), TORCHELASTIC_ERROR_FILE=str(path))[0] == 1
        text = json.dumps(json.loads(path.read_text()))
        assert "in main" in text, text
        path.unlink()


def test_a_crash_in_native_code_leaves_its_python_traceback():
    code, _, err, _ = run(SYNC.format(body="import ctypes; ctypes.string_at(0)"))
    assert code == -signal.SIGSEGV and "Segmentation fault" in err and "in main" in err


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
