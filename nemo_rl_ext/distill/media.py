# SPDX-License-Identifier: Apache-2.0
"""Images and videos of a prompt/response pair: markers become placeholder runs, runs get exactly their pixels.

An input may carry media in two ways. Each `<image>` on its own is a marker and becomes `<img>` + N x `<image>` +
`</img>` with the N that the student's processor gives the image; each `<video>` becomes one such run per tubelet,
each after the text that names its frames' times, as the engine writes it. Runs that are already there (text
of a rollout) are kept to the token, and `align` finds the grids that they stand for, or refuses the record.
Either way the tensors are made by `align`, so they project to one feature per context token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nemo_rl_ext.align.families.family import Geometry, MediaFamily
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.runs import PlaceholderRun, PlaceholderRuns, RunKind, find_runs
from nemo_rl_ext.align.timestamps import tubelet_texts
from nemo_rl_ext.align.turn import align_turn
from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.distill.data import EncodedPrompt, PlacedMedia, Row
from nemo_rl_ext.distill.records import Record, RecordError
from nemo_rl_ext.media.errors import MediaDecodeError
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.video import Backend, load_video

VIDEO_MARKER = "<video>"


class MediaExpander:
    """Expands one record's prompt; decodes all media once, so that a broken file is found before training."""

    def __init__(
        self,
        family: MediaFamily,
        tokenizer: Any,
        policy: MediaPolicy,
        *,
        base_dir: Path,
        num_frames: int = 8,
        backend: Backend = "opencv",
    ) -> None:
        self.family = family
        self.tokenizer = tokenizer
        # Images and videos share one context token in the families that distillation knows.
        (self.grammar,) = family.grammars
        self.policy = policy
        self.base_dir = base_dir
        self.num_frames = num_frames
        self.backend: Backend = backend
        # -1 is no token: without the marker in its vocabulary a student has no videos.
        self.video_id = tokenizer.get_vocab().get(VIDEO_MARKER, -1)
        self._items: dict[tuple[str, str], MediaItem] = {}

    def __call__(self, record: Record, prompt_ids: np.ndarray, response_ids: np.ndarray) -> EncodedPrompt:
        """Raises `RecordError` when text and media contradict each other, or a file is broken."""
        self._refuse_context(response_ids, "output")
        if not record.images and not record.videos:
            self._refuse_context(prompt_ids, "input")
            return EncodedPrompt(ids=prompt_ids)
        runs = find_runs(prompt_ids, self.grammar)
        video_markers = np.flatnonzero(prompt_ids == self.video_id)
        image_markers = sum(run.length for run in runs if _is_marker(run))
        expanded = [run for run in runs if not _is_marker(run)]
        odd = [run for run in expanded if run.kind is not RunKind.WRAPPED]
        if odd:
            raise RecordError(
                f"'input' holds an {odd[0].kind.value} placeholder run at token {odd[0].offset}"
            )
        if expanded:
            if image_markers or len(video_markers):
                raise RecordError(
                    f"'input' mixes {counted(image_markers + len(video_markers), 'marker')} with "
                    f"{counted(len(expanded), 'expanded run')}; use one of the two"
                )
            return self._prove(record, prompt_ids, runs)
        for found, wanted, marker, key in (
            (image_markers, len(record.images), "<image>", "images"),
            (len(video_markers), len(record.videos), VIDEO_MARKER, "videos"),
        ):
            if found != wanted:
                raise RecordError(
                    f"'input' has {counted(found, f'{marker} marker')} for {wanted} of {key!r}; write one where "
                    "each stands"
                )
        return self._expand(record, prompt_ids, runs, video_markers)

    def _expand(
        self, record: Record, ids: np.ndarray, runs: PlaceholderRuns, video_markers: np.ndarray
    ) -> EncodedPrompt:
        # (first token, stop, kind) of each marker, in prompt order.
        markers: list[tuple[int, int, str]] = [(int(i), int(i) + 1, "video") for i in video_markers]
        for run in runs:
            if run.kind is RunKind.WRAPPED:
                markers.append((run.offset - 1, run.offset + 2, "image"))
            else:
                markers += [(run.offset + i, run.offset + i + 1, "image") for i in range(run.length)]
        markers.sort()
        refs = {"image": iter(record.images), "video": iter(record.videos)}
        items = [self._item(kind, next(refs[kind]), record.where) for _, _, kind in markers]
        grids = [geometry.grid for geometry in self.family.static(items)]
        pieces: list[np.ndarray] = []
        spans: list[tuple[int, int]] = []
        done = length = 0
        for (first, stop, _), item, grid in zip(markers, items, grids, strict=True):
            body = self._written(item, grid)
            length += first - done
            spans.append((length, length + len(body)))
            length += len(body)
            pieces += [ids[done:first], body]
            done = stop
        pieces.append(ids[done:])
        return EncodedPrompt(
            ids=np.concatenate(pieces).astype(np.int32),
            spans=tuple(spans),
            media=tuple(PlacedMedia(item=item, grid=grid) for item, grid in zip(items, grids, strict=True)),
        )

    def _written(self, item: MediaItem, grid: Grid) -> np.ndarray:
        """The ids that the engine writes for an item on a grid."""
        grammar = self.grammar
        context = [grammar.context_id] * self.family.run_lengths(Geometry(grid), item.kind)[0]
        run = [grammar.start_id, *context, grammar.end_id]
        if item.kind == "image":
            return np.array(run)
        texts = tubelet_texts(item.frame_indices, item.fps, self.family.frames_per_tubelet())
        labels = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return np.array([token for label in labels for token in (*label, *run)])

    def _prove(self, record: Record, ids: np.ndarray, runs: PlaceholderRuns) -> EncodedPrompt:
        if record.images and record.videos:
            raise RecordError(
                "'input' has expanded runs of images and of videos, in an unknown order; use markers"
            )
        kind, refs = ("image", record.images) if record.images else ("video", record.videos)
        items = [self._item(kind, ref, record.where) for ref in refs]
        report = align_turn(ids, items, family=self.family, row_id=record.where).report
        if report.neutral:
            raise RecordError(f"the placeholder runs in 'input' cannot be proven: {report}")
        # The item's last run, counted over all items.
        last = np.cumsum([self.family.num_tubelets(item) for item in items]) - 1
        ends = [runs[int(i)].offset + runs[int(i)].length + 1 for i in last]
        # What stands before a video names its frames, so it goes with the video.
        starts = [run.offset - 1 for run in runs] if kind == "image" else [0, *ends[:-1]]
        placed = [
            PlacedMedia(item=item, grid=media.grid)
            for item, media in zip(items, report.media, strict=True)
            if media.grid is not None  # always: the turn is not neutral
        ]
        return EncodedPrompt(ids=ids, spans=tuple(zip(starts, ends, strict=True)), media=tuple(placed))

    def _item(self, kind: str, ref: str, where: str) -> MediaItem:
        if (kind, ref) not in self._items:
            read = self._video if kind == "video" else self._image
            try:
                self._items[kind, ref] = read(ref, where)
            except MediaDecodeError as error:
                raise RecordError(str(error)) from None
        return self._items[kind, ref]

    def _image(self, ref: str, where: str) -> MediaItem:
        image = load_image(ref, self.policy, base_dir=self.base_dir, where=where)
        return MediaItem(
            size=image.size,
            source=ref,
            load=lambda: load_image(ref, self.policy, base_dir=self.base_dir).pixels[None],
        )

    def _video(self, ref: str, where: str) -> MediaItem:
        clip = load_video(
            ref,
            self.policy,
            num_frames=self.num_frames,
            temporal_patch_size=self.family.frames_per_tubelet(),
            backend=self.backend,
            base_dir=self.base_dir,
            where=where,
        )
        return MediaItem(
            kind="video",
            size=clip.size,
            source=ref,
            load=lambda indices: (
                load_video(
                    ref, self.policy, frame_indices=indices, backend=self.backend, base_dir=self.base_dir
                ).frames
            ),
            frame_indices=clip.frame_indices,
            fps=clip.fps,
            total_frames=clip.total_num_frames,
        )

    def _refuse_context(self, ids: np.ndarray, part: str) -> None:
        for run in find_runs(ids, self.grammar):
            if run.length:
                raise RecordError(
                    f"{part!r} spells {counted(run.length, 'image context token')} at token {run.offset}, which "
                    "no media of the record fill; escape the text, or name the media in 'images' or 'videos' and mark "
                    "their place in 'input'"
                )


def _is_marker(run: PlaceholderRun) -> bool:
    # `<img><image></img>` is how some templates write a marker; a real image never has a single token.
    return run.kind is RunKind.BARE or (run.kind is RunKind.WRAPPED and run.length == 1)


def row_tensors(row: Row, family: MediaFamily) -> dict[str, Tensor]:
    """The media tensors of one row that has media, proven against the row's own ids.

    Raises:
        ValueError: a file changed or broke after it was checked.
    """
    items = [placed.item for placed in row.media]
    aligned = align_turn(
        row.ids, items, family=family, captured=[placed.grid for placed in row.media], row_id=row.where
    )
    if aligned.report.neutral or aligned.tensors is None:
        raise ValueError(
            f"{row.where}: its media no longer fit the row; they changed since they were checked: "
            f"{aligned.report}"
        )
    return aligned.tensors.values
