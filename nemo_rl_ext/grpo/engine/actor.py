# SPDX-License-Identifier: Apache-2.0
"""The rollout engine as an actor: concurrent generation, and new weights between two decoding steps.

One thread owns vLLM. Callers leave work in its inbox and wait; it renders, decodes, and swaps weights, so
that no two threads ever touch the model, and an update lands between tokens, never within one.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_rl_ext import cpu_wheels
from nemo_rl_ext.grpo.engine.config import EngineConfig
from nemo_rl_ext.grpo.engine.requests import EngineError, GenerationRequest, GenerationResult

if TYPE_CHECKING:
    import torch

    from nemo_rl_ext.grpo.engine.vllm_engine import VllmEngine

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Generate:
    """Requests of one call, and those of their results that are there."""

    requests: Sequence[GenerationRequest]
    future: Future[list[GenerationResult]] = field(default_factory=Future)
    results: dict[int, GenerationResult] = field(default_factory=dict)

    def put(self, index: int, result: GenerationResult) -> None:
        self.results[index] = result
        if len(self.results) == len(self.requests):
            self.future.set_result([self.results[i] for i in range(len(self.requests))])


@dataclass(eq=False)
class _Update:
    weights: Mapping[str, torch.Tensor]
    version: int
    in_flight: bool
    future: Future[float] = field(default_factory=Future)


@dataclass(eq=False)
class _Stop:
    future: Future[None] = field(default_factory=Future)


_Work = _Generate | _Update | _Stop
_Owners = dict[str, tuple[_Generate, int]]


class EngineActor:
    """A vLLM engine behind plain, thread-safe calls. `start_engine` makes a Ray actor of it."""

    def __init__(self, config: EngineConfig) -> None:
        cpu_wheels.activate()
        self._config = config
        self._inbox: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._started: Future[float] = Future()
        self._engine: VllmEngine | None = None
        self._dead: str | None = "not started"
        self._num_tokens = 0
        self._num_requests = 0
        self._num_refused = 0

    def start(self) -> float:
        """Load the engine; returns the seconds that it took. A second call waits for the first.

        Raises ValueError for a bad checkpoint or argument, EngineError when the engine fails otherwise.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
                self._thread.start()
        return self._started.result()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Sample from every request; results in the order of the requests, refusals among them.

        May be called from many threads at once; all running requests share the engine's steps. Raises
        EngineError when the engine is dead.
        """
        if not requests:
            return []
        work = _Generate(list(requests))
        self._send(work)
        return work.future.result()

    def update_weights(
        self, weights: Mapping[str, torch.Tensor], version: int, in_flight: bool = True
    ) -> float:
        """Replace all weights (released names) and call them `version`; returns seconds spent copying.

        `in_flight` applies them before the next token of running requests, which finish with mixed weights;
        otherwise running requests finish first and requests that arrive meanwhile wait for the new weights.
        Raises ValueError, with nothing changed, when the names do not fit or `version` does not increase.
        """
        work = _Update(weights, version, in_flight)
        self._send(work)
        return work.future.result()

    def version(self) -> int:
        """Version of the newest weights that the engine samples with."""
        self._require_alive()
        assert self._engine is not None, "a running engine was loaded"
        return self._engine.version

    def health(self) -> dict[str, Any]:
        """Alive, version, counts since start and resident memory. Never raises and never waits for a step."""
        import psutil

        engine = self._engine
        return {
            "alive": self._dead is None,
            "reason": self._dead,
            "version": engine.version if engine is not None else None,
            "num_running": engine.num_running if engine is not None else 0,
            "num_requests": self._num_requests,
            "num_refused": self._num_refused,
            "num_tokens": self._num_tokens,
            "pid": os.getpid(),
            "rss_bytes": psutil.Process().memory_info().rss,
        }

    def shutdown(self) -> None:
        """Stop the engine; calls that wait get an EngineError. Idempotent."""
        if self._dead is None:
            try:
                work = _Stop()
                self._send(work)
                work.future.result()
            except EngineError:
                logger.debug("engine was gone before it was asked to stop")
        if self._thread is not None:
            self._thread.join()

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise EngineError(f"the engine is not running: {self._dead}")

    def _send(self, work: _Work) -> None:
        with self._lock:
            self._require_alive()
            self._inbox.put(work)

    def _run(self) -> None:
        """The engine's own thread."""
        begin = time.perf_counter()
        try:
            from nemo_rl_ext.grpo.engine.vllm_engine import VllmEngine

            self._engine = engine = VllmEngine(self._config)
        except BaseException as error:
            self._dead = f"start failed: {error}"
            is_users = isinstance(error, ValueError)
            cause = str(error) if is_users else f"engine start failed: {type(error).__name__}: {error}"
            self._started.set_exception(ValueError(cause) if is_users else EngineError(cause))
            return
        self._dead = None
        self._started.set_result(time.perf_counter() - begin)
        waiting: deque[_Work] = deque()
        owners: _Owners = {}
        reason = "shut down"
        try:
            self._serve(engine, waiting, owners)
        except BaseException as error:
            logger.exception("the engine died")
            reason = f"{type(error).__name__}: {error}"
        with self._lock:
            self._dead = reason
        while not self._inbox.empty():
            waiting.append(self._inbox.get())
        for work in dict.fromkeys([*(work for work, _ in owners.values()), *waiting]):
            if not work.future.done():
                if isinstance(work, _Stop):
                    work.future.set_result(None)
                else:
                    work.future.set_exception(EngineError(f"the engine stopped before it answered: {reason}"))
        try:
            engine.shutdown()
        except Exception:
            logger.exception("the engine did not shut down cleanly")

    def _serve(self, engine: VllmEngine, waiting: deque[_Work], owners: _Owners) -> None:
        """Work in order of arrival until a stop; `waiting` and `owners` name what is unanswered."""
        while True:
            if not waiting and not owners:
                waiting.append(self._inbox.get())
            while not self._inbox.empty():
                waiting.append(self._inbox.get())
            while waiting:
                work = waiting[0]
                if isinstance(work, _Stop):
                    return
                if isinstance(work, _Update):
                    if owners and not work.in_flight:
                        break
                    _apply(engine, work)
                else:
                    self._add(engine, work, owners)
                waiting.popleft()
            if owners:
                for name, result in engine.step():
                    call, index = owners.pop(name)
                    self._num_tokens += sum(len(sequence.token_ids) for sequence in result.outputs)
                    call.put(index, result)

    def _add(self, engine: VllmEngine, work: _Generate, owners: _Owners) -> None:
        for index, request in enumerate(work.requests):
            self._num_requests += 1
            try:
                owners[engine.add(request)] = (work, index)
            except ValueError as error:
                logger.warning("%s", error)
                self._num_refused += 1
                work.put(index, engine.refuse(request, error))


def _apply(engine: VllmEngine, work: _Update) -> None:
    begin = time.perf_counter()
    try:
        engine.load_weights(work.weights, work.version)
    except ValueError as error:
        work.future.set_exception(error)
        return
    work.future.set_result(time.perf_counter() - begin)


def start_engine(config: EngineConfig, *, num_cpus: float = 1.0, max_concurrency: int = 32) -> Any:
    """Start an `EngineActor` as a Ray actor and wait until it serves; returns its handle.

    Ray must be initialised. The engine lives in the actor's own process and dies with it. A caller that
    replaces a dead engine gives the new one the newest weights with `update_weights`.

    Raises ValueError for a bad checkpoint or argument and EngineError when the engine does not start.
    """
    import ray

    from nemo_rl_ext.grpo.engine.vllm_setup import ENVIRONMENT
    from nemo_rl_ext.rollout.losses import first_line, loss_of

    options = {
        "num_cpus": num_cpus,
        "max_concurrency": max_concurrency,
        "runtime_env": {"env_vars": dict(ENVIRONMENT)},
    }
    actor: Any = ray.remote(EngineActor).options(**options).remote(config)
    try:
        ray.get(actor.start.remote())
    except ray.exceptions.RayError as error:
        ray.kill(actor)
        if loss_of(error) is not None:
            raise EngineError(f"the engine's process died while it started: {first_line(error)}") from error
        cause = getattr(error, "cause", None)
        # The cause is the actor's own exception; Ray's message around it is its traceback.
        raise (cause if isinstance(cause, ValueError | EngineError) else error) from None
    return actor
