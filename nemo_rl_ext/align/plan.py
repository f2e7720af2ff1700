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
from nemo_rl_ext.align.shares import RunShare, label_problem, share_runs
from nemo_rl_ext.align.timestamps import TubeletLabel, frame_indices
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
    labels: Sequence[TubeletLabel | None] | None = None,
    static_grids: Sequence[Grid] | None = None,
    captured: Sequence[Grid] | None = None,
    request: EngineRequest | None = None,
    fault: tuple[Reason, str] | None = None,
    row_id: str = "",
    turn: int = 0,
) -> TurnReport:
    """Judge every media item of a turn; never raises on what a rollout can contain.

    `labels` are what the text before each run says of its frames (None for a still image's run); without them a
    video is taken to have the frames that were sampled. `static_grids` are the grids of the tensors that the
    training side already has (default: what its processor would choose), one per item; `captured` are the grids
    that the engine recorded for these items. The report is neutral when any item is unproven, any run is not
    accounted for, or the caller already knows a `fault`.
    """
    static = tuple(static_grids) if static_grids is not None else family.static_grids(items)
    counts = [family.num_runs(item) for item in items]
    expected = tuple(
        family.num_tokens(grid) for grid, count in zip(static, counts, strict=True) for _ in range(count)
    )
    found = tuple(runs.lengths.tolist())
    shares: list[RunShare] = []
    fault = fault or _run_fault(runs, items)
    if fault is None:
        shared = share_runs(found, labels, items, counts)
        if isinstance(shared, str):
            videos = any(item.kind == "video" for item in items)
            fault = (Reason.TUBELET_COUNT if videos else Reason.RUN_COUNT), shared
        else:
            shares = shared
            fault = _empty_fault(runs, items)
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

    judged = [
        _judge(index, item, share, grid, family, captured[index] if captured is not None else None)
        for index, (item, share, grid) in enumerate(zip(items, shares, static, strict=True))
    ]
    if any(report.verdict is Verdict.AMBIGUOUS for report in judged) and request is not None:
        judged = _replay(judged, items, family, request)
    judged = _suspect_order(judged, items, family)
    neutral = any(report.verdict in (Verdict.AMBIGUOUS, Verdict.UNALIGNABLE) for report in judged)
    return TurnReport(
        row_id=row_id, turn=turn, media=tuple(judged), expected=expected, found=found, neutral=neutral
    )


def _run_fault(runs: PlaceholderRuns, items: Sequence[MediaItem]) -> tuple[Reason, str] | None:
    """The first run that no engine writes for media, or None."""
    cut = [run for kind in (RunKind.UNOPENED, RunKind.UNCLOSED) for run in runs.of_kind(kind)]
    if cut:
        return Reason.TRUNCATED_RUN, f"the run at token {cut[0].offset} is {cut[0].kind.value}"
    bare = runs.of_kind(RunKind.BARE)
    if len(bare):
        tokens = "token" if bare.num_tokens == 1 else "tokens"
        return (
            Reason.BARE_CONTEXT,
            f"{bare.num_tokens} context {tokens} outside any run, first at {bare[0].offset}",
        )
    return None


def _empty_fault(runs: PlaceholderRuns, items: Sequence[MediaItem]) -> tuple[Reason, str] | None:
    empty = runs.of_kind(RunKind.EMPTY)
    if not len(empty):
        return None
    pruned = any(item.kind == "video" for item in items) and len(empty) < len(runs)
    reason = Reason.PRUNED_VIDEO if pruned else Reason.EMPTY_RUN
    return reason, f"{len(empty)} of {len(runs)} runs are empty"


def _split(values: tuple[int, ...], counts: Sequence[int]) -> list[tuple[int, ...]]:
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
            zip(items, static, _split(expected, counts), _split(found, counts), strict=True)
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
    frames: tuple[int, ...] | None = None,
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
        frames=frames,
    )


def _judge(
    index: int, item: MediaItem, share: RunShare, static: Grid, family: MediaFamily, captured: Grid | None
) -> MediaReport:
    """One item against its own runs."""
    expected = (family.num_tokens(static),) * family.num_runs(item)
    frames: tuple[int, ...] | None = None

    def conclude(verdict: Verdict, **facts) -> MediaReport:
        return _report(index, item, verdict, static, expected, share.lengths, frames=frames, **facts)

    def refuse(reason: Reason, detail: str) -> MediaReport:
        return conclude(Verdict.UNALIGNABLE, reason=reason, detail=detail)

    def proven(grid: Grid, source: GridSource) -> MediaReport:
        other_frames = frames is not None and frames != item.frame_indices
        if grid == static and not other_frames:
            return conclude(Verdict.MATCHED, grid=grid, source=source)
        reason = Reason.FRAMES_RESAMPLED if other_frames else Reason.RESIZED
        return conclude(Verdict.REPAIRED, grid=grid, source=source, reason=reason)

    if item.error:
        return refuse(Reason.DECODE_FAILED, item.error)
    if item.kind == "video" and share.labels:
        problem = label_problem(share.labels, family.frames_per_tubelet())
        if problem:
            return refuse(Reason.TUBELET_COUNT, problem)
        times = [time for label in share.labels for time in label.times]
        frames = frame_indices(times, item.fps, hint=item.frame_indices)
        if frames is None or (item.total_frames and max(frames) >= item.total_frames):
            clip = f"a clip of {item.total_frames} frames at {item.fps:g} per second"
            return refuse(
                Reason.FRAME_TIMES, f"the times {times[0]} to {times[-1]} s are not frames of {clip}"
            )
        if frames != item.frame_indices and list(frames) != sorted(frames):
            return refuse(Reason.FRAME_TIMES, f"the times {', '.join(times[:6])} s run backwards")
    if len(set(share.lengths)) != 1:
        return refuse(Reason.FRAME_GRID, "the tubelets' runs differ in length")
    length = share.lengths[0]
    if captured is not None:
        if family.num_tokens(captured) == length:
            return proven(captured, GridSource.CAPTURED)
        tokens = family.num_tokens(captured)
        return refuse(Reason.CAPTURE_DISAGREES, f"the captured grid {captured} has {tokens} tokens")
    feasible = family.feasible_grids(item, length)
    if len(feasible) == 1:
        return proven(feasible[0], GridSource.STATIC if feasible[0] == static else GridSource.UNIQUE)
    if feasible:
        detail = f"grids {', '.join(map(str, feasible))} all have {length} tokens"
        return conclude(Verdict.AMBIGUOUS, reason=Reason.AMBIGUOUS_GRID, detail=detail)
    return refuse(Reason.INFEASIBLE_LENGTH, f"no patch budget gives this size {length} tokens")


def _replay(
    media: list[MediaReport], items: Sequence[MediaItem], family: MediaFamily, request: EngineRequest
) -> list[MediaReport]:
    """Settle ties with the engine's joint budget, when it reproduces every run of this turn."""
    grids = family.joint_grids(request.sizes, request.max_model_len)
    if grids is None:
        return media
    grids = grids[request.first : request.first + len(media)]
    same_images = request.sizes[request.first : request.first + len(media)] == tuple(
        item.size for item in items
    )
    lengths = [(family.num_tokens(grid),) for grid in grids]
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
            frames=report.frames,
        )
        for report, grid in zip(media, grids, strict=True)
    ]


def _suspect_order(
    media: list[MediaReport], items: Sequence[MediaItem], family: MediaFamily
) -> list[MediaReport]:
    """Name the order where an item's run is infeasible but would fit another item, and that one's fits it."""
    misfits = [report for report in media if report.reason is Reason.INFEASIBLE_LENGTH]
    if not misfits or len(media) > MAX_ORDER_SEARCH:
        return media
    out = list(media)
    for report in misfits:
        for other in media:
            if other.index == report.index or not other.found or len(other.found) != len(report.found):
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
