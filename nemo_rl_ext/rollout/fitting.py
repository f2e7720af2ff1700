# SPDX-License-Identifier: Apache-2.0
"""Fitting turns to their runs: what every aligner does, whatever its trainer's static tensors look like."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from nemo_rl_ext.align.evidence import EngineRequest, Evidence
from nemo_rl_ext.align.families.family import MediaFamily, MediaTensors
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import AlignedTurn, Render, align_turn
from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.media.reader import MediaFacts, MediaSource


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One turn to align: its ids [tokens], its media in prompt order, and what is known about the engine.

    `facts` are what was measured of the media before (one per item), so that a turn with nothing to repair touches
    no file; without them each item is measured again. `static_grids` are the grids of the static tensors that the
    driver holds for this turn, one per run, None where it holds none. A matched turn then comes back without
    tensors. `captured`, `evidence`, `ordered` and `sampled` are those of `align_turn`. `max_model_len` is the engine's
    context length where all images of a request are sized together, for want of a processor cache. `earlier_media`
    and `later_media` are those of the same engine request before and after this turn's.
    """

    row_id: str
    turn: int
    token_ids: np.ndarray
    media: tuple[MediaSource, ...]
    facts: tuple[MediaFacts, ...] | None = None
    static_grids: tuple[Grid, ...] | None = None
    captured: tuple[Grid, ...] | None = None
    evidence: tuple[Evidence, ...] | None = None
    ordered: bool = False
    sampled: bool = False
    max_model_len: int | None = None
    earlier_media: tuple[MediaSource, ...] = ()
    later_media: tuple[MediaSource, ...] = ()

    def identity(self) -> Hashable:
        """Equal for two turns of one row that must come out equal."""
        media = (self.earlier_media, self.media, self.later_media)
        return self.turn, self.token_ids.tobytes(), media, self.static_grids, self.captured, self.evidence


def unchanged(tensors: MediaTensors) -> MediaTensors:
    """Tensors of a repair for a trainer that wants them as the family makes them."""
    return tensors


@dataclass(kw_only=True)
class TurnFitting:
    """One call of an aligner: over all its turns, media are measured once and equal repairs are made once.

    `measure` finds out what alignment needs to know of a reference, `complete` makes a repair's tensors what the
    training side expects.
    """

    family: MediaFamily
    render: Render
    measure: Callable[[MediaSource], MediaItem]
    complete: Callable[[MediaTensors], MediaTensors] = unchanged
    _items: dict[MediaSource, MediaItem] = field(default_factory=dict, init=False)
    _shared: dict[Hashable, MediaTensors] = field(default_factory=dict, init=False)

    def item(self, source: MediaSource) -> MediaItem:
        """The measured medium behind a reference."""
        if source not in self._items:
            self._items[source] = self.measure(source)
        return self._items[source]

    def judge(
        self, turn: TurnRequest, media: tuple[MediaItem, ...], static_grids: tuple[Grid, ...] | None
    ) -> AlignedTurn:
        """Align a turn against static grids, one per run; what is open is judged with the engine request."""

        def align(request: EngineRequest | None = None) -> AlignedTurn:
            return align_turn(
                turn.token_ids,
                media,
                family=self.family,
                static=None if static_grids is None else MediaTensors(grids=static_grids, values={}),
                captured=turn.captured,
                evidence=turn.evidence,
                request=request,
                ordered=turn.ordered,
                sampled=turn.sampled,
                render=self.render,
                row_id=turn.row_id,
                turn=turn.turn,
            )

        aligned = align()
        # Only what is open needs the request's other media, whose files have to be read.
        undecided = {Reason.AMBIGUOUS_GRID, Reason.ORDER_SUSPECT} & set(aligned.report.reasons())
        if undecided and (request := self._engine_request(turn)):
            aligned = align(request)
        return aligned

    def result(self, turn: TurnRequest, aligned: AlignedTurn, repair_ms: float) -> AlignedTurn:
        """What is sent back: tensors only where they are not the static ones, and once for equal repairs."""
        if not aligned.changed:
            return AlignedTurn(tensors=None, report=aligned.report, changed=False)
        tensors = aligned.tensors
        if tensors is not None:
            key = (
                tuple((source.ref, source.kind) for source in turn.media),
                tensors.grids,
                aligned.report.neutral,
            )
            tensors = self._shared.setdefault(key, self.complete(tensors))
        report = dataclasses.replace(aligned.report, repair_ms=repair_ms)
        return AlignedTurn(tensors=tensors, report=report, changed=True)

    def _engine_request(self, turn: TurnRequest) -> EngineRequest | None:
        if turn.max_model_len is None:
            return None
        every = [self.item(source) for source in (*turn.earlier_media, *turn.media, *turn.later_media)]
        if any(item.error or item.kind != "image" for item in every):
            return None
        return EngineRequest(
            max_model_len=turn.max_model_len,
            sizes=tuple(item.size for item in every),
            first=len(turn.earlier_media),
        )
