# SPDX-License-Identifier: Apache-2.0
"""The work of one aligner: decode media, make static tensors, and fit turns to their runs.

A plain class, so that it runs in a Ray actor (`rollout.pool`) and in a test alike. Everything it needs is loaded
once, when it starts; calls carry token ids and media references, results carry tensors in the training dtype.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.plan import EngineRequest
from nemo_rl_ext.align.turn import AlignedTurn, align_turn
from nemo_rl_ext.align.verdict import MediaKind
from nemo_rl_ext.media.images import image_size, load_image
from nemo_rl_ext.media.sources import MediaPolicy, read_media_bytes
from nemo_rl_ext.rollout.cache import RenderCache


@dataclass(frozen=True, kw_only=True)
class MediaSource:
    """Where a media item comes from; `where` names its row and manifest line in errors."""

    ref: str
    kind: MediaKind = "image"
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One turn to align: its ids [tokens], its media in prompt order, and what is known about the engine.

    `static_grids` are the grids of the static tensors that the driver holds for this turn, None where it holds
    none. A matched turn then comes back without tensors.
    """

    row_id: str
    turn: int
    token_ids: np.ndarray
    media: tuple[MediaSource, ...]
    static_grids: tuple[Grid, ...] | None = None
    captured: tuple[Grid, ...] | None = None
    max_model_len: int | None = None
    earlier_media: tuple[MediaSource, ...] = ()
    later_media: tuple[MediaSource, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StaticTurn:
    """The static tensors of one turn and the decoded images they came from, or why there are none.

    `images` are uint8 RGB [height, width, 3], for an engine that is handed pixels rather than references.
    """

    tensors: MediaTensors | None
    images: tuple[np.ndarray, ...] = ()
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
    trust_remote_code: bool = False


class RolloutAligner:
    """Decodes, resizes and verifies; holds its processor and tokenizer from start-up."""

    def __init__(self, config: AlignerConfig) -> None:
        self.config = config
        self.family = NemotronFamily.from_pretrained(config.model_dir, layout=config.layout, dtype=config.dtype)
        self.render = RenderCache(self.family, config.cache_bytes)
        self._image_processor: Any = None

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
            images = [
                load_image(source.ref, self.config.media_policy, base_dir=self.config.base_dir, where=source.where)
                for source in media
            ]
        except (ValueError, OSError) as error:
            return StaticTurn(tensors=None, error=str(error))
        processed = self._processor()(images=[image.pixels for image in images], return_tensors="pt")
        grids = tuple(Grid(*map(int, row)) for row in processed["image_grid_hw"].tolist())
        pixels = processed["pixel_values"].to(self.config.dtype)
        values = {"pixel_values": pixels, "image_grid_hw": processed["image_grid_hw"]}
        return StaticTurn(
            tensors=MediaTensors(grids=grids, values=values), images=tuple(image.pixels for image in images)
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
        media = [self._item(source, items) for source in turn.media]
        aligned = align_turn(
            turn.token_ids,
            media,
            family=self.family,
            static=None if turn.static_grids is None else MediaTensors(grids=turn.static_grids, values={}),
            captured=turn.captured,
            request=self._engine_request(turn, items),
            render=self.render,
            row_id=turn.row_id,
            turn=turn.turn,
        )
        elapsed = (time.perf_counter() - started) * 1e3 if aligned.changed else 0.0
        report = dataclasses.replace(aligned.report, repair_ms=elapsed)
        tensors = aligned.tensors if aligned.changed else None
        if tensors is not None:
            key = (tuple((source.ref, source.kind) for source in turn.media), tensors.grids, report.neutral)
            tensors = shared.setdefault(key, tensors)
        return AlignedTurn(tensors=tensors, report=report, changed=aligned.changed)

    def _engine_request(self, turn: TurnRequest, items: dict[MediaSource, MediaItem]) -> EngineRequest | None:
        if turn.max_model_len is None:
            return None
        every = [self._item(source, items) for source in (*turn.earlier_media, *turn.media, *turn.later_media)]
        if any(item.error or item.kind != "image" for item in every):
            return None
        return EngineRequest(
            max_model_len=turn.max_model_len,
            sizes=tuple(item.size for item in every),
            first=len(turn.earlier_media),
        )

    def _item(self, source: MediaSource, items: dict[MediaSource, MediaItem]) -> MediaItem:
        """Measure a media item from its header; its pixels are decoded when a repair asks for them."""
        if source not in items:
            items[source] = self._measure(source)
        return items[source]

    def _measure(self, source: MediaSource) -> MediaItem:
        policy = self.config.media_policy
        name = source.ref if len(source.ref) <= 120 else f"{source.ref[:100]}... ({len(source.ref)} characters)"
        try:
            data = read_media_bytes(source.ref, policy, self.config.base_dir, where=source.where)
            size = image_size(data, policy, where=source.where)
        except (ValueError, OSError) as error:
            return MediaItem(kind=source.kind, size=(1, 1), source=name, error=str(error))
        return MediaItem(
            kind=source.kind,
            size=size,
            source=name,
            content_hash=hashlib.blake2b(data, digest_size=16).hexdigest(),
            load=lambda: load_image(data, policy, where=f"{source.where} ({name})").pixels[None],
        )
