# SPDX-License-Identifier: Apache-2.0
"""The work of one aligner: decode media, make static tensors, and fit turns to their runs.

A plain class, so that it runs in a Ray actor (`rollout.pool`) and in a test alike. Everything it needs is loaded
once, when it starts; calls carry token ids and media references, results carry tensors in the training dtype.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_ext import cpu_wheels
from nemo_rl_ext.align import compiled
from nemo_rl_ext.align.families.family import Layout, MediaTensors
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaFacts, MediaReader, MediaSource
from nemo_rl_ext.media.video import Backend
from nemo_rl_ext.rollout.cache import RenderCache
from nemo_rl_ext.rollout.fitting import TurnFitting, TurnRequest
from nemo_rl_ext.rollout.sharing import SharedRender

logger = logging.getLogger(__name__)


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
    video_backend: Backend = "opencv"
    trust_remote_code: bool = False
    identify: bool = False
    """Take the digest of what is decoded, for comparison with an engine's receipts."""
    share: bool = False
    """Put rendered media into Ray's object store and render none that the job's broker has (`rollout.broker`)."""
    render_static: bool = False
    """Make the static tensors of images as the engine makes them, bit for bit. Otherwise they are those of the
    checkpoint's own processor, which a trainer without alignment has: they may differ in their last bits."""


class RolloutAligner:
    """Decodes, resizes and verifies; holds its processor and tokenizer from start-up."""

    def __init__(self, config: AlignerConfig) -> None:
        cpu_wheels.activate()
        self.config = config
        self.family = family_of(config.model_dir, layout=config.layout, dtype=config.dtype)
        cache = RenderCache(self.family, config.cache_bytes)
        self.render = SharedRender(self.family, cache, type(self), config)
        self.reader = MediaReader(
            policy=config.media_policy,
            base_dir=config.base_dir,
            num_frames=config.num_frames,
            frames_per_tubelet=self.family.frames_per_tubelet(),
            backend=config.video_backend,
        )
        self._image_processor: Any = None
        compiled.load()

    def static(self, turns: Sequence[tuple[MediaSource, ...]]) -> list[StaticTurn]:
        """Process media on the training side's static grids, no rollout known."""
        return [self._static_turn(media) for media in turns]

    def _static_turn(self, media: tuple[MediaSource, ...]) -> StaticTurn:
        if not media:
            return StaticTurn(tensors=None)
        try:
            decoded = [self.reader.decode(source, identify=self.config.identify) for source in media]
        except (ValueError, OSError) as error:
            return StaticTurn(tensors=None, error=str(error))
        facts = tuple(fact for fact, _ in decoded)
        pixels = tuple(array for _, array in decoded)
        items = [
            self.reader.item(source, fact, array)
            for source, (fact, array) in zip(media, decoded, strict=True)
        ]
        tensors = None
        own = self.config.layout is Layout.NATIVE and not self.config.render_static
        if own and all(fact.kind == "image" for fact in facts):
            try:
                tensors = self._processed(pixels)
            # A processor may raise anything on a size that it cannot have; the engine may well take it.
            except Exception as error:
                names = ", ".join(source.name for source in media)
                logger.warning("no static tensors for %s: %s: %s", names, type(error).__name__, error)
                return StaticTurn(tensors=None, facts=facts, pixels=pixels)
        if tensors is None:
            grids = [geometry.grid for geometry in self.family.static(items)]
            known = [self.render.remember(item, source) for item, source in zip(items, media, strict=True)]
            rendered = [self.render(item, grid) for item, grid in zip(known, grids, strict=True)]
            tensors = self.render.pack(items, grids, rendered)
        return StaticTurn(tensors=tensors, facts=facts, pixels=pixels)

    def _processed(self, images: tuple[np.ndarray, ...]) -> MediaTensors | None:
        """Images through the checkpoint's own processor, which knows nothing of any rollout.

        None where its tensors do not say what grids they have.
        """
        # The layout is said: a picture one or three pixels high looks like planes, too.
        processed = self._processor()(
            images=list(images), return_tensors="pt", input_data_format="channels_last"
        )
        values = {key: processed[key] for key in self.family.keys() if key in processed}
        values = {
            key: value.to(self.config.dtype) if value.is_floating_point() else value
            for key, value in values.items()
        }
        items = self.family.items_in(values)
        if len(items) != len(images):
            return None
        return MediaTensors(grids=tuple(item.grid for item in items), values=values)

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
        fitting = TurnFitting(
            family=self.family,
            render=self.render,
            identify=self.render.identify,
            pack=self.render.pack,
            measure=self._measure,
        )
        try:
            return [self._align_turn(turn, fitting) for turn in turns]
        finally:
            self.render.forget_sources()

    def item_of(self, source: MediaSource) -> MediaItem:
        """A medium as this aligner reads it."""
        return self.reader.measure(source)

    def _measure(self, source: MediaSource) -> MediaItem:
        return self.render.remember(self.item_of(source), source)

    def _align_turn(self, turn: TurnRequest, fitting: TurnFitting) -> AlignedTurn:
        started = time.perf_counter()
        if turn.facts is None:
            media = tuple(fitting.item(source) for source in turn.media)
        else:
            media = tuple(
                self.render.remember(self.reader.item(source, fact), source)
                for source, fact in zip(turn.media, turn.facts, strict=True)
            )
        aligned = fitting.judge(turn, media, turn.static_grids)
        return fitting.result(turn, media, aligned, (time.perf_counter() - started) * 1e3)
