# SPDX-License-Identifier: Apache-2.0
"""From a turn's runs to one grid and one verdict per media item. Numbers only: no pixels are touched."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.align.grids import Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.runs import PlaceholderRuns, RunKind
from nemo_rl_ext.align.verdict import GridSource, MediaReport, Reason, TurnReport, Verdict

MAX_ORDER_SEARCH = 64
"""Items of a turn among which swapped runs are looked for; the search is quadratic."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The request that a turn's runs come from, as far as it is known; used only to break ties.

    `sizes` are the (height, width) of every image of the request in prompt order, `first` the position of the
    turn's first image among them, and `max_model_len` the engine's context length.
    """

    max_model_len: int
    sizes: tuple[Size, ...]
    first: int = 0


def plan_turn(
    runs: PlaceholderRuns,
    items: Sequence[MediaItem],
    family: MediaFamily,
    *,
    static_grids: Sequence[Grid] | None = None,
    captured: Sequence[Grid] | None = None,
    request: EngineRequest | None = None,
    fault: tuple[Reason, str] | None = None,
    row_id: str = "",
    turn: int = 0,
) -> TurnReport:
    """Judge every media item of a turn; never raises on what a rollout can contain.

    `static_grids` are the grids of the tensors that the training side already has (default: what its processor
    would choose), one per item; `captured` are the grids that the engine recorded for these items. The report is
    neutral when any item is unproven, any run is not accounted for, or the caller already knows a `fault`.
    """
    static = tuple(static_grids) if static_grids is not None else family.static_grids(items)
    counts = [family.num_runs(item) for item in items]
    expected = tuple(
        grid.num_tokens(family.merge_size) for grid, count in zip(static, counts, strict=True) for _ in range(count)
    )
    found = tuple(runs.lengths.tolist())
    fault = fault or _structure_fault(runs, items, sum(counts))
    if fault is not None:
        reason, detail = fault
        media = _all_unalignable(items, static, counts, expected, found, reason)
        return TurnReport(
            row_id=row_id,
            turn=turn,
            media=media,
            expected=expected,
            found=found,
            neutral=True,
            reason=reason,
            detail=detail,
        )

    shares = _share(found, counts)
    media = [
        _judge(index, item, share, grid, family, captured[index] if captured is not None else None)
        for index, (item, share, grid) in enumerate(zip(items, shares, static, strict=True))
    ]
    if any(report.verdict is Verdict.AMBIGUOUS for report in media) and request is not None:
        media = _replay(media, items, family, request)
    media = _suspect_order(media, items, family)
    neutral = any(report.verdict in (Verdict.AMBIGUOUS, Verdict.UNALIGNABLE) for report in media)
    return TurnReport(row_id=row_id, turn=turn, media=tuple(media), expected=expected, found=found, neutral=neutral)


def _structure_fault(runs: PlaceholderRuns, items: Sequence[MediaItem], num_expected: int) -> tuple[Reason, str] | None:
    """The first way in which a turn's runs cannot be its media's, or None."""
    cut = [run for kind in (RunKind.UNOPENED, RunKind.UNCLOSED) for run in runs.of_kind(kind)]
    if cut:
        return Reason.TRUNCATED_RUN, f"the run at token {cut[0].offset} is {cut[0].kind.value}"
    bare = runs.of_kind(RunKind.BARE)
    if len(bare):
        tokens = "token" if bare.num_tokens == 1 else "tokens"
        return (
            Reason.BARE_CONTEXT,
            f"{bare.num_tokens} context {tokens} outside any run, the first at {bare[0].offset}",
        )
    videos = any(item.kind == "video" for item in items)
    if len(runs) != num_expected:
        reason = Reason.TUBELET_COUNT if videos else Reason.RUN_COUNT
        return reason, f"{num_expected} runs expected, {len(runs)} found"
    empty = runs.of_kind(RunKind.EMPTY)
    if len(empty):
        pruned = videos and len(empty) < len(runs)
        return (Reason.PRUNED_VIDEO if pruned else Reason.EMPTY_RUN), f"{len(empty)} empty runs"
    return None


def _share(values: tuple[int, ...], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Hand out the values in order, `counts[i]` of them to item i."""
    source = iter(values)
    return [tuple(itertools.islice(source, count)) for count in counts]


def _all_unalignable(
    items: Sequence[MediaItem],
    static: Sequence[Grid],
    counts: Sequence[int],
    expected: tuple[int, ...],
    found: tuple[int, ...],
    reason: Reason,
) -> tuple[MediaReport, ...]:
    return tuple(
        _report(index, item, Verdict.UNALIGNABLE, grid, share_expected, share_found, reason=reason)
        for index, (item, grid, share_expected, share_found) in enumerate(
            zip(items, static, _share(expected, counts), _share(found, counts), strict=True)
        )
    )


def _report(
    index: int,
    item: MediaItem,
    verdict: Verdict,
    static: Grid,
    expected: tuple[int, ...],
    found: tuple[int, ...],
    *,
    grid: Grid | None = None,
    source: GridSource | None = None,
    reason: Reason | None = None,
    detail: str = "",
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
        grid=grid,
        grid_source=source,
        reason=reason,
        detail=detail,
        num_frames=item.num_frames,
    )


def _judge(
    index: int,
    item: MediaItem,
    found: tuple[int, ...],
    static: Grid,
    family: MediaFamily,
    captured: Grid | None,
) -> MediaReport:
    """One item against its own runs."""
    expected = (static.num_tokens(family.merge_size),) * len(found)

    def conclude(verdict: Verdict, **facts) -> MediaReport:
        return _report(index, item, verdict, static, expected, found, **facts)

    def proven(grid: Grid, source: GridSource) -> MediaReport:
        if grid == static:
            return conclude(Verdict.MATCHED, grid=grid, source=source)
        return conclude(Verdict.REPAIRED, grid=grid, source=source, reason=Reason.RESIZED)

    if item.error:
        return conclude(Verdict.UNALIGNABLE, reason=Reason.DECODE_FAILED, detail=item.error)
    if len(set(found)) != 1:
        return conclude(Verdict.UNALIGNABLE, reason=Reason.FRAME_GRID, detail="the tubelets' runs differ in length")
    length = found[0]
    if captured is not None:
        if captured.num_tokens(family.merge_size) == length:
            return proven(captured, GridSource.CAPTURED)
        detail = f"the captured grid {captured} has {captured.num_tokens(family.merge_size)} tokens"
        return conclude(Verdict.UNALIGNABLE, reason=Reason.CAPTURE_DISAGREES, detail=detail)
    feasible = family.feasible_grids(item, length)
    if len(feasible) == 1:
        return proven(feasible[0], GridSource.STATIC if feasible[0] == static else GridSource.UNIQUE)
    if feasible:
        detail = f"grids {', '.join(map(str, feasible))} all have {length} tokens"
        return conclude(Verdict.AMBIGUOUS, reason=Reason.AMBIGUOUS_GRID, detail=detail)
    detail = f"no patch budget gives this size {length} tokens"
    return conclude(Verdict.UNALIGNABLE, reason=Reason.INFEASIBLE_LENGTH, detail=detail)


def _replay(
    media: list[MediaReport], items: Sequence[MediaItem], family: MediaFamily, request: EngineRequest
) -> list[MediaReport]:
    """Settle ties with the engine's joint budget, when it reproduces every run of this turn."""
    grids = family.joint_grids(request.sizes, request.max_model_len)
    if grids is None:
        return media
    grids = grids[request.first : request.first + len(media)]
    same_images = request.sizes[request.first : request.first + len(media)] == tuple(item.size for item in items)
    lengths = [(grid.num_tokens(family.merge_size),) for grid in grids]
    if not same_images or lengths != [report.found for report in media]:
        return media
    return [
        report
        if report.verdict is not Verdict.AMBIGUOUS
        else _report(
            report.index,
            items[report.index],
            Verdict.MATCHED if grid == report.static_grid else Verdict.REPAIRED,
            report.static_grid,
            report.expected,
            report.found,
            grid=grid,
            source=GridSource.REPLAYED,
            reason=None if grid == report.static_grid else Reason.RESIZED,
        )
        for report, grid in zip(media, grids, strict=True)
    ]


def _suspect_order(media: list[MediaReport], items: Sequence[MediaItem], family: MediaFamily) -> list[MediaReport]:
    """Name the order where an item's run is infeasible but would fit another item, and that one's fits it."""
    misfits = [report for report in media if report.reason is Reason.INFEASIBLE_LENGTH]
    if not misfits or len(media) > MAX_ORDER_SEARCH:
        return media
    out = list(media)
    for report in misfits:
        for other in media:
            if other.index == report.index or len(other.found) != len(report.found):
                continue
            fits = family.feasible_grids(items[report.index], other.found[0])
            fits_back = family.feasible_grids(items[other.index], report.found[0])
            if fits and fits_back:
                out[report.index] = _report(
                    report.index,
                    items[report.index],
                    Verdict.UNALIGNABLE,
                    report.static_grid,
                    report.expected,
                    report.found,
                    reason=Reason.ORDER_SUSPECT,
                    detail=f"its run fits {items[other.index].source} and that one's run fits it",
                )
                break
    return out
