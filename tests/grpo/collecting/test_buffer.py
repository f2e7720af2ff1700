# SPDX-License-Identifier: Apache-2.0
import threading

import pytest

from nemo_rl_ext.grpo.collecting.buffer import TrajectoryBuffer


def test_collection_runs_ahead_by_the_allowed_age_and_no_further():
    buffer = TrajectoryBuffer(max_age=1)
    started = []

    def collect():
        for step in range(5):
            if not buffer.wait_to_collect(step):
                return
            started.append(step)
            buffer.put(step, [])

    thread = threading.Thread(target=collect)
    thread.start()
    for step in range(5):
        assert buffer.take(step) == []
        assert max(started) <= step + 1
        buffer.advance(step + 1)
    thread.join(timeout=10)
    assert started == [0, 1, 2, 3, 4]


def test_an_age_of_zero_alternates_strictly():
    buffer = TrajectoryBuffer(max_age=0)
    assert buffer.wait_to_collect(0)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (buffer.wait_to_collect(1), done.set()))
    thread.start()
    assert not done.wait(0.05)
    buffer.advance(1)
    assert done.wait(10)
    thread.join()


def test_the_collectors_error_reaches_the_trainer_after_finished_steps():
    buffer = TrajectoryBuffer(max_age=1)
    buffer.put(0, ["group"])
    buffer.fail(ValueError("data.jsonl:3: broken"))
    assert buffer.take(0) == ["group"]
    with pytest.raises(ValueError, match=r"data\.jsonl:3"):
        buffer.take(1)


def test_closing_ends_every_wait():
    buffer = TrajectoryBuffer(max_age=0)
    buffer.close()
    assert not buffer.wait_to_collect(7)
    with pytest.raises(RuntimeError, match="step 0"):
        buffer.take(0)
