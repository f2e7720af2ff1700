# SPDX-License-Identifier: Apache-2.0
"""Fitting turns to their runs: what every aligner does, whatever its trainer's static tensors look like."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from nemo_rl_ext.align.evidence import EngineRequest, Evidence
from nemo_rl_ext.align.families.family import MediaFamily, MediaTensors
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import AlignedTurn, Identify, Pack, Render, align_turn
from nemo_rl_ext.align.verdict import MediaReport, Reason, TurnReport
from nemo_rl_ext.media.reader import MediaFacts, MediaSource
from nemo_rl_ext.receipts.evidence import evidence_of
from nemo_rl_ext.receipts.receipt import ItemReceipt


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One turn to align: its ids [tokens], its media in prompt order, and what is known about the engine.

    `facts` are what was measured of the media before (one per item), so that a turn with nothing to repair touches
    no file; without them each item is measured again. `static_grids` are the grids of the static tensors that the
    driver holds for this turn, one per run, None where it holds none. A matched turn then comes back without
    tensors. `receipt` is what the engine said of the turn's media, counted in its own ids; `captured`, `ordered` and
    `sampled` are those of `align_turn`. `max_model_len` is the engine's
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
    receipt: tuple[ItemReceipt, ...] | None = None
    ordered: bool = False
    sampled: bool = False
    max_model_len: int | None = None
    earlier_media: tuple[MediaSource, ...] = ()
    later_media: tuple[MediaSource, ...] = ()

    def identity(self) -> Hashable:
        """Equal for two turns of one row that must come out equal."""
        media = (self.earlier_media, self.media, self.later_media)
        receipt = msgspec.json.encode(self.receipt)
        return self.turn, self.token_ids.tobytes(), media, self.static_grids, self.captured, receipt


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
    identify: Identify = MediaItem.identified
    pack: Pack | None = None
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
        evidence = (
            evidence_of(turn.receipt, media, turn.token_ids, self.family)
            if turn.receipt is not None
            else None
        )
        items = media

        def align(request: EngineRequest | None) -> AlignedTurn:
            return align_turn(
                turn.token_ids,
                items,
                family=self.family,
                static=None if static_grids is None else MediaTensors(grids=static_grids, values={}),
                captured=turn.captured,
                evidence=evidence,
                request=request,
                ordered=turn.ordered,
                sampled=turn.sampled,
                render=self.render,
                identify=self.identify,
                pack=self.pack,
                row_id=turn.row_id,
                turn=turn.turn,
            )

        aligned = align(None)
        # Only what is open needs the request's other media, whose files have to be read.
        undecided = {Reason.AMBIGUOUS_GRID, Reason.ORDER_SUSPECT} & set(aligned.report.reasons())
        request = self._engine_request(turn) if undecided else None
        if request is not None:
            aligned = align(request)
        if evidence and turn.receipt and (unproven := _unproven(aligned.report, evidence)):
            same_file = [index for index in unproven if turn.receipt[index].file == media[index].content_hash]
            if same_file != unproven:
                # The tensors are the trainer's own already; only decoding tells whether they show what was served.
                items = tuple(
                    item.identified_if_readable(self.identify) if i in unproven else item
                    for i, item in enumerate(media)
                )
                return align(request)
            reports = tuple(
                dataclasses.replace(report, content_proven=True) if report.index in unproven else report
                for report in aligned.report.media
            )
            aligned = dataclasses.replace(aligned, report=dataclasses.replace(aligned.report, media=reports))
        return aligned

    def result(
        self, turn: TurnRequest, media: tuple[MediaItem, ...], aligned: AlignedTurn, repair_ms: float
    ) -> AlignedTurn:
        """What is sent back: tensors only where they are not the static ones, and once for equal repairs."""
        if not aligned.changed:
            return AlignedTurn(tensors=None, report=aligned.report, changed=False)
        tensors = aligned.tensors
        if tensors is not None:
            # By what was decoded, never by name: rows may call different frames by one name. A damaged turn's blank
            # media are those of its runs alone.
            neutral = aligned.report.neutral
            content: tuple[Hashable, ...] = tuple(map(_content, media, aligned.report.media))
            if neutral:
                # Blank images and blank clips of one grid are different tensors.
                content = tuple((key, tuple(value.shape)) for key, value in tensors.values.items())
            tensors = self.complete(tensors)
            if None not in content:
                tensors = self._shared.setdefault((content, tensors.grids, neutral), tensors)
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


def _content(item: MediaItem, report: MediaReport) -> Hashable:
    """What was decoded of an item: its content and the frames that were used; None where it is not known."""
    return (item.content_hash, report.frames or item.frame_indices) if item.content_hash else None


def _unproven(report: TurnReport, evidence: Sequence[Evidence]) -> list[int]:
    """Media that fit by their runs, of which the engine named the pixels, and whose own pixels nobody compared yet."""
    if report.neutral:
        return []
    return [
        item.index
        for item, said in zip(report.media, evidence, strict=True)
        if said.served and not said.named and not item.content_proven
    ]
