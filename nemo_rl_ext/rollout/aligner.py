# SPDX-License-Identifier: Apache-2.0
"""The work of one aligner: decode media, make static tensors, and fit turns to their runs.

A plain class, so that it runs in a Ray actor (`rollout.pool`) and in a test alike. Everything it needs is loaded
once, when it starts; calls carry token ids and media references, results carry tensors in the training dtype.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_ext.align import compiled
from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.plan import EngineRequest
from nemo_rl_ext.align.turn import AlignedTurn, align_turn
from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaFacts, MediaReader, MediaSource
from nemo_rl_ext.media.video import Backend
from nemo_rl_ext.rollout.cache import RenderCache


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One turn to align: its ids [tokens], its media in prompt order, and what is known about the engine.

    `facts` are what was measured of the media before (one per item), so that a turn with nothing to repair touches
    no file; without them each item is measured again. `static_grids` are the grids of the static tensors that the
    driver holds for this turn, one per run, None where it holds none. A matched turn then comes back without
    tensors. `earlier_media` and `later_media` are those of the same engine request before and after this turn's.
    """

    row_id: str
    turn: int
    token_ids: np.ndarray
    media: tuple[MediaSource, ...]
    facts: tuple[MediaFacts, ...] | None = None
    static_grids: tuple[Grid, ...] | None = None
    captured: tuple[Grid, ...] | None = None
    max_model_len: int | None = None
    earlier_media: tuple[MediaSource, ...] = ()
    later_media: tuple[MediaSource, ...] = ()

    def identity(self) -> Hashable:
        """Equal for two turns of one row that must come out equal."""
        media = (self.earlier_media, self.media, self.later_media)
        return self.turn, self.token_ids.tobytes(), media, self.static_grids, self.captured


@dataclass(frozen=True, kw_only=True)
class StaticTurn:
    """The static tensors of one turn and the media they came from, or why there are none.

    `pixels` are uint8 RGB [height, width, 3] of images and [frames, height, width, 3] of videos, for an engine that
    is handed pixels rather than references; `facts` describe them.
    """

    tensors: MediaTensors | None
    facts: tuple[MediaFacts, ...] = ()
    pixels: tuple[np.ndarray, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class AlignerConfig:
    """What an aligner loads when it starts."""

    model_dir: Path
    media_policy: MediaPolicy
    base_dir: Path | None = None
    layout: Layout = Layout.NATIVE
    dtype: torch.dtype = torch.float32
    cache_bytes: int = 256 << 20
    num_frames: int = 8
    video_backend: Backend = "decord"
    trust_remote_code: bool = False


class RolloutAligner:
    """Decodes, resizes and verifies; holds its processor and tokenizer from start-up."""

    def __init__(self, config: AlignerConfig) -> None:
        self.config = config
        self.family = NemotronFamily.from_pretrained(
            config.model_dir, layout=config.layout, dtype=config.dtype
        )
        self.render = RenderCache(self.family, config.cache_bytes)
        self.reader = MediaReader(
            policy=config.media_policy,
            base_dir=config.base_dir,
            num_frames=config.num_frames,
            frames_per_tubelet=self.family.video.temporal_patch_size if self.family.video is not None else 1,
            backend=config.video_backend,
        )
        self._image_processor: Any = None
        compiled.load()

    def pid(self) -> int:
        """The process that this aligner runs in."""
        return os.getpid()

    def static(self, turns: Sequence[tuple[MediaSource, ...]]) -> list[StaticTurn]:
        """Process media the way the training side does on its own: the checkpoint's processor, no rollout known."""
        return [self._static_turn(media) for media in turns]

    def _static_turn(self, media: tuple[MediaSource, ...]) -> StaticTurn:
        if not media:
            return StaticTurn(tensors=None)
        try:
            decoded = [self.reader.decode(source) for source in media]
        except (ValueError, OSError) as error:
            return StaticTurn(tensors=None, error=str(error))
        facts = tuple(fact for fact, _ in decoded)
        pixels = tuple(array for _, array in decoded)
        items = [
            self.reader.item(source, fact, array)
            for source, (fact, array) in zip(media, decoded, strict=True)
        ]
        if self.config.layout is Layout.NATIVE and all(fact.kind == "image" for fact in facts):
            tensors = self._processed(pixels)
        else:
            grids = self.family.static_grids(items)
            rendered = [self.family.render(item, grid) for item, grid in zip(items, grids, strict=True)]
            tensors = self.family.pack(items, grids, rendered)
        return StaticTurn(tensors=tensors, facts=facts, pixels=pixels)

    def _processed(self, images: tuple[np.ndarray, ...]) -> MediaTensors:
        """Images through the checkpoint's own processor, which knows nothing of any rollout."""
        processed = self._processor()(images=list(images), return_tensors="pt")
        grids = tuple(Grid(*map(int, row)) for row in processed["image_grid_hw"].tolist())
        pixels = processed["pixel_values"].to(self.config.dtype)
        return MediaTensors(
            grids=grids, values={"pixel_values": pixels, "image_grid_hw": processed["image_grid_hw"]}
        )

    def _processor(self) -> Any:
        if self._image_processor is None:
            from transformers import AutoImageProcessor

            self._image_processor = AutoImageProcessor.from_pretrained(
                str(self.config.model_dir),
                local_files_only=True,
                trust_remote_code=self.config.trust_remote_code,
            )
        return self._image_processor

    def align(self, turns: Sequence[TurnRequest]) -> list[AlignedTurn]:
        """Align turns. Equal repairs within one call share their tensors, also in the caller's process."""
        items: dict[MediaSource, MediaItem] = {}
        shared: dict[Any, MediaTensors] = {}
        return [self._align_turn(turn, items, shared) for turn in turns]

    def _align_turn(
        self, turn: TurnRequest, items: dict[MediaSource, MediaItem], shared: dict[Any, MediaTensors]
    ) -> AlignedTurn:
        started = time.perf_counter()
        if turn.facts is None:
            media = [self._item(source, items) for source in turn.media]
        else:
            media = [
                self.reader.item(source, fact) for source, fact in zip(turn.media, turn.facts, strict=True)
            ]

        aligned = self._judge(turn, media, turn.static_grids, items)
        return self._result(turn, aligned, started, shared)

    def _judge(
        self,
        turn: TurnRequest,
        media: Sequence[MediaItem],
        static_grids: tuple[Grid, ...] | None,
        items: dict[MediaSource, MediaItem],
    ) -> AlignedTurn:
        """Align a turn against static grids; a tie is judged once more with the whole engine request."""

        def align(request: EngineRequest | None = None) -> AlignedTurn:
            return align_turn(
                turn.token_ids,
                media,
                family=self.family,
                static=None if static_grids is None else MediaTensors(grids=static_grids, values={}),
                captured=turn.captured,
                request=request,
                render=self.render,
                row_id=turn.row_id,
                turn=turn.turn,
            )

        aligned = align()
        # Only a tie needs the request's other media, whose files have to be opened.
        if Reason.AMBIGUOUS_GRID in aligned.report.reasons() and (
            request := self._engine_request(turn, items)
        ):
            aligned = align(request)
        return aligned

    def _result(
        self, turn: TurnRequest, aligned: AlignedTurn, started: float, shared: dict[Any, MediaTensors]
    ) -> AlignedTurn:
        """What is sent back: tensors only where they are not the static ones, and once for equal repairs."""
        if not aligned.changed:
            return AlignedTurn(tensors=None, report=aligned.report, changed=False)
        tensors = aligned.tensors
        if tensors is not None:
            key = (
                tuple((source.ref, source.kind) for source in turn.media),
                tensors.grids,
                aligned.report.neutral,
            )
            tensors = shared.setdefault(key, self._completed(tensors))
        report = dataclasses.replace(aligned.report, repair_ms=(time.perf_counter() - started) * 1e3)
        return AlignedTurn(tensors=tensors, report=report, changed=True)

    def _completed(self, tensors: MediaTensors) -> MediaTensors:
        """Tensors of a repair as the training side wants them."""
        return tensors

    def _engine_request(self, turn: TurnRequest, items: dict[MediaSource, MediaItem]) -> EngineRequest | None:
        if turn.max_model_len is None:
            return None
        every = [
            self._item(source, items) for source in (*turn.earlier_media, *turn.media, *turn.later_media)
        ]
        if any(item.error or item.kind != "image" for item in every):
            return None
        return EngineRequest(
            max_model_len=turn.max_model_len,
            sizes=tuple(item.size for item in every),
            first=len(turn.earlier_media),
        )

    def _item(self, source: MediaSource, items: dict[MediaSource, MediaItem]) -> MediaItem:
        if source not in items:
            items[source] = self.reader.measure(source)
        return items[source]
