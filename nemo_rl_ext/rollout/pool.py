# SPDX-License-Identifier: Apache-2.0
"""A pool of `RolloutAligner` Ray actors: dead ones are replaced and their work is tried again elsewhere."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.plan import plan_turn
from nemo_rl_ext.align.runs import find_all_runs
from nemo_rl_ext.align.turn import AlignedTurn, neutral_media
from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.aligner import AlignerConfig, RolloutAligner, StaticTurn
from nemo_rl_ext.rollout.broker import CONCURRENCY_GROUPS, Maker
from nemo_rl_ext.rollout.errors import AlignerDiedError, AlignerFailedError
from nemo_rl_ext.rollout.fitting import TurnRequest
from nemo_rl_ext.rollout.losses import Loss, cluster_cpus, first_line, loss_of, node_is_gone

logger = logging.getLogger(__name__)

MAX_DEATHS = 2
"""Actors that one piece of work may end before it is given up."""

MAX_LOSSES = 16
"""Calls that one piece of work may lose through no fault of its own, beside one for every aligner of the pool."""

WAIT_FOR_CPU_S = 60.0
"""After this long without a start, a log line says what an aligner waits for."""


class Host(Maker):
    """An aligner in an actor of its own, and where it runs."""

    def __init__(self, aligner_class: type, config: AlignerConfig) -> None:
        self.aligner = aligner_class(config)

    def place(self) -> tuple[int, str]:
        """The process that this aligner runs in, and the id of its Ray node."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def call(self, method: str, work: Sequence[Any]) -> Any:
        """A method of the aligner."""
        return getattr(self.aligner, method)(work)


class AlignerPool:
    """Hands work to `num_aligners` actors, one call at a time each, and survives what Ray can lose.

    Each actor asks Ray for `num_cpus`, spread over the nodes. `timeout_s` bounds one call; an actor that exceeds it is
    ended and counts as dead. An actor that is lost is replaced, and its work done again. Work that itself ends actors
    twice becomes neutral turns, so no row is lost to it; actors that died idle, or with their node, are no work's
    fault. `aligner_class` is what the actors run, made with `config`; `family` is the same family that they use, read
    from `config.model_dir` when None.

    Raises:
        ValueError: for less than one actor, or more than the cluster has CPUs for.
    """

    def __init__(
        self,
        config: AlignerConfig,
        num_aligners: int,
        *,
        num_cpus: float = 1.0,
        timeout_s: float = 600.0,
        aligner_class: type = RolloutAligner,
        family: MediaFamily | None = None,
    ) -> None:
        if num_aligners < 1:
            raise ValueError(f"an aligner pool needs at least one actor, got num_aligners={num_aligners}")
        _require_cpus(num_aligners, num_cpus)
        self.family = family or family_of(config.model_dir, layout=config.layout, dtype=config.dtype)
        self.num_aligners = num_aligners
        self.deaths = 0
        self._config, self._aligner_class = config, aligner_class
        self._timeout_s = timeout_s
        options: dict[str, Any] = dict(
            num_cpus=num_cpus,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            concurrency_groups=CONCURRENCY_GROUPS,
        )
        self._actor_class: Any = ray.remote(**options)(Host)
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._actors: list[Any] = []
        for _ in range(num_aligners):
            self._idle.put(self._start())
        self._threads = ThreadPoolExecutor(num_aligners, thread_name_prefix="aligner-pool")

    def _start(self) -> Any:
        actor = self._actor_class.remote(self._aligner_class, self._config)
        self._actors.append(actor)
        return actor

    def pids(self) -> list[int]:
        """The actors' processes; waits until every actor has started."""
        return [pid for pid, _ in self.places()]

    def places(self) -> list[tuple[int, str]]:
        """The actors' processes and their nodes' ids; waits until every actor has started."""
        places: list[tuple[int, str]] = ray.get(
            [actor.place.remote() for actor in self._actors], timeout=self._timeout_s
        )
        return places

    @property
    def num_idle(self) -> int:
        """Actors that no call holds at this moment."""
        return self._idle.qsize()

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

    def _align(self, turns: list[TurnRequest], *, suspect: bool = False) -> list[AlignedTurn]:
        try:
            done: list[AlignedTurn] = self._call("align", turns, suspect=suspect)
        except AlignerDiedError as error:
            if len(turns) > 1:
                # One row of the group may be the culprit: the others must not be lost with it.
                return [aligned for turn in turns for aligned in self._align([turn], suspect=True)]
            logger.error("%s", error)
            return [self._give_up(turns[0], error)]
        return done

    def _call(self, method: str, work: list[Any], *, suspect: bool = False) -> Any:
        """`suspect` work ended actors already."""
        deaths = 0
        rows = sorted({getattr(turn, "row_id", "") for turn in work} - {""})
        for lost in range(self.num_aligners + MAX_LOSSES):
            actor, serves = self._idle.get(), False
            node: str | None = None
            try:
                if lost or suspect:
                    # An actor that answers now and dies under the work was not dead before it.
                    _, node = self.result_of(actor.place.remote())
                done = self.result_of(actor.call.remote(method, work))
                serves = True
                return done
            except RayError as error:
                loss = loss_of(error)
                serves = loss is not Loss.PROCESS
                if loss is None:
                    raise AlignerFailedError(f"aligner call {method!r} failed: {_cause(error)}") from None
                logger.warning("aligner call %r is made again: %s", method, first_line(error))
                if loss is Loss.PROCESS:
                    self.deaths += 1
                    deaths += node is not None and not node_is_gone(node)
                    if deaths == MAX_DEATHS:
                        raise AlignerDiedError(
                            f"{MAX_DEATHS} aligners died during {method!r} of rows {rows}"
                        ) from None
            finally:
                if serves:
                    self._idle.put(actor)
                else:
                    self._replace(actor)
        raise AlignerFailedError(
            f"aligner call {method!r} of rows {rows} was lost {self.num_aligners + MAX_LOSSES} times to nodes and "
            "objects that Ray lost; the log lines above say how"
        )

    def result_of(self, result: Any) -> Any:
        """A call's result; where it is late, a log line says that aligners may wait for CPUs."""
        done, _ = ray.wait([result], timeout=min(WAIT_FOR_CPU_S, self._timeout_s), fetch_local=False)
        if not done:
            logger.warning(
                "an aligner call takes longer than %.0f s; %g of %g CPUs of the cluster are free: aligners that have "
                "none start as soon as there are (grpo.media_alignment.num_aligners and aligner_cpus)",
                min(WAIT_FOR_CPU_S, self._timeout_s),
                *cluster_cpus(),
            )
        return ray.get(result, timeout=self._timeout_s)

    def _replace(self, actor: Any) -> None:
        try:
            ray.kill(actor)
            replacement = self._start()
        except BaseException:
            # Ray itself is gone; whoever waits for an actor must find out, too.
            self._idle.put(actor)
            raise
        self._actors.remove(actor)
        self._idle.put(replacement)

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


def _require_cpus(num_aligners: int, num_cpus: float) -> None:
    _, total = cluster_cpus()
    if num_aligners * num_cpus > total:
        raise ValueError(
            f"{num_aligners} aligners ask Ray for {num_cpus:g} CPUs each, and the cluster has {total:g}: lower "
            "grpo.media_alignment.num_aligners, give Ray more CPUs, or set grpo.media_alignment.aligner_cpus=0 where "
            "all CPUs of the nodes are set aside for other work"
        )


def _cause(error: RayError) -> object:
    return getattr(error, "cause", None) or error
