# SPDX-License-Identifier: Apache-2.0
"""Static tensors against a turn's own tokens, on the side that holds them: counts, tubelets and pruned videos."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nemo_rl_ext.align.families.family import Geometry, MediaFamily
from nemo_rl_ext.align.plan import plan_turn
from nemo_rl_ext.align.runs import RunKind, find_all_runs
from nemo_rl_ext.align.verdict import MediaReport, Reason, TurnReport, Verdict
from nemo_rl_ext.rollout.packed import is_packed


def check_static_turn(
    message: Mapping[str, Any],
    *,
    family: MediaFamily,
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
    runs = find_all_runs(np.asarray(message["token_ids"], dtype=np.int64), family.grammars)
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
    message: Mapping[str, Any], family: MediaFamily, temporal_patch_size: int
) -> list[MediaReport] | None:
    values = {key: message[key].as_tensor() for key in family.keys() if is_packed(message.get(key))}
    packed = family.items_in({key: value for key, value in values.items() if value is not None})
    if not packed:
        return None
    items: list[MediaReport] = []
    for index, item in enumerate(packed):
        tubelets = math.ceil(item.num_frames / temporal_patch_size) if item.kind == "video" else 1
        items.append(
            MediaReport(
                index=index,
                kind=item.kind,
                size=item.size,
                source="static tensors",
                verdict=Verdict.MATCHED,
                expected=family.run_lengths(Geometry(item.grid, tubelets), item.kind),
                found=(),
                static_grid=item.grid,
                num_frames=item.num_frames,
            )
        )
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
