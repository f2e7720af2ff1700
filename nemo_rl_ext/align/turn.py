# SPDX-License-Identifier: Apache-2.0
"""Align one turn: runs + media + static tensors -> tensors that fit the runs exactly, and a report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nemo_rl_ext.align.families.family import MediaFamily, MediaTensors
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.plan import EngineRequest, plan_turn
from nemo_rl_ext.align.runs import PlaceholderRuns, find_runs
from nemo_rl_ext.align.timestamps import LONGEST_LABEL, TubeletLabel, read_label
from nemo_rl_ext.align.verdict import Reason, TurnReport, Verdict

Render = Callable[[MediaItem, Grid], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class AlignedTurn:
    """The tensors of one turn and what was concluded about them.

    `tensors` is None only for a turn without context tokens. `changed` says that they are not the static ones, so
    that the turn must be marked and must not be overwritten.
    """

    tensors: MediaTensors | None
    report: TurnReport
    changed: bool


def verify_turn(
    token_ids: Sequence[int] | np.ndarray | torch.Tensor,
    media: Sequence[MediaItem],
    *,
    family: MediaFamily,
    static_grids: Sequence[Grid] | None = None,
    captured: Sequence[Grid] | None = None,
    request: EngineRequest | None = None,
    row_id: str = "",
    turn: int = 0,
) -> TurnReport:
    """Judge whether static media fit a turn's runs, before anything is attached and without touching a pixel.

    `static_grids` holds one grid per item (default: what the training side's processor would choose). A report
    whose items are all matched and that is not neutral says that the static tensors may be attached as they are;
    any other report prints run counts, lengths, the first differing run, frames and sizes, and what to do.
    """
    runs = find_runs(token_ids, family.grammar)
    return plan_turn(
        runs,
        media,
        family,
        labels=_labels(token_ids, runs, family) if any(item.kind == "video" for item in media) else None,
        static_grids=static_grids,
        captured=captured,
        request=request,
        row_id=row_id,
        turn=turn,
    )


def align_turn(
    token_ids: Sequence[int] | np.ndarray | torch.Tensor,
    media: Sequence[MediaItem],
    *,
    family: MediaFamily,
    static: MediaTensors | None = None,
    captured: Sequence[Grid] | None = None,
    request: EngineRequest | None = None,
    render: Render | None = None,
    row_id: str = "",
    turn: int = 0,
) -> AlignedTurn:
    """Make a turn's media fit the placeholder runs in its token ids [tokens].

    Total over rollouts: whatever the ids and however broken the media, the returned tensors project to exactly one
    feature per context token. Matched turns return `static` itself (which may hold grids alone, when the tensors
    are kept elsewhere); repaired turns are rendered on the engine's
    grids; a turn that cannot be proven gets neutral media and `report.neutral`. `render` may cache
    (default: `family.render`).

    Raises:
        ValueError: for arguments that contradict each other (a programmer's fault), never for content.
    """
    if captured is not None and len(captured) != len(media):
        raise ValueError(f"captured grids must be one per media item: {len(captured)} for {len(media)} items")
    static_grids = _item_grids(static, media, family)
    report = verify_turn(
        token_ids,
        media,
        family=family,
        static_grids=static_grids,
        captured=captured,
        request=request,
        row_id=row_id,
        turn=turn,
    )
    if report.neutral:
        return _neutral(report, family)
    if not media:
        return AlignedTurn(tensors=None, report=report, changed=False)
    if static_grids is not None and all(item.verdict is Verdict.MATCHED for item in report.media):
        return AlignedTurn(tensors=static, report=report, changed=False)

    started = time.perf_counter()
    rendered: list[torch.Tensor] = []
    used = [_as_used(item, item_report.frames) for item, item_report in zip(media, report.media, strict=True)]
    for index, (item, item_report) in enumerate(zip(used, report.media, strict=True)):
        try:
            rendered.append((render or family.render)(item, item_report.grid))
        except (ValueError, OSError) as error:
            return _neutral(_decode_failed(report, index, error), family)
    tensors = family.pack(used, [item.grid for item in report.media], rendered)
    assert sum(map(family.num_tokens, tensors.grids)) == report.num_context_tokens, str(report)
    report = dataclasses.replace(report, repair_ms=(time.perf_counter() - started) * 1e3)
    return AlignedTurn(tensors=tensors, report=report, changed=True)


def _labels(
    token_ids: Sequence[int] | np.ndarray | torch.Tensor, runs: PlaceholderRuns, family: MediaFamily
) -> list[TubeletLabel | None] | None:
    """What the text before each run says of its frames; None where the family cannot decode."""
    ids = np.asarray(token_ids)
    labels: list[TubeletLabel | None] = []
    after = 0
    for run in runs:
        # The start token stands right before the first context token, and an empty run's offset is its end token.
        start = max(run.offset - 1, after)
        text = family.decode(ids[max(after, start - LONGEST_LABEL) : start].astype(int).tolist())
        if text is None:
            return None
        labels.append(read_label(text))
        after = run.offset + run.length
    return labels


def _as_used(item: MediaItem, frames: tuple[int, ...] | None) -> MediaItem:
    """A video with the frames that the engine used in place of those that were sampled here."""
    return item if frames is None else dataclasses.replace(item, frame_indices=frames)


def _item_grids(
    static: MediaTensors | None, media: Sequence[MediaItem], family: MediaFamily
) -> tuple[Grid, ...] | None:
    """One grid per item from static tensors, which hold one per image and per tubelet.

    Tensors that hold another number of grids than the media need are no evidence: the processor's own arithmetic
    is used, and their turn can never be matched by them.
    """
    if static is None:
        return None
    counts = [family.num_runs(item) for item in media]
    if len(static.grids) != sum(counts):
        return None
    starts = np.concatenate(([0], np.cumsum(counts)))[:-1].astype(int)
    return tuple(static.grids[start] for start in starts)


def _neutral(report: TurnReport, family: MediaFamily) -> AlignedTurn:
    lengths = [length for length in report.found if length]
    tensors = family.neutral(lengths) if lengths else None
    return AlignedTurn(tensors=tensors, report=report, changed=True)


def _decode_failed(report: TurnReport, index: int, error: Exception) -> TurnReport:
    media: list[Any] = list(report.media)
    media[index] = dataclasses.replace(
        media[index],
        verdict=Verdict.UNALIGNABLE,
        reason=Reason.DECODE_FAILED,
        detail=str(error),
        grid=None,
        grid_source=None,
    )
    return dataclasses.replace(report, media=tuple(media), neutral=True)
