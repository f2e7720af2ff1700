# SPDX-License-Identifier: Apache-2.0
"""What a killed driver leaves behind is ended; what it did not start, or left on purpose, is not."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

DRIVER = """
import subprocess, sys, time
from nemo_rl_ext.grpo.keeper import keeper

def start():
    # Nothing ties it to the driver: only the keeper can end it.
    return subprocess.Popen(["sleep", "1000"], start_new_session=True)

before = start()
with keeper() as kept:
    while_kept = start()
    kept.watch()
    later = start()
    kept.watch()
    print(before.pid, while_kept.pid, later.pid, kept._process.pid, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def driver():
    """A driver in its `with` block, and the processes before, while_kept and later, and the keeper."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    processes = [psutil.Process(pid) for pid in pids]
    yield process, processes
    for left in [process, *processes]:
        if left.poll() is None if isinstance(left, subprocess.Popen) else left.is_running():
            left.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_the_keeper_of_a_killed_driver_ends_what_it_was_told_of(driver):
    process, (before, while_kept, later, keeper) = driver
    process.kill()
    _, alive = psutil.wait_procs([while_kept, later, keeper], timeout=30)
    assert alive == []
    assert before.is_running() and before.status() != psutil.STATUS_ZOMBIE


def test_a_driver_that_ends_leaves_what_it_started(driver):
    process, (before, while_kept, later, keeper) = driver
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.wait(timeout=30) == 0
    psutil.wait_procs([keeper], timeout=30)
    assert not keeper.is_running()
    time.sleep(0.5)
    assert all(left.is_running() for left in (before, while_kept, later))


def test_a_driver_does_not_depend_on_its_keeper(driver):
    process, (*_, keeper) = driver
    keeper.kill()
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.wait(timeout=30) == 0


def test_a_pid_with_another_owner_is_left_alone():
    from nemo_rl_ext.grpo.keeper import end

    with psutil.Popen(["sleep", "1000"]) as process:
        end([(process.pid, process.create_time() - 100)])
        assert process.poll() is None
        end([(process.pid, process.create_time())])
        assert process.wait(timeout=30) == -signal.SIGKILL
