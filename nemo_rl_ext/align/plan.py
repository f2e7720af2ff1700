# SPDX-License-Identifier: Apache-2.0
"""From a turn's runs to one verdict per media item. Numbers only: no pixels are touched, no family is known by name."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from nemo_rl_ext.align.evidence import (
    EngineRequest,
    Evidence,
    count_fault,
    identity_faults,
    placement_fault,
)
from nemo_rl_ext.align.families.family import Geometry, MediaFamily, Seen
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.limits import Limits
from nemo_rl_ext.align.order import Claim, rivals, settled
from nemo_rl_ext.align.runs import PlaceholderRuns
from nemo_rl_ext.align.structure import run_fault
from nemo_rl_ext.align.verdict import Fault, GridSource, MediaReport, Reason, TurnReport, Verdict

__all__ = ["EngineRequest", "plan_turn"]


def plan_turn(
    runs: PlaceholderRuns,
    items: Sequence[MediaItem],
    family: MediaFamily,
    *,
    texts: Sequence[str] | None = None,
    static_grids: Sequence[Grid] | None = None,
    captured: Sequence[Grid] | None = None,
    evidence: Sequence[Evidence] | None = None,
    request: EngineRequest | None = None,
    ordered: bool = False,
    sampled: bool = False,
    fault: tuple[Reason, str] | None = None,
    row_id: str = "",
    turn: int = 0,
) -> TurnReport:
    """Judge every media item of a turn; never raises on what a rollout can contain.

    `texts` are what stands before each run; without them a video is taken to have the frames that were sampled.
    `static_grids` are the grids of the tensors that the training side already has (default: what its processor would
    choose), one per item. `evidence` is what the engine said of these items, `captured` is short for evidence that
    knows grids alone. `ordered` says that the caller wrote the request itself, so that the engine had these media in
    this order; `sampled` that the ids are an answer's. The report is neutral when any item is unproven, any run is
    not accounted for, or the caller already knows a `fault`.
    """
    static = _static(items, family, static_grids)
    expected_by_item = [
        family.run_lengths(geometry, item.kind) for geometry, item in zip(static, items, strict=True)
    ]
    expected = tuple(length for lengths in expected_by_item for length in lengths)
    found = tuple(runs.lengths.tolist())
    if evidence is None and captured is not None:
        evidence = [Evidence(grid=grid) for grid in captured]
    seen: list[Seen] = []
    known = Fault(*fault) if fault is not None else run_fault(runs, items, family, sampled=sampled)
    if known is None and evidence is not None:
        known = count_fault(items, evidence) or placement_fault(runs, evidence)
    if known is None:
        shared = family.split(runs, texts, items)
        if isinstance(shared, Fault):
            known = shared
        else:
            seen = shared
            known = _empty_fault(found, items)
    if known is not None:
        return TurnReport(
            row_id=row_id,
            turn=turn,
            media=_all_unalignable(items, static, expected_by_item, found, known.reason),
            expected=expected,
            found=found,
            neutral=True,
            reason=known.reason,
            detail=known.detail,
        )

    said = list(evidence) if evidence is not None else [Evidence()] * len(items)
    strangers = identity_faults(items, said)
    judges = [
        _Judge(index, item, share, geometry, lengths, family, word, stranger)
        for index, (item, share, geometry, lengths, word, stranger) in enumerate(
            zip(items, seen, static, expected_by_item, said, strangers, strict=True)
        )
    ]
    media = _settle(judges, [judge.report() for judge in judges], family, request, ordered=ordered)
    neutral = any(report.verdict in (Verdict.AMBIGUOUS, Verdict.UNALIGNABLE) for report in media)
    return TurnReport(
        row_id=row_id, turn=turn, media=tuple(media), expected=expected, found=found, neutral=neutral
    )


def _static(
    items: Sequence[MediaItem], family: MediaFamily, grids: Sequence[Grid] | None
) -> tuple[Geometry, ...]:
    if grids is None:
        return family.static(items)
    return tuple(Geometry(grid, family.num_tubelets(item)) for grid, item in zip(grids, items, strict=True))


def _empty_fault(found: tuple[int, ...], items: Sequence[MediaItem]) -> Fault | None:
    empty = found.count(0)
    if not empty:
        return None
    pruned = any(item.kind == "video" for item in items) and empty < len(found)
    reason = Reason.PRUNED_VIDEO if pruned else Reason.EMPTY_RUN
    return Fault(reason, f"{empty} of {len(found)} runs are empty")


def _all_unalignable(
    items: Sequence[MediaItem],
    static: Sequence[Geometry],
    expected: Sequence[tuple[int, ...]],
    found: tuple[int, ...],
    reason: Reason,
) -> tuple[MediaReport, ...]:
    """Every item with as many of the runs as it should have, in order."""
    left = iter(found)
    return tuple(
        _report(
            index,
            item,
            Verdict.UNALIGNABLE,
            geometry.grid,
            lengths,
            tuple(itertools.islice(left, len(lengths))),
            reason=reason,
        )
        for index, (item, geometry, lengths) in enumerate(zip(items, static, expected, strict=True))
    )


def _report(
    index: int,
    item: MediaItem,
    verdict: Verdict,
    static: Grid,
    expected: tuple[int, ...],
    found: tuple[int, ...],
    **facts: Any,
) -> MediaReport:
    return MediaReport(
        index=index,
        kind=item.kind,
        size=item.size,
        source=item.source,
        verdict=verdict,
        expected=expected,
        found=found,
        static_grid=static,
        num_frames=item.num_frames,
        **facts,
    )


class _Judge:
    """One item against its own runs, and against those of others."""

    def __init__(
        self,
        index: int,
        item: MediaItem,
        seen: Seen,
        static: Geometry,
        expected: tuple[int, ...],
        family: MediaFamily,
        evidence: Evidence,
        stranger: Fault | None,
    ) -> None:
        self.index, self.item, self.seen = index, item, seen
        self.static, self.expected, self.family = static, expected, family
        # What a client named itself may be other pixels under that name.
        self.evidence = Evidence(runs=evidence.runs) if evidence.named else evidence
        self.stranger = stranger
        self.frames: tuple[int, ...] | None = None
        self.content_proven = bool(self.evidence.served) and self.evidence.served == item.digest

    def claim(self, seen: Seen, evidence: Evidence) -> Claim | Fault:
        """What these runs say if they are this item's: its frames and every geometry that is left open."""
        frames = self.family.frames(self.item, seen, evidence.frames or ())
        if isinstance(frames, Fault):
            return frames
        if evidence.frames is not None and self.item.kind == "video":
            if frames is None:
                frames = evidence.frames
            elif frames != evidence.frames:
                return Fault(
                    Reason.CAPTURE_DISAGREES, "its record has other frames than the text before its runs"
                )
        item = self.item if frames is None else dataclasses.replace(self.item, frame_indices=frames)
        candidates = self.family.candidates(item, seen)
        if isinstance(candidates, Fault):
            return candidates
        return Claim(frames=frames, geometries=candidates)

    def report(self) -> MediaReport:
        if self.item.error:
            return self.refuse(Reason.DECODE_FAILED, self.item.error)
        if self.stranger is not None:
            return self.refuse(*self.stranger)
        claim = self.claim(self.seen, self.evidence)
        if isinstance(claim, Fault):
            return self.refuse(*claim)
        self.frames = claim.frames
        lengths = self.seen.lengths
        said = self.evidence.grid
        if said is not None:
            fitting = [geometry for geometry in claim.geometries if self.evidence.fits(geometry)]
            if len(fitting) == 1:
                source = GridSource.RECEIPT if self.content_proven else GridSource.CAPTURED
                return self.proven(fitting[0], source)
            if not fitting:
                return self.refuse(Reason.CAPTURE_DISAGREES, self._disagreement(said))
        if len(claim.geometries) == 1:
            (only,) = claim.geometries
            return self.proven(only, GridSource.STATIC if only == self.static else GridSource.UNIQUE)
        if claim.geometries:
            grids = ", ".join(map(str, claim.geometries))
            return self.conclude(
                Verdict.AMBIGUOUS,
                reason=Reason.AMBIGUOUS_GRID,
                detail=f"grids {grids} all have {lengths[0]} tokens",
            )
        if len(lengths) == 1 and lengths[0] == 2 * sum(self.expected) - 1:
            return self.refuse(
                Reason.DOUBLY_EXPANDED, f"its run has {lengths[0]} tokens, which is its own run inside itself"
            )
        return self.refuse(Reason.INFEASIBLE_LENGTH, f"no patch budget gives this size {lengths[0]} tokens")

    def _disagreement(self, said: Grid) -> str:
        tubelets = self.evidence.tubelets or self.family.num_tubelets(self.used())
        tokens = self.family.run_lengths(Geometry(said, tubelets), self.item.kind)
        if tokens != self.seen.lengths:
            return f"the captured grid {said} has {tokens[0]} tokens"
        height, width = self.item.size
        return (
            f"the captured grid {said} has {tokens[0]} tokens, too, but no budget gives it to height {height} x width "
            f"{width}"
        )

    def used(self) -> MediaItem:
        """The item with the frames that the engine used."""
        return self.item if self.frames is None else dataclasses.replace(self.item, frame_indices=self.frames)

    def conclude(self, verdict: Verdict, **facts: Any) -> MediaReport:
        return _report(
            self.index,
            self.item,
            verdict,
            self.static.grid,
            self.expected,
            self.seen.lengths,
            frames=self.frames,
            content_proven=self.content_proven,
            **facts,
        )

    def refuse(self, reason: Reason, detail: str) -> MediaReport:
        unknown = reason is Reason.FRAMES_UNKNOWN
        verdict = Verdict.AMBIGUOUS if unknown else Verdict.UNALIGNABLE
        return self.conclude(verdict, reason=reason, detail=detail)

    def proven(self, geometry: Geometry, source: GridSource) -> MediaReport:
        other_frames = self.frames is not None and self.frames != self.item.frame_indices
        if geometry.grid == self.static.grid and not other_frames:
            return self.conclude(Verdict.MATCHED, grid=geometry.grid, grid_source=source)
        reason = Reason.FRAMES_RESAMPLED if other_frames else Reason.RESIZED
        return self.conclude(Verdict.REPAIRED, grid=geometry.grid, grid_source=source, reason=reason)


def _settle(
    judges: Sequence[_Judge],
    media: list[MediaReport],
    family: MediaFamily,
    request: EngineRequest | None,
    *,
    ordered: bool,
) -> list[MediaReport]:
    """Decide what an item and its own run leave open: ties between grids, and whose run it is at all."""
    ties = {report.index for report in media if report.verdict is Verdict.AMBIGUOUS}
    exchanges: dict[int, int] = {}
    # Media that all have the most that they can have have nothing to exchange: one would need more.
    if any(family.most_tokens(judge.item) != max(judge.seen.lengths) for judge in judges) and len(judges) > 1:
        exchanges = rivals(
            [(judge.seen, judge.evidence.grid) for judge in judges],
            lambda index, other: _accepts(judges[index], judges[other]),
            [ordered or _out_of_question(*pair) for pair in zip(judges, media, strict=True)],
        )
    if request is not None and (ties or exchanges):
        proof = settled(request, [judge.item for judge in judges], [judge.seen for judge in judges], family)
        if proof is not None:
            exchanges = {}
            for index in ties:
                if (grid := proof[index]) is not None:
                    media[index] = judges[index].proven(Geometry(grid), GridSource.REPLAYED)
    for index, other in exchanges.items():
        media[index] = _suspect(judges[index], media[index], judges[other])
    return media


def _out_of_question(judge: _Judge, report: MediaReport) -> bool:
    """Whether an item need not be looked for elsewhere: known by its content, or a clip at just its own times."""
    own_times = report.verdict is Verdict.MATCHED and report.frames is not None
    return own_times or judge.content_proven or bool(judge.stranger or judge.item.error)


def _accepts(judge: _Judge, other: _Judge) -> tuple[Limits, ...]:
    """The limits under which the other item's runs could be this one's, as far as anything is known of them."""
    item, seen, said = judge.item, other.seen, other.evidence.grid
    if item.kind == other.item.kind == "image" and said is None:
        # Every pair of a turn is asked for: what names no frames takes the short way.
        possible = judge.family.candidates(item, seen)
        return judge.family.limits(item, seen) if possible and not isinstance(possible, Fault) else ()
    claim = judge.claim(other.seen, Evidence(frames=other.evidence.frames))
    if isinstance(claim, Fault) or not any(other.evidence.fits(geometry) for geometry in claim.geometries):
        return ()
    if claim.frames is not None:
        item = dataclasses.replace(item, frame_indices=claim.frames)
    return judge.family.limits(item, other.seen)


def _suspect(judge: _Judge, report: MediaReport, other: _Judge) -> MediaReport:
    if report.reason is Reason.INFEASIBLE_LENGTH:
        return judge.refuse(
            Reason.ORDER_SUSPECT, f"its run fits {other.item.source} and that one's run fits it"
        )
    if report.verdict is Verdict.UNALIGNABLE:
        return report
    return judge.conclude(
        Verdict.AMBIGUOUS,
        reason=Reason.ORDER_SUSPECT,
        detail=f"in another order every run fits as well: this one could have that of {other.item.source}",
    )
