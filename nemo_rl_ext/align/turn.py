# SPDX-License-Identifier: Apache-2.0
"""Align one turn: runs + media + static tensors -> tensors that fit the runs exactly, and a report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl_ext.align.evidence import EngineRequest, Evidence, other_pixels
from nemo_rl_ext.align.families.family import MediaFamily, MediaTensors
from nemo_rl_ext.align.grids import Array, Grid
from nemo_rl_ext.align.items import ContentChangedError, MediaItem
from nemo_rl_ext.align.plan import plan_turn
from nemo_rl_ext.align.runs import PlaceholderRuns, find_all_runs
from nemo_rl_ext.align.verdict import Fault, GridSource, Reason, TurnReport, Verdict

Render = Callable[[MediaItem, Grid], torch.Tensor]
Identify = Callable[[MediaItem], MediaItem]
Pack = Callable[[Sequence[MediaItem], Sequence[Grid], Sequence[torch.Tensor]], MediaTensors]
TokenIds = Sequence[int] | Array | torch.Tensor

LONGEST_TEXT = 4096
"""Tokens before a run that are decoded, to read what it says of its frames."""


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
    token_ids: TokenIds,
    media: Sequence[MediaItem],
    *,
    family: MediaFamily,
    static_grids: Sequence[Grid] | None = None,
    captured: Sequence[Grid] | None = None,
    evidence: Sequence[Evidence] | None = None,
    request: EngineRequest | None = None,
    ordered: bool = False,
    sampled: bool = False,
    row_id: str = "",
    turn: int = 0,
) -> TurnReport:
    """Judge whether static media fit a turn's runs, before anything is attached and without touching a pixel.

    `static_grids` holds one grid per item (default: what the training side's processor would choose). A report
    whose items are all matched and that is not neutral says that the static tensors may be attached as they are;
    any other report prints run counts, lengths, the first differing run, frames and sizes, and what to do.
    """
    runs = find_all_runs(token_ids, family.grammars)
    return plan_turn(
        runs,
        media,
        family,
        texts=_texts(token_ids, runs, family) if any(item.kind == "video" for item in media) else None,
        static_grids=static_grids,
        captured=captured,
        evidence=evidence,
        request=request,
        ordered=ordered,
        sampled=sampled,
        row_id=row_id,
        turn=turn,
    )


def align_turn(
    token_ids: TokenIds,
    media: Sequence[MediaItem],
    *,
    family: MediaFamily,
    static: MediaTensors | None = None,
    captured: Sequence[Grid] | None = None,
    evidence: Sequence[Evidence] | None = None,
    request: EngineRequest | None = None,
    ordered: bool = False,
    sampled: bool = False,
    render: Render | None = None,
    identify: Identify = MediaItem.identified,
    pack: Pack | None = None,
    row_id: str = "",
    turn: int = 0,
) -> AlignedTurn:
    """Make a turn's media fit the placeholder runs in its token ids [tokens].

    Total over rollouts: whatever the ids and however broken the media, the returned tensors project to exactly one
    feature per context token. Matched turns return `static` itself (which may hold grids alone, when the tensors
    are kept elsewhere); repaired turns are rendered on the engine's grids; a turn that cannot be proven gets neutral
    media and `report.neutral`. `evidence` is what the engine's receipts say of these media, one entry per medium
    that the request had, in prompt order; `captured` is short for evidence of grids alone, one per item. `ordered`
    says that the caller wrote the request, so that the order of the media is certain; `sampled` that the ids are an
    answer's. `render` and `identify` may know an item already, and `pack` may join tensors that lie elsewhere (default:
    the family's and the item's own).

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
        evidence=evidence,
        request=request,
        ordered=ordered,
        sampled=sampled,
        row_id=row_id,
        turn=turn,
    )
    if report.neutral:
        return _neutral(token_ids, report, family)
    if not media:
        return AlignedTurn(tensors=None, report=report, changed=False)
    if static_grids is not None and all(item.verdict is Verdict.MATCHED for item in report.media):
        return AlignedTurn(tensors=static, report=report, changed=False)

    started = time.perf_counter()
    rendered: list[torch.Tensor] = []
    used = [_as_used(item, item_report.frames) for item, item_report in zip(media, report.media, strict=True)]
    for index, item_report in enumerate(report.media):
        assert item_report.grid is not None, str(report)
        try:
            said = evidence[index] if evidence is not None else Evidence()
            used[index], fault = _identified(used[index], said, identify)
            if fault is None:
                rendered.append((render or family.render)(used[index], item_report.grid))
        except ContentChangedError as error:
            fault = Fault(Reason.CONTENT_CHANGED, str(error))
        # Decoders and processors raise almost anything on a damaged file; it is this item's fault, by name.
        except Exception as error:
            fault = Fault(Reason.DECODE_FAILED, str(error) or type(error).__name__)
        if fault is not None:
            return _neutral(token_ids, _refused(report, index, fault), family)
        report = _with_identity(report, index, used[index], said)
    grids = [item.grid for item in report.media if item.grid is not None]
    tensors = (pack or family.pack)(used, grids, rendered)
    assert family.num_features(tensors) == report.num_context_tokens, str(report)
    report = dataclasses.replace(report, repair_ms=(time.perf_counter() - started) * 1e3)
    return AlignedTurn(tensors=tensors, report=report, changed=True)


def _texts(token_ids: TokenIds, runs: PlaceholderRuns, family: MediaFamily) -> list[str] | None:
    """What stands before each run, back to the run before it; None where the family cannot decode."""
    ids = np.asarray(token_ids)
    texts: list[str] = []
    after = 0
    for run in runs:
        # The start token stands right before the first context token, and an empty run's offset is its end token.
        start = max(run.offset - 1, after)
        text = family.decode(ids[max(after, start - LONGEST_TEXT) : start].astype(int).tolist())
        if text is None:
            return None
        texts.append(text)
        after = run.offset + run.length
    return texts


def _identified(item: MediaItem, said: Evidence, identify: Identify) -> tuple[MediaItem, Fault | None]:
    """The item with the digest of its pixels, where the engine named one that it must have."""
    if not said.served or said.named:
        return item, None
    item = identify(item)
    if not item.digest or item.digest == said.served:
        return item, None
    return item, Fault(Reason.CONTENT_CHANGED, other_pixels(item, said))


def _with_identity(report: TurnReport, index: int, item: MediaItem, said: Evidence) -> TurnReport:
    """The report with an identity that only the decoded pixels could prove."""
    judged = report.media[index]
    if judged.content_proven or not said.served or said.named or said.served != item.digest:
        return report
    source = GridSource.RECEIPT if judged.grid_source is GridSource.CAPTURED else judged.grid_source
    judged = dataclasses.replace(judged, content_proven=True, grid_source=source)
    media = (*report.media[:index], judged, *report.media[index + 1 :])
    return dataclasses.replace(report, media=media)


def _as_used(item: MediaItem, frames: tuple[int, ...] | None) -> MediaItem:
    """A video with the frames that the engine used in place of those that were sampled here."""
    if frames is None or frames == item.frame_indices:
        return item
    return dataclasses.replace(item, frame_indices=frames, digest="")


def _item_grids(
    static: MediaTensors | None, media: Sequence[MediaItem], family: MediaFamily
) -> tuple[Grid, ...] | None:
    """One grid per item from static tensors, which hold one per image and per tubelet.

    Tensors that hold another number of grids than the media need are no evidence: the processor's own arithmetic
    is used, and their turn can never be matched by them.
    """
    if static is None:
        return None
    counts = [family.num_tubelets(item) for item in media]
    if len(static.grids) != sum(counts):
        return None
    starts = np.concatenate(([0], np.cumsum(counts)))[:-1].astype(int)
    return tuple(static.grids[start] for start in starts)


def _neutral(token_ids: TokenIds, report: TurnReport, family: MediaFamily) -> AlignedTurn:
    return AlignedTurn(tensors=neutral_media(token_ids, family), report=report, changed=True)


def neutral_media(token_ids: TokenIds, family: MediaFamily) -> MediaTensors | None:
    """Media without content, one feature for each context token of the ids [tokens]; None where they have none."""
    runs = find_all_runs(token_ids, family.grammars)
    runs = runs.chosen(runs.lengths > 0)
    return family.neutral(runs.lengths.tolist(), runs.grammars.tolist()) if len(runs) else None


def _refused(report: TurnReport, index: int, fault: Fault) -> TurnReport:
    media = list(report.media)
    media[index] = dataclasses.replace(
        media[index],
        verdict=Verdict.UNALIGNABLE,
        reason=fault.reason,
        detail=fault.detail,
        grid=None,
        grid_source=None,
    )
    return dataclasses.replace(report, media=tuple(media), neutral=True)
