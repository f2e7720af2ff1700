# SPDX-License-Identifier: Apache-2.0
"""Images of a prompt/response pair: markers become placeholder runs, runs get exactly their pixels.

An input may carry images in two ways. Each `<image>` on its own is a marker and becomes
`<img>` + N x `<image>` + `</img>` with the N that the student's processor gives the image. A run that is
already wrapped (text that comes from a rollout) is kept to the token, and `align` finds the grid that it
stands for, or refuses the record. Either way the tensors are made by `align`, so they project to one feature
per context token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nemo_rl_ext.align.families.family import MediaFamily, MediaTensors
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.runs import PlaceholderRuns, RunKind, find_runs
from nemo_rl_ext.align.turn import align_turn
from nemo_rl_ext.distill.data import EncodedPrompt, PlacedImage, Row
from nemo_rl_ext.distill.records import Record, RecordError
from nemo_rl_ext.media.errors import MediaDecodeError
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.sources import MediaPolicy


class MediaExpander:
    """Expands one record's prompt; decodes every image once, so that a broken file is found before
    training."""

    def __init__(self, family: MediaFamily, policy: MediaPolicy, *, base_dir: Path) -> None:
        self.family = family
        self.policy = policy
        self.base_dir = base_dir
        self._items: dict[str, MediaItem] = {}

    def __call__(self, record: Record, prompt_ids: np.ndarray, response_ids: np.ndarray) -> EncodedPrompt:
        """Raises `RecordError` when text and media of the record contradict each other, or an image
        is broken."""
        if record.videos:
            raise RecordError(
                "'videos' cannot be distilled yet; give the frames as 'images' or remove the record"
            )
        self._refuse_context(response_ids, "output")
        if not record.images:
            self._refuse_context(prompt_ids, "input")
            return EncodedPrompt(ids=prompt_ids)
        items = [self._item(ref, record.where) for ref in record.images]
        runs = find_runs(prompt_ids, self.family.grammar)
        markers = sum(run.length for run in runs if _is_marker(run.kind, run.length))
        wrapped = [run for run in runs if not _is_marker(run.kind, run.length)]
        odd = [run for run in wrapped if run.kind is not RunKind.WRAPPED]
        if odd:
            raise RecordError(
                f"'input' holds an {odd[0].kind.value} placeholder run at token {odd[0].offset}"
            )
        if markers and wrapped:
            raise RecordError(
                f"'input' mixes {markers} <image> marker(s) with {len(wrapped)} expanded run(s); use one of "
                f"the two"
            )
        if (markers or len(wrapped)) != len(items):
            raise RecordError(
                f"'input' has {markers or len(wrapped)} image placeholder(s) for {len(items)} image(s); "
                "write one <image> where each image stands"
            )
        return (
            self._expand(prompt_ids, runs, items) if markers else self._prove(record, prompt_ids, runs, items)
        )

    def _expand(self, ids: np.ndarray, runs: PlaceholderRuns, items: Sequence[MediaItem]) -> EncodedPrompt:
        grammar = self.family.grammar
        grids = self.family.static_grids(items)
        pieces: list[np.ndarray] = []
        spans: list[tuple[int, int]] = []
        done = length = 0
        image = iter(grids)
        for run in runs:
            start, stop = run.offset, run.offset + run.length
            if run.kind is RunKind.WRAPPED:
                start, stop = start - 1, stop + 1
            pieces.append(ids[done:start])
            length += start - done
            for _ in range(run.length):
                num_tokens = next(image).num_tokens(self.family.merge_size)
                body = np.full(num_tokens + 2, grammar.context_id, dtype=ids.dtype)
                body[0], body[-1] = grammar.start_id, grammar.end_id
                spans.append((length, length + len(body)))
                pieces.append(body)
                length += len(body)
            done = stop
        pieces.append(ids[done:])
        placed = tuple(PlacedImage(item=item, grid=grid) for item, grid in zip(items, grids, strict=True))
        return EncodedPrompt(ids=np.concatenate(pieces), runs=tuple(spans), images=placed)

    def _prove(
        self, record: Record, ids: np.ndarray, runs: PlaceholderRuns, items: Sequence[MediaItem]
    ) -> EncodedPrompt:
        report = align_turn(ids, items, family=self.family, row_id=record.where).report
        if report.neutral:
            raise RecordError(f"the placeholder runs in 'input' cannot be proven: {report}")
        return EncodedPrompt(
            ids=ids,
            runs=tuple((run.offset - 1, run.offset + run.length + 1) for run in runs),
            images=tuple(
                PlacedImage(item=item, grid=media.grid)
                for item, media in zip(items, report.media, strict=True)
            ),
        )

    def _item(self, ref: str, where: str) -> MediaItem:
        if ref not in self._items:
            try:
                image = load_image(ref, self.policy, base_dir=self.base_dir, where=where)
            except MediaDecodeError as error:
                raise RecordError(str(error)) from None
            self._items[ref] = MediaItem(
                size=image.size,
                source=ref,
                content_hash=image.content_hash,
                load=lambda: load_image(ref, self.policy, base_dir=self.base_dir).pixels[None],
            )
        return self._items[ref]

    def _refuse_context(self, ids: np.ndarray, part: str) -> None:
        for run in find_runs(ids, self.family.grammar):
            if run.length:
                raise RecordError(
                    f"{part!r} spells {run.length} image context token(s) at token {run.offset}, which no "
                    "image of the record fills; escape the text, or name the image in 'images' and mark it "
                    "in 'input'"
                )


def _is_marker(kind: RunKind, length: int) -> bool:
    # `<img><image></img>` is how some templates write a marker; a real image never has a single token.
    return kind is RunKind.BARE or (kind is RunKind.WRAPPED and length == 1)


def row_tensors(row: Row, family: MediaFamily) -> MediaTensors | None:
    """The media tensors of one row, proven against the row's own ids; None for a row without images.

    Raises:
        ValueError: an image changed or broke after it was checked.
    """
    if not row.images:
        return None
    items = [placed.item for placed in row.images]
    aligned = align_turn(
        row.ids, items, family=family, captured=[placed.grid for placed in row.images], row_id=row.where
    )
    if aligned.report.neutral:
        raise ValueError(
            f"{row.where}: an image no longer fits its row; it changed since it was checked: {aligned.report}"
        )
    return aligned.tensors
