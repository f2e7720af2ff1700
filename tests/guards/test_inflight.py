# SPDX-License-Identifier: Apache-2.0
"""Exceptions on their way out: which are lost for good while a handler still waits for other ranks."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_rl_ext.guards import inflight
from nemo_rl_ext.guards.inflight import Home, in_flight

# A wait for other ranks is known by the file it happens in.
WAITING = compile(
    "def barrier(): entered.set(); release.wait()", "/lib/torch/distributed/pretended.py", "exec"
)


class Guard:
    def __enter__(self):
        homes.append(Home.of(sys._getframe(1)))

    def __exit__(self, kind, error, trace):
        return True


homes: list[Home] = []
entered, release = threading.Event(), threading.Event()
scope = {"entered": entered, "release": release}
exec(WAITING, scope)
barrier = scope["barrier"]


def fail():
    raise ValueError("x")


def fail_politely():
    try:
        fail()
    finally:
        barrier()


@contextlib.contextmanager
def group():
    try:
        yield
    finally:
        barrier()


class Group:
    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        barrier()


def own_finally():
    with Guard():
        fail_politely()


def in_the_same_frame():
    with Guard():
        try:
            fail()
        finally:
            for number in range(2):
                if number == 0:
                    barrier()


def with_a_generator():
    with Guard(), group():
        fail()


def with_an_object():
    with Guard(), Group():
        fail()


def except_that_raises():
    with Guard():
        try:
            fail()
        except Exception as error:
            print(end=str(error)[:0])
            barrier()
            raise


def caught_outside_of_the_guard():
    try:
        with Guard():
            fail_politely()
    except ValueError:
        pass


def another_class_is_caught():
    with Guard():
        try:
            fail_politely()
        except (KeyError, OSError):
            pass
        except ArithmeticError:
            pass


def logged_and_raised_further_out():
    with Guard():
        try:
            fail_politely()
        except Exception as error:
            print(end=str(error)[:0])
            raise


def logged_by_one_rank_and_raised_by_all():
    with Guard():
        try:
            fail_politely()
        except Exception as error:
            for name in error.args:
                if name == "x":
                    print(end="")
            raise


def recorded_by_torch():
    from torch.distributed.elastic.multiprocessing.errors import record

    with Guard():
        record(fail_politely)()


def under_an_exit_stack():
    with contextlib.ExitStack() as stack:
        stack.enter_context(Guard())
        try:
            fail_politely()
        except KeyError:
            pass


def replaced_by_another():
    with Guard():
        try:
            try:
                fail()
            except ValueError as error:
                raise RuntimeError("y") from error
        finally:
            barrier()


def waits_under_a_try_of_its_own():
    with Guard():
        try:
            fail()
        finally:
            try:
                barrier()
            except Exception:
                pass


def in_a_thread():
    with Guard():
        thread = threading.Thread(target=fail_politely)
        thread.start()
        thread.join()


LOST = [
    own_finally, in_the_same_frame, with_a_generator, with_an_object, except_that_raises,
    caught_outside_of_the_guard, another_class_is_caught, logged_and_raised_further_out, replaced_by_another,
    logged_by_one_rank_and_raised_by_all, recorded_by_torch, under_an_exit_stack,
    waits_under_a_try_of_its_own, in_a_thread,
]  # fmt: skip


def handled():
    with Guard():
        try:
            fail()
        except ValueError:
            barrier()


def handled_and_perhaps_raised():
    with Guard():
        try:
            fail()
        except ValueError as error:
            barrier()
            if not error.args:
                raise


def raised_unless_the_error_is_known():
    with Guard():
        try:
            fail_politely()
        except Exception as error:
            if error.args == ("x",):
                return
            raise


def exit_of_a_thread():
    def leave():
        try:
            sys.exit(3)
        finally:
            barrier()

    with Guard():
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()


def caught_further_out():
    with Guard():
        for _ in range(1):
            try:
                fail_politely()
            except ValueError:
                continue


def caught_by_a_base_class():
    with Guard():
        try:
            fail_politely()
        except (KeyError, Exception):
            pass


def caught_by_a_bare_except():
    with Guard():
        try:
            fail_politely()
        except:  # noqa: E722
            pass


def caught_by_what_cannot_be_resolved():
    with Guard():
        try:
            fail_politely()
        except [ValueError][0]:
            pass


def kept_by_a_future():
    with Guard(), ThreadPoolExecutor(1) as pool:
        pool.submit(fail_politely)


PERHAPS_CAUGHT = [
    raised_unless_the_error_is_known, exit_of_a_thread,
    handled, handled_and_perhaps_raised, caught_further_out, caught_by_a_base_class, caught_by_a_bare_except,
    caught_by_what_cannot_be_resolved, kept_by_a_future,
]  # fmt: skip


def look_at(scenario):
    """What is in flight while the scenario waits in `barrier`."""
    entered.clear()
    release.clear()
    homes.clear()
    hook, threading.excepthook = threading.excepthook, lambda args: None
    thread = threading.Thread(target=scenario)
    thread.start()
    try:
        assert entered.wait(30)
        return in_flight(homes[0])
    finally:
        release.set()
        thread.join()
        threading.excepthook = hook


@pytest.mark.parametrize("scenario", LOST, ids=lambda f: f.__name__)
def test_an_exception_that_nothing_catches_is_fatal(scenario):
    (found,) = look_at(scenario)
    assert found.fatal and found.waits
    assert isinstance(found.error, RuntimeError if scenario is replaced_by_another else ValueError)
    assert "test_inflight.py" in found.where


@pytest.mark.parametrize("scenario", PERHAPS_CAUGHT, ids=lambda f: f.__name__)
def test_an_exception_that_may_be_caught_is_not(scenario):
    (found,) = look_at(scenario)
    assert found.waits and not found.fatal


def test_a_cleanup_that_waits_for_no_rank_is_let_be(monkeypatch):
    """Such as one that writes a checkpoint."""
    monkeypatch.setattr(inflight, "WAITS", ("/torch/elsewhere/",))
    (found,) = look_at(own_finally)
    assert found.fatal and not found.waits


def test_code_without_exceptions_has_none_in_flight():
    assert look_at(lambda: [Guard().__enter__(), barrier()]) == []
