# SPDX-License-Identifier: Apache-2.0
"""One alignment for the turns of a prompt group that are the same turn: equal ids, media and receipts."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future

import msgspec

from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.fitting import TurnRequest

MAX_BYTES = 256 << 20
"""Bytes of tensors of settled turns that are kept for later generations of the same prompt."""

MAX_TURNS = 1024

Align = Callable[[Sequence[TurnRequest]], "Future[list[AlignedTurn]]"]


class SharedTurns:
    """Turns in flight and the last that were settled, by what they show. Runs on one event loop.

    Only references that hold their content themselves are shared after the first has settled: what a path names may
    have changed since.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[Hashable, asyncio.Future[AlignedTurn]] = OrderedDict()
        self._num_bytes = 0

    async def align(self, submit: Align, requests: Sequence[TurnRequest]) -> list[AlignedTurn]:
        """One result per request, labelled with its row; the work of equal turns is done once, for the first."""
        keys = [_key(request) for request in requests]
        fresh: dict[Hashable, TurnRequest] = {}
        for key, request in zip(keys, requests, strict=True):
            if key not in self._turns and key not in fresh:
                fresh[key] = request
        mine = {key: asyncio.get_running_loop().create_future() for key in fresh}
        self._turns.update(mine)
        waiting = [self._turns[key] for key in keys]
        if fresh:
            # In a task of its own: others may wait for it when the one who came first has given up.
            await asyncio.shield(asyncio.ensure_future(self._settle(submit, fresh, mine)))
        turns: list[AlignedTurn] = []
        for key, request, future in zip(keys, requests, waiting, strict=True):
            turn = await asyncio.shield(future)
            turns.append(_relabelled(turn, request, own=fresh.get(key) is request))
        return turns

    async def _settle(
        self,
        submit: Align,
        fresh: dict[Hashable, TurnRequest],
        mine: dict[Hashable, asyncio.Future[AlignedTurn]],
    ) -> None:
        try:
            done = await asyncio.wrap_future(submit(list(fresh.values())))
        except Exception as error:
            for key, future in mine.items():
                self._turns.pop(key, None)
                future.set_exception(error)
                # Whoever waits hears of it; where nobody does, nothing is to be said.
                future.exception()
            raise
        for (key, request), turn in zip(fresh.items(), done, strict=True):
            mine[key].set_result(turn)
            if _keeps(request) and not turn.report.neutral:
                self._num_bytes += _num_bytes(turn)
            else:
                self._turns.pop(key, None)
        self._trim()

    def _trim(self) -> None:
        settled = [key for key, future in self._turns.items() if future.done()]
        for key in settled:
            if self._num_bytes <= MAX_BYTES and len(self._turns) <= MAX_TURNS:
                return
            self._num_bytes -= _num_bytes(self._turns.pop(key).result())


def _num_bytes(turn: AlignedTurn) -> int:
    return turn.tensors.num_bytes if turn.tensors is not None else 0


def _keeps(request: TurnRequest) -> bool:
    return all(source.ref.startswith("data:") for source in (*request.earlier_media, *request.media))


def _key(request: TurnRequest) -> Hashable:
    """Everything but whose row it is, and whether the engine had an item in its cache by then."""
    receipt = request.receipt
    if receipt is not None:
        receipt = tuple(msgspec.structs.replace(item, cached=False) for item in receipt)
    plain = dataclasses.replace(
        request,
        row_id="",
        receipt=receipt,
        media=_nameless(request.media),
        earlier_media=_nameless(request.earlier_media),
        later_media=_nameless(request.later_media),
    )
    rest = tuple(
        getattr(plain, field.name)
        for field in dataclasses.fields(plain)
        if field.name not in ("row_id", "token_ids", "receipt", "turn")
    )
    return plain.identity(), rest


def _nameless(media: Sequence[MediaSource]) -> tuple[MediaSource, ...]:
    """References without their rows, those that carry data as a digest of it."""
    return tuple(
        dataclasses.replace(
            source,
            where="",
            ref=hashlib.sha256(source.ref.encode("utf-8", "surrogatepass")).hexdigest()
            if len(source.ref) > 256
            else source.ref,
        )
        for source in media
    )


def _relabelled(turn: AlignedTurn, request: TurnRequest, *, own: bool) -> AlignedTurn:
    if own:
        return turn
    report = dataclasses.replace(turn.report, row_id=request.row_id, turn=request.turn, repair_ms=0.0)
    return dataclasses.replace(turn, report=report)
