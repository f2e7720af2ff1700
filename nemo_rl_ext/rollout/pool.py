# SPDX-License-Identifier: Apache-2.0
"""A pool of `RolloutAligner` Ray actors: dead ones are replaced and their work is tried again elsewhere."""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.plan import plan_turn
from nemo_rl_ext.align.runs import find_all_runs
from nemo_rl_ext.align.turn import AlignedTurn, neutral_media
from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.aligner import AlignerConfig, RolloutAligner, StaticTurn
from nemo_rl_ext.rollout.errors import AlignerDiedError, AlignerFailedError
from nemo_rl_ext.rollout.fitting import TurnRequest

logger = logging.getLogger(__name__)

MAX_DEATHS = 2
"""Actors that one piece of work may end before it is given up."""


class AlignerPool:
    """Hands work to `num_aligners` actors, one call at a time each, and survives their deaths.

    `timeout_s` bounds one call; an actor that exceeds it is ended and counts as dead. Work that ends actors twice
    becomes neutral turns, so no row is lost to it. `aligner_class` is what the actors run, made with `config`;
    `family` is the same family that they use, read from `config.model_dir` when None.
    """

    def __init__(
        self,
        config: AlignerConfig,
        num_aligners: int,
        *,
        timeout_s: float = 600.0,
        aligner_class: type = RolloutAligner,
        family: MediaFamily | None = None,
    ) -> None:
        if num_aligners < 1:
            raise ValueError(f"an aligner pool needs at least one actor, got num_aligners={num_aligners}")
        self.family = family or family_of(config.model_dir, layout=config.layout, dtype=config.dtype)
        self.num_aligners = num_aligners
        self.deaths = 0
        self._config = config
        self._timeout_s = timeout_s
        self._actor_class: Any = ray.remote(num_cpus=0, max_restarts=0)(aligner_class)
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._actors: list[Any] = []
        for _ in range(num_aligners):
            self._idle.put(self._start())
        self._threads = ThreadPoolExecutor(num_aligners, thread_name_prefix="aligner-pool")

    def _start(self) -> Any:
        actor = self._actor_class.remote(self._config)
        self._actors.append(actor)
        return actor

    def pids(self) -> list[int]:
        """The actors' processes; waits until every actor has started."""
        pids: list[int] = ray.get([actor.pid.remote() for actor in self._actors], timeout=self._timeout_s)
        return pids

    def submit_static(self, turns: Sequence[tuple[MediaSource, ...]]) -> Future[list[StaticTurn]]:
        """Static tensors of several turns, in the background."""
        return self._threads.submit(self._static, list(turns))

    def submit_align(self, turns: Sequence[TurnRequest]) -> Future[list[AlignedTurn]]:
        """Aligned turns, in the background; one result per request, in order, whatever happens to actors."""
        return self._threads.submit(self._align, list(turns))

    def submit(self, method: str, work: Sequence[Any]) -> Future[list[Any]]:
        """Another method of `aligner_class` over a list, in the background.

        The future raises `AlignerDiedError` where actors died under the work, `AlignerFailedError` where one raised.
        """
        return self._threads.submit(self._call, method, list(work))

    def _static(self, turns: list[tuple[MediaSource, ...]]) -> list[StaticTurn]:
        try:
            static: list[StaticTurn] = self._call("static", turns)
        except AlignerDiedError as error:
            return [StaticTurn(tensors=None, error=str(error)) for _ in turns]
        return static

    def _align(self, turns: list[TurnRequest]) -> list[AlignedTurn]:
        try:
            done: list[AlignedTurn] = self._call("align", turns)
        except AlignerDiedError as error:
            if len(turns) > 1:
                # One row of the group may be the culprit: the others must not be lost with it.
                return [aligned for turn in turns for aligned in self._align([turn])]
            logger.error("%s", error)
            return [self._give_up(turns[0], error)]
        return done

    def _call(self, method: str, turns: list[Any]) -> Any:
        for _ in range(MAX_DEATHS):
            actor = self._idle.get()
            try:
                result = ray.get(getattr(actor, method).remote(turns), timeout=self._timeout_s)
            except RayTaskError as error:
                self._idle.put(actor)
                raise AlignerFailedError(f"aligner call {method!r} failed: {error.cause or error}") from None
            except (RayActorError, GetTimeoutError) as error:
                self.deaths += 1
                logger.warning("an aligner died during %r and is replaced: %s", method, type(error).__name__)
                self._replace(actor)
                continue
            self._idle.put(actor)
            return result
        rows = sorted({getattr(turn, "row_id", "") for turn in turns} - {""})
        raise AlignerDiedError(f"{MAX_DEATHS} aligners died during {method!r} of rows {rows}")

    def _replace(self, actor: Any) -> None:
        self._actors.remove(actor)
        ray.kill(actor)
        self._idle.put(self._start())

    def _give_up(self, turn: TurnRequest, error: AlignerDiedError) -> AlignedTurn:
        """A neutral turn, made without touching the media that ended the actors."""
        runs = find_all_runs(turn.token_ids, self.family.grammars)
        report = plan_turn(
            runs, (), self.family, row_id=turn.row_id, turn=turn.turn, fault=(Reason.WORKER_DIED, str(error))
        )
        return AlignedTurn(tensors=neutral_media(turn.token_ids, self.family), report=report, changed=True)

    def shutdown(self) -> None:
        """End every actor; work in flight is abandoned."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
