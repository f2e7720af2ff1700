# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the engine actor: weights are remembered, a dead engine is replaced and its work redone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from nemo_rl_ext.grpo.engine.requests import EngineError, GenerationRequest, GenerationResult
from nemo_rl_ext.rollout.losses import Loss, first_line, loss_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Engines that one call may lose before the run stops, those that end while they start included."""

ANSWER_S = 60.0
"""Longest time for an engine to say that it is alive."""


class EngineClient:
    """Calls the engine actor that `start` creates, from any thread.

    Weights pushed through `update_weights` are kept, so that a replacement continues with the newest ones.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self.restarts = 0
        self._start = start
        self._lock = threading.Lock()
        self._weights: Any = None
        self._version = 0
        self._actor = start()

    @property
    def version(self) -> int:
        """Version of the newest weights that were handed over; 0 for the checkpoint's own."""
        return self._version

    def health(self) -> dict[str, Any]:
        """The engine's account of itself."""
        account: dict[str, Any] = self._call(lambda actor: actor.health.remote())
        return account

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """One result per request, in order. Requests are generated again when the engine dies under them."""
        if not requests:
            return []
        # Put anew for each try: the engine that is gone may have taken the requests with it.
        results: list[GenerationResult] = self._call(lambda actor: actor.generate.remote(list(requests)))
        return results

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int, *, in_flight: bool) -> None:
        """Hand over new weights; requests in flight continue on them, or finish first when `in_flight` is false."""
        reference = ray.put(dict(weights))
        with self._lock:
            self._weights, self._version = reference, version
        # A replacement starts with these weights.
        self._call(lambda actor: actor.update_weights.remote(reference, version, in_flight), again=False)

    def _call(self, send: Callable[[Any], Any], *, again: bool = True) -> Any:
        """What the engine answers. A call that is lost is sent again; without `again`, only to the same engine."""
        for _ in range(MAX_RESTARTS + 1):
            actor = self._actor
            try:
                return ray.get(send(actor))
            except (RayError, EngineError) as error:
                if not _lost(error):
                    raise
                last = error
                if loss_of(error) is not Loss.OBJECT or not _answers(actor):
                    self._replace(actor, error)
                    if not again and self._actor is not actor:
                        return None
        raise EngineError(
            f"the engine died or lost its work {MAX_RESTARTS + 1} times in one call; its last log lines say why "
            f"({first_line(last)})"
        )

    def _replace(self, dead: Any, error: Exception) -> None:
        """Start a new engine with the newest weights, once per death however many threads noticed it.

        One that dies while it starts is a restart like any other: the dead one stays, for the next try to replace.
        """
        with self._lock:
            if self._actor is not dead:
                return
            logger.warning(
                "the engine died and is started again with weights %d: %s", self._version, first_line(error)
            )
            ray.kill(dead)
            self.restarts += 1
            started = None
            try:
                started = self._start()
                if self._weights is not None:
                    ray.get(started.update_weights.remote(self._weights, self._version, False))
            except (RayError, EngineError) as fault:
                if started is not None:
                    ray.kill(started)
                if not _lost(fault):
                    raise
                logger.warning("the engine died while it was started: %s", first_line(fault))
                return
            self._actor = started

    def shutdown(self) -> None:
        """End the engine for good."""
        ray.kill(self._actor)


def _lost(error: Exception) -> bool:
    """Whether trying again could do better: Ray lost something, or the engine says that it stopped."""
    return loss_of(error) is not None or isinstance(getattr(error, "cause", error), EngineError)


def _answers(actor: Any) -> bool:
    """Whether the engine is alive, after an object was lost on the way to it or back."""
    try:
        return bool(ray.get(actor.health.remote(), timeout=ANSWER_S)["alive"])
    except RayError:
        return False
