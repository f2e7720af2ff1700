# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the engine actor: weights are remembered, a dead engine is replaced and its work redone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from nemo_rl_ext.grpo.engine.requests import EngineError, GenerationRequest, GenerationResult

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Engines that one call may lose before the run stops."""


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
        reference = ray.put(list(requests))
        results: list[GenerationResult] = self._call(lambda actor: actor.generate.remote(reference))
        return results

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int, *, in_flight: bool) -> None:
        """Hand over new weights; requests in flight continue on them, or finish first when `in_flight` is false."""
        reference = ray.put(dict(weights))
        with self._lock:
            self._weights, self._version = reference, version
            actor = self._actor
        try:
            ray.get(actor.update_weights.remote(reference, version, in_flight))
        except (RayActorError, RayTaskError) as error:
            if not _died(error):
                raise
            # The replacement starts with these weights.
            self._replace(actor, error)

    def _call(self, send: Callable[[Any], Any]) -> Any:
        for _ in range(MAX_RESTARTS + 1):
            actor = self._actor
            try:
                return ray.get(send(actor))
            except (RayActorError, RayTaskError) as error:
                if not _died(error):
                    raise
                self._replace(actor, error)
        raise EngineError(f"the engine died {MAX_RESTARTS + 1} times in one call; its last log lines say why")

    def _replace(self, dead: Any, error: Exception) -> None:
        """Start a new engine with the newest weights, once per death however many threads noticed it."""
        with self._lock:
            if self._actor is not dead:
                return
            logger.warning(
                "the engine died and is started again with weights %d: %s", self._version, _cause(error)
            )
            ray.kill(dead)
            self.restarts += 1
            self._actor = self._start()
            if self._weights is not None:
                ray.get(self._actor.update_weights.remote(self._weights, self._version, False))

    def shutdown(self) -> None:
        """End the engine for good."""
        ray.kill(self._actor)


def _cause(error: Exception) -> str:
    return str(getattr(error, "cause", None) or error).strip().splitlines()[0]


def _died(error: RayActorError | RayTaskError) -> bool:
    """Whether a new engine could do better: the process is gone, or its engine says that it stopped."""
    return isinstance(error, RayActorError) or isinstance(error.cause, EngineError)
