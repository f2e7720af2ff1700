# SPDX-License-Identifier: Apache-2.0
"""From a request's receipt to the evidence that a turn's media are judged on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from nemo_rl_ext.align.evidence import Evidence
from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.receipts.receipt import ItemReceipt, Receipt, prompt_digest


def belongs_to(receipt: Receipt, prompt_token_ids: np.ndarray) -> bool:
    """Whether a receipt is that of a request with exactly this prompt [tokens], as the engine used it."""
    return receipt.prompt_tokens == len(prompt_token_ids) and receipt.prompt == prompt_digest(
        prompt_token_ids
    )


def same_media(left: Sequence[ItemReceipt], right: Sequence[ItemReceipt]) -> bool:
    """Whether the engine used the same pixels, frames and geometry for each of these items."""
    return [_content(item) for item in left] == [_content(item) for item in right]


def items_of_turn(receipt: Receipt, first: int, offset: int) -> tuple[ItemReceipt, ...]:
    """The items of a request from number `first` on, their places counted from token `offset` of its prompt."""
    return tuple(
        msgspec.structs.replace(
            item,
            range=(item.range[0] - offset, item.range[1]),
            runs=tuple((start - offset, length) for start, length in item.runs),
        )
        for item in receipt.items[first:]
    )


def evidence_of(
    items: Sequence[ItemReceipt], media: Sequence[MediaItem], token_ids: np.ndarray, family: MediaFamily
) -> tuple[Evidence, ...]:
    """What the engine said of a turn's media, one entry per medium that the request had.

    `items` are counted in the turn's own `token_ids` [tokens], `media` are what the training side holds for it. What
    the two have in common is for `align_turn` to find out.
    """
    context_ids = [grammar.context_id for grammar in family.grammars]
    is_context = np.isin(np.asarray(token_ids), context_ids)
    evidence = []
    for place, item in enumerate(items):
        held = media[place] if place < len(media) and media[place].kind == item.kind else None
        geometry = family.captured(held, item.geometry) if held is not None and item.geometry else None
        frames = item.frames.indices if item.frames is not None else ()
        evidence.append(
            Evidence(
                grid=geometry.grid if geometry is not None else None,
                tubelets=geometry.tubelets if geometry is not None and item.kind == "video" else None,
                frames=frames or None,
                runs=_known_runs(item, is_context),
                served=item.served or "",
                named=item.named,
            )
        )
    return tuple(evidence)


def _content(item: ItemReceipt) -> tuple[object, ...]:
    return item.kind, item.served, item.geometry, item.frames


def _known_runs(item: ItemReceipt, is_context: np.ndarray) -> tuple[tuple[int, int], ...] | None:
    """Where an item's features lie; None where that is told by a range alone which the ids contradict.

    Such a range may be of other ids: NeMo-RL's server replaces a prompt's ids and leaves its ranges as they were.
    """
    found = _feature_runs(item, is_context)
    if item.is_place and not all(_is_run(*run, is_context) for run in found):
        return None
    return found


def _is_run(start: int, length: int, is_context: np.ndarray) -> bool:
    end = start + length
    if start < 0 or end > len(is_context):
        return False
    beside = is_context[start - 1 : start].any() or is_context[end : end + 1].any()
    return bool(is_context[start:end].all() and not beside)


def _feature_runs(item: ItemReceipt, is_context: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The tokens that got an item's features.

    Some models mark a clip's whole range, timestamps included, and put the text's own embeddings back: then the
    features lie on the context tokens in it. A range without any is left as it is, and contradicts the ids.
    """
    if item.runs != (item.range,):
        return item.runs
    start, length = item.range
    if start < 0 or start + length > len(is_context):
        return item.runs
    inside = np.flatnonzero(np.diff(np.concatenate(([False], is_context[start : start + length], [False]))))
    found = tuple((start + int(first), int(last) - int(first)) for first, last in inside.reshape(-1, 2))
    return found or item.runs
