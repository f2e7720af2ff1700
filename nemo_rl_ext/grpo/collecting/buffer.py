# SPDX-License-Identifier: Apache-2.0
"""Steps of prompt groups between the collector and the trainer, with a bound on their age."""

from __future__ import annotations

import threading

from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup


class TrajectoryBuffer:
    """Holds collected steps until training takes them, in order; nothing is dropped or reordered.

    The collector may start step s once training has finished step s - 1 - `max_age` (weights of version v are those
    after v steps), so no trajectory is ever older than `max_age` when it is trained on.
    """

    def __init__(self, *, max_age: int, first_step: int = 0) -> None:
        self.max_age = max_age
        self._steps: dict[int, list[PromptGroup]] = {}
        self._version = first_step
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def wait_to_collect(self, step: int) -> bool:
        """Block until `step` may be generated; False when the run is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._version >= step - self.max_age)
            return not self._closed

    def put(self, step: int, groups: list[PromptGroup]) -> None:
        """Hand over a collected step."""
        with self._changed:
            self._steps[step] = groups
            self._changed.notify_all()

    def take(self, step: int) -> list[PromptGroup]:
        """Block until a step is there and take it; raises what the collector raised."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._steps or self._error is not None or self._closed)
            if step in self._steps:
                return self._steps.pop(step)
            if self._error is not None:
                raise self._error
            raise RuntimeError(f"step {step} was asked for after the buffer was closed")

    def advance(self, version: int) -> None:
        """Tell the collector that weights of `version` are in the engine."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Pass the collector's error on to the trainer."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """End every wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
