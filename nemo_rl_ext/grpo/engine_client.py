# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the engine actor: weights are remembered, a dead engine is replaced and its work redone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Engines that one call may lose before the run stops."""


class EngineDiedError(RuntimeError):
    """Infrastructure: the engine died again and again under the same call."""


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
        self._closed = False
        self._actor = start()

    @property
    def version(self) -> int:
        """The newest weights that were handed over."""
        return self._version

    def wait_until_ready(self) -> dict[str, Any]:
        """Block until the engine has loaded; its own account of itself."""
        return self._call(lambda actor: actor.health.remote())

    def generate(self, requests: Sequence[Any]) -> list[Any]:
        """One result per request, in order. Requests are generated again when the engine dies under them."""
        if not requests:
            return []
        return self._call(lambda actor: actor.generate.remote(list(requests)))

    def update_weights(self, weights: dict[str, Any], version: int, *, in_flight: bool) -> None:
        """Hand over new weights; requests in flight continue on them, or finish first when `in_flight` is false."""
        reference = ray.put(weights)
        with self._lock:
            self._weights, self._version = reference, version
        self._call(lambda actor: actor.update_weights.remote(reference, version, in_flight=in_flight))

    def _call(self, send: Callable[[Any], Any]) -> Any:
        for _ in range(MAX_RESTARTS + 1):
            actor = self._actor
            try:
                return ray.get(send(actor))
            except RayTaskError as error:
                raise RuntimeError(f"the engine failed: {error.cause or error}") from error
            except RayActorError as error:
                if self._closed:
                    raise
                logger.warning("the engine died and is started again: %s", type(error).__name__)
                self._replace(actor)
        raise EngineDiedError(f"the engine died {MAX_RESTARTS + 1} times in one call; its last log lines say why")

    def _replace(self, dead: Any) -> None:
        """Start a new engine with the newest weights, once per death however many threads noticed it."""
        with self._lock:
            if self._actor is not dead:
                return
            ray.kill(dead)
            self.restarts += 1
            self._actor = self._start()
            if self._weights is not None:
                ray.get(self._actor.update_weights.remote(self._weights, self._version, in_flight=False))

    def kill(self) -> None:
        """End the engine at once, as a crash would; the next call replaces it."""
        ray.kill(self._actor)

    def shutdown(self) -> None:
        """End the engine for good."""
        self._closed = True
        ray.kill(self._actor)
