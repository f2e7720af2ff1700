# SPDX-License-Identifier: Apache-2.0
"""Static tensors against a turn's own tokens, on the side that holds them: counts, tubelets and pruned videos."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nemo_rl_ext.align.families.nemotron import NemotronFamily
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.plan import plan_turn
from nemo_rl_ext.align.runs import RunKind, find_runs
from nemo_rl_ext.align.verdict import MediaReport, Reason, TurnReport, Verdict
from nemo_rl_ext.rollout.packed import is_packed


def check_static_turn(
    message: Mapping[str, Any],
    *,
    family: NemotronFamily,
    temporal_patch_size: int,
    row_id: str,
    turn: int,
) -> TurnReport | None:
    """Judge a user turn whose media are static; None for a turn without media, which NeMo-RL masks itself.

    Every tensor segment is compared with the runs in `token_ids`: one run per image, one per video tubelet of
    `temporal_patch_size` frames. The report is neutral when any length differs: nothing on this side shows what
    the engine saw instead.
    """
    items = _items(message, family, temporal_patch_size)
    if items is None:
        return None
    runs = find_runs(np.asarray(message["token_ids"], dtype=np.int64), family.grammar)
    found = tuple(runs.lengths.tolist())
    expected = tuple(length for item in items for length in item.expected)
    if found == expected and len(runs.of_kind(RunKind.WRAPPED)) == len(runs):
        return TurnReport(row_id=row_id, turn=turn, media=_matched(items), expected=expected, found=found)
    fault = plan_turn(runs, (), family, row_id=row_id, turn=turn)
    reason = _reason(items, expected, found)
    if fault.reason in (Reason.TRUNCATED_RUN, Reason.BARE_CONTEXT):
        reason = fault.reason
    return TurnReport(
        row_id=row_id,
        turn=turn,
        media=_unalignable(items, found, reason),
        expected=expected,
        found=found,
        neutral=True,
        reason=reason,
        detail=_detail(items, expected, found),
    )


def _items(
    message: Mapping[str, Any], family: NemotronFamily, temporal_patch_size: int
) -> list[MediaReport] | None:
    packed = message.get("imgs_sizes"), message.get("num_frames")
    if not all(map(is_packed, packed)):
        return None
    sizes, frames = (value.as_tensor() for value in packed if value is not None)
    if sizes is None or frames is None:
        return None
    patch = family.tiler.patch_size
    items: list[MediaReport] = []
    start = 0
    for index, count in enumerate(int(count) for count in frames.tolist()):
        height, width = (int(side) for side in sizes[start])
        grid = Grid(height // patch, width // patch)
        tubelets = math.ceil(count / temporal_patch_size) if count > 1 else 1
        items.append(
            MediaReport(
                index=index,
                kind="video" if count > 1 else "image",
                size=(height, width),
                source="static tensors",
                verdict=Verdict.MATCHED,
                expected=(grid.num_tokens(family.merge_size),) * tubelets,
                found=(),
                static_grid=grid,
                num_frames=count,
            )
        )
        start += count
    return items


def _shares(
    items: list[MediaReport], found: tuple[int, ...]
) -> Iterator[tuple[MediaReport, tuple[int, ...]]]:
    start = 0
    for item in items:
        end = start + len(item.expected)
        yield item, found[start:end]
        start = end


def _matched(items: list[MediaReport]) -> tuple[MediaReport, ...]:
    return tuple(replace(item, found=item.expected) for item in items)


def _unalignable(items: list[MediaReport], found: tuple[int, ...], reason: Reason) -> tuple[MediaReport, ...]:
    return tuple(
        replace(item, found=share, verdict=Verdict.UNALIGNABLE, reason=reason)
        for item, share in _shares(items, found)
    )


def _reason(items: list[MediaReport], expected: tuple[int, ...], found: tuple[int, ...]) -> Reason:
    video = any(item.kind == "video" for item in items)
    if video and 0 in found and any(found):
        return Reason.PRUNED_VIDEO
    if len(found) != len(expected):
        return Reason.TUBELET_COUNT if video else Reason.RUN_COUNT
    return Reason.FRAME_GRID if video else Reason.INFEASIBLE_LENGTH


def _detail(items: list[MediaReport], expected: tuple[int, ...], found: tuple[int, ...]) -> str:
    first = next(
        (index for index, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), None
    )
    where = f"run {first}" if first is not None else f"run {min(len(expected), len(found))}"
    frames = ", ".join(f"{item.num_frames} frames of {item.size[0]}x{item.size[1]}" for item in items)
    return f"the trainer's static tensors ({frames}) do not fit the rollout from {where} on"
