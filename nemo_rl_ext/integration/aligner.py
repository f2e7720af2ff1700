# SPDX-License-Identifier: Apache-2.0
"""An aligner that makes NeMo-RL's tensors: its own processor where the rollout agrees with it, repairs where not."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from nemo_rl_ext.align import compiled
from nemo_rl_ext.align.families.family import Layout, MediaTensors
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.integration.clips import ClipReader, ClipSettings, with_video
from nemo_rl_ext.integration.measured_images import MeasuredImage, MeasuredImages, is_data_url
from nemo_rl_ext.integration.neutral import NeutralMedia
from nemo_rl_ext.integration.processor import load_processor
from nemo_rl_ext.integration.static_processor import StaticProcessor
from nemo_rl_ext.media.reader import MediaReader, MediaSource
from nemo_rl_ext.media.sources import open_local, read_media_bytes
from nemo_rl_ext.rollout.aligner import AlignerConfig
from nemo_rl_ext.rollout.cache import RenderCache
from nemo_rl_ext.rollout.fitting import TurnFitting, TurnRequest
from nemo_rl_ext.rollout.sharing import SharedRender

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NemoRLAlignerConfig(AlignerConfig):
    """What an aligner loads: the same `policy.tokenizer` block that the NemoGym actor loads its processor from."""

    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    pad_dynamic_image_shapes: bool = False
    clips: ClipSettings | None = None


@dataclass(frozen=True, kw_only=True)
class NemoRLTurnRequest(TurnRequest):
    """A turn to align; `static_attached` says that the trainer already holds the static tensors of its images."""

    static_attached: bool = False


class NemoRLAligner:
    """Decodes, resizes and verifies for NeMo-RL; holds a processor of its own from start-up.

    What `rollout.pool.AlignerPool` runs in its actors, in place of the embedded run's aligner.
    """

    def __init__(self, config: NemoRLAlignerConfig) -> None:
        self.config = config
        processor = load_processor(config.tokenizer_config)
        self.family = family_of(processor, layout=Layout.REMOTE, dtype=config.dtype)
        self.clips: ClipReader | None = None
        if config.clips is not None:
            tiler = config.clips.tiler_of(self.family)
            self.family = with_video(self.family, tiler)
            self.clips = ClipReader(config.clips, tiler.patch_size)
        self.static = StaticProcessor(processor, self.family)
        self.neutral = NeutralMedia(family=self.family, counters=self.static.counters)
        self.cache = RenderCache(self.family, config.cache_bytes)
        self.render = SharedRender(self.family, self.cache, type(self), config)
        self.reader = MediaReader(
            policy=config.media_policy,
            base_dir=config.base_dir,
            num_frames=config.num_frames,
            frames_per_tubelet=1,
            backend=config.video_backend,
        )
        self.images = MeasuredImages(self.reader, self._bytes)
        compiled.load()

    def encode(self, references: Sequence[str]) -> list[str]:
        """Local image files as the data URLs that NeMo-RL itself would send to the engine."""
        from nemo_rl.data.multimodal_utils import image_to_data_url, resolve_to_image

        encoded = []
        for reference in references:
            if not self.config.media_policy.roots:
                encoded.append(image_to_data_url(resolve_to_image(reference)))
                continue
            # The very file that was checked: its name may lead elsewhere a moment later.
            with open_local(reference, self.config.media_policy) as file, Image.open(file) as image:
                encoded.append(image_to_data_url(image.convert("RGB")))
        return encoded

    def align(self, turns: Sequence[NemoRLTurnRequest]) -> list[AlignedTurn]:
        """Align turns. A matched turn comes with the processor's own tensors unless the trainer holds them."""
        measured: dict[MediaSource, MeasuredImage] = {}

        def measure(source: MediaSource) -> MediaItem:
            item, found = self._measured(source)
            if found is not None:
                measured[source] = found
            return self.render.remember(item, source)

        shared: dict[str, Any] = dict(
            family=self.family, identify=self.render.identify, pack=self.render.pack
        )
        fitting = TurnFitting(render=self.render, measure=measure, complete=self.neutral.completed, **shared)
        # NeMo-RL's own tensors of a clip have no counters.
        clips = TurnFitting(render=self._render_clip, measure=fitting.item, **shared)
        try:
            return [
                self._align_clip(turn, clips)
                if any(source.kind == "video" for source in turn.media)
                else self._align_turn(turn, fitting, measured)
                for turn in turns
            ]
        finally:
            self.render.forget_sources()

    def item_of(self, source: MediaSource) -> MediaItem:
        """A medium as this aligner reads it."""
        return self._measured(source)[0]

    def _measured(self, source: MediaSource) -> tuple[MediaItem, MeasuredImage | None]:
        if source.kind == "video" and self.clips is not None:
            return self.clips.measure(source), None
        found = self.images.measure(source)
        return (
            (found, None) if isinstance(found, MediaItem) else (self.reader.item(source, found.facts), found)
        )

    def _render_clip(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        if self.clips is not None:
            self.clips.require_size(item, grid)
        rendered: torch.Tensor = self.render(item, grid)
        return rendered

    def _align_clip(self, turn: NemoRLTurnRequest, fitting: TurnFitting) -> AlignedTurn:
        """Align a turn with a clip. The trainer holds its static tensors: where they match, none come back."""
        started = time.perf_counter()
        media = tuple(fitting.item(source) for source in turn.media)
        static = () if any(item.error for item in media) else self.family.static(media)
        grids = tuple(geometry.grid for geometry in static for _ in range(geometry.tubelets))
        aligned = fitting.judge(turn, media, grids or None)
        return fitting.result(turn, media, aligned, (time.perf_counter() - started) * 1e3)

    def _align_turn(
        self, turn: NemoRLTurnRequest, fitting: TurnFitting, measured: Mapping[MediaSource, MeasuredImage]
    ) -> AlignedTurn:
        started = time.perf_counter()
        media = tuple(fitting.item(source) for source in turn.media)
        images = [measured[source] for source in turn.media if source in measured]
        # Where NeMo-RL's own loader gives other pixels than the engine's (orientation, transparency, depth), equal
        # counts prove nothing: those turns are rendered from the engine's decode.
        plain = len(images) == len(media) and all(image.plain for image in images)
        static = self.static.predict([image.loaded_size for image in images]) if plain and media else None
        processed = None
        if static is not None and turn.static_attached and not self.static.predictable:
            processed = self._processed(turn, static, images)
            static = processed.grids if processed else None
        aligned = fitting.judge(turn, media, static)
        # A turn that matches gets the processor's own tensors, as without this package.
        if static is not None and not aligned.changed and not turn.static_attached:
            processed = self._processed(turn, static, images)
            if processed is None or processed.grids != static:
                aligned = fitting.judge(turn, media, processed.grids if processed else None)
            if not aligned.changed:
                return AlignedTurn(tensors=processed, report=aligned.report, changed=False)
        return fitting.result(turn, media, aligned, (time.perf_counter() - started) * 1e3)

    def _processed(
        self, turn: NemoRLTurnRequest, expected: tuple[Grid, ...], images: Sequence[MeasuredImage]
    ) -> MediaTensors | None:
        """The tensors that NeMo-RL makes of a turn's images without a rollout; None where it cannot."""
        pad = self.config.pad_dynamic_image_shapes or len(set(expected)) > 1
        unchanging = all(is_data_url(source.ref) for source in turn.media)
        key = (tuple(image.facts.content_hash for image in images), pad)
        if unchanging and isinstance(found := self.cache.kept(key), MediaTensors):
            return found
        try:
            opened = [Image.open(io.BytesIO(self._bytes(source))).convert("RGB") for source in turn.media]
            tensors = self.static.process(opened, pad=pad)
        except (ValueError, OSError) as error:
            logger.warning(
                "row %s, turn %s: the processor failed on its images: %s", turn.row_id, turn.turn, error
            )
            return None
        if unchanging:
            self.cache.keep(key, tensors)
        return tensors

    def _bytes(self, source: MediaSource) -> bytes:
        return read_media_bytes(
            source.ref, self.config.media_policy, self.config.base_dir, where=source.where
        )
