# SPDX-License-Identifier: Apache-2.0
"""An aligner that makes NeMo-RL's tensors: its own processor where the rollout agrees with it, repairs where not."""

from __future__ import annotations

import hashlib
import io
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import ExifTags, Image

from nemo_rl_ext.align import compiled
from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
from nemo_rl_ext.align.grids import Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.media.reader import MediaFacts, MediaReader, MediaSource
from nemo_rl_ext.media.sources import read_media_bytes
from nemo_rl_ext.rollout.aligner import AlignerConfig, RolloutAligner, TurnRequest
from nemo_rl_ext.rollout.cache import RecentlyUsed, RenderCache

logger = logging.getLogger(__name__)

_REBUILT = {"pixel_values", "imgs_sizes", "num_frames"}
_PROBE_SIZES: tuple[tuple[int, int], ...] = ((320, 160), (97, 613), (1900, 41), (512, 512))
"""(width, height) of the blank images on which a processor's grids are compared with the tiler's at start-up."""

MAX_MEASURED = 16384
"""Images whose measurements an aligner remembers, a few hundred bytes each."""


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What was found out about an image that decodes.

    `plain`: NeMo-RL's own loader gives the engine's pixels, at `loaded_size`, (height, width).
    """

    facts: MediaFacts
    plain: bool
    loaded_size: Size


@dataclass(frozen=True, kw_only=True)
class NemoRLAlignerConfig(AlignerConfig):
    """What an aligner loads: the same `policy.tokenizer` block that the NemoGym actor loads its processor from."""

    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    pad_dynamic_image_shapes: bool = False


@dataclass(frozen=True, kw_only=True)
class NemoRLTurnRequest(TurnRequest):
    """A turn to align; `static_attached` says that the trainer already holds the static tensors of its images."""

    static_attached: bool = False


class NemoRLAligner(RolloutAligner):
    """Decodes, resizes and verifies for NeMo-RL; holds a processor of its own from start-up."""

    def __init__(self, config: NemoRLAlignerConfig) -> None:
        from nemo_rl_ext.integration.processor import load_processor

        self.config: NemoRLAlignerConfig = config
        self.processor = load_processor(config.tokenizer_config)
        self.family = NemotronFamily.from_processor(self.processor, layout=Layout.REMOTE, dtype=config.dtype)
        self.render = RenderCache(self.family, config.cache_bytes)
        self.reader = MediaReader(
            policy=config.media_policy,
            base_dir=config.base_dir,
            num_frames=config.num_frames,
            frames_per_tubelet=1,
            backend=config.video_backend,
        )
        self._extra_keys = self._learn_extra_keys()
        self._predictable = self._tiler_matches_processor()
        self._measured: RecentlyUsed[_Measured] = RecentlyUsed(MAX_MEASURED)
        self._in_call: dict[MediaSource, _Measured] = {}
        compiled.load()

    def encode(self, references: Sequence[str]) -> list[str]:
        """Local image files as the data URLs that NeMo-RL itself would send to the engine."""
        from nemo_rl.data.multimodal_utils import image_to_data_url, resolve_to_image

        from nemo_rl_ext.media.sources import resolve_local

        encoded = []
        for reference in references:
            if self.config.media_policy.roots:
                reference = str(resolve_local(reference, self.config.media_policy))
            encoded.append(image_to_data_url(resolve_to_image(reference)))
        return encoded

    def align(self, turns: Sequence[TurnRequest]) -> list[AlignedTurn]:
        """Align turns. A matched turn comes with the processor's own tensors unless the trainer holds them."""
        self._in_call.clear()
        return super().align(turns)

    def _align_turn(
        self, turn: TurnRequest, items: dict[MediaSource, MediaItem], shared: dict[Any, MediaTensors]
    ) -> AlignedTurn:
        started = time.perf_counter()
        media = [self._item(source, items) for source in turn.media]
        known = [self._in_call.get(source) for source in turn.media]
        # Where NeMo-RL's own loader gives other pixels than the engine's (orientation, transparency, depth), equal
        # counts prove nothing: those turns are rendered from the engine's decode.
        plain = all(measured is not None and measured.plain for measured in known)
        static_attached = getattr(turn, "static_attached", False)
        static = self._predict([measured.loaded_size for measured in known]) if plain and media else None
        processed = None
        if static is not None and static_attached and not self._predictable:
            processed = self._processed(turn, static)
            static = processed.grids if processed else None
        aligned = self._judge(turn, media, static, items)
        # A turn that matches gets the processor's own tensors, as without this package.
        if static is not None and not aligned.changed and not static_attached:
            processed = self._processed(turn, static)
            if processed is None or processed.grids != static:
                aligned = self._judge(turn, media, processed.grids if processed else None, items)
            if not aligned.changed:
                return AlignedTurn(tensors=processed, report=aligned.report, changed=False)
        return self._result(turn, aligned, started, shared)

    def _item(self, source: MediaSource, items: dict[MediaSource, MediaItem]) -> MediaItem:
        if source not in items:
            # The rollouts of a prompt group bring the same images. Only a data URL is its own content: whatever else
            # a reference names can change, and what cannot be read is never remembered.
            key = _content_key(source.ref)
            found = self._measured.get(key) if key is not None else None
            if found is None:
                found = self._measure(source)
                if key is not None and isinstance(found, _Measured):
                    self._measured.put(key, found)
            if isinstance(found, _Measured):
                self._in_call[source] = found
                found = self.reader.item(source, found.facts)
            items[source] = found
        return items[source]

    def _measure(self, source: MediaSource) -> _Measured | MediaItem:
        """The measurements of one image; an item with `error` set where it cannot be read."""
        item = self.reader.measure(source)
        if item.error:
            return item
        facts = MediaFacts(kind="image", size=item.size, content_hash=item.content_hash)
        try:
            plain, size = _plain_size(self._bytes(source))
        # Pillow's plugins raise almost anything on a damaged file; the engine's decode says whether it is one.
        except Exception:
            try:
                self.reader.decode(source)
            except (ValueError, OSError) as error:
                return MediaItem(kind="image", size=(1, 1), source=source.name, error=str(error))
            plain, size = False, item.size
        return _Measured(facts=facts, plain=plain, loaded_size=size)

    def _predict(self, sizes: Sequence[Size]) -> tuple[Grid, ...]:
        """The processor's grids for images of these (height, width), by its arithmetic alone."""
        return self.family.static_grids([MediaItem(size=size, source="") for size in sizes])

    def _processed(self, turn: TurnRequest, expected: tuple[Grid, ...]) -> MediaTensors | None:
        """The tensors that NeMo-RL makes of a turn's images without a rollout; None where it cannot."""
        pad = self.config.pad_dynamic_image_shapes or len(set(expected)) > 1
        fixed = all(_is_data_url(source.ref) for source in turn.media)
        key = (tuple(self._in_call[source].facts.content_hash for source in turn.media), pad)
        if fixed and (found := self.render.store.get(key)) is not None:
            return found
        try:
            images = [Image.open(io.BytesIO(self._bytes(source))).convert("RGB") for source in turn.media]
            tensors = self._run_processor(images, pad=pad)
            if fixed:
                self.render.store.put(key, tensors, tensors.num_bytes)
            return tensors
        except (ValueError, OSError) as error:
            logger.warning(
                "row %s, turn %s: the processor failed on its images: %s", turn.row_id, turn.turn, error
            )
            return None

    def _bytes(self, source: MediaSource) -> bytes:
        return read_media_bytes(
            source.ref, self.config.media_policy, self.config.base_dir, where=source.where
        )

    def _run_processor(self, images: list[Image.Image], *, pad: bool) -> MediaTensors:
        from nemo_rl.data.multimodal_utils import attach_image_model_inputs_to_message

        message: dict[str, Any] = {}
        attach_image_model_inputs_to_message(
            message, images=images, processor=self.processor, pad_dynamic_image_shapes=pad
        )
        values = {key: value.as_tensor() for key, value in message.items()}
        patch = self.family.tiler.patch_size
        grids = tuple(
            Grid(height // patch, width // patch) for height, width in values["imgs_sizes"].tolist()
        )
        return MediaTensors(grids=grids, values=values)

    def _learn_extra_keys(self) -> dict[str, torch.Tensor]:
        """Keys beyond those that a repair rebuilds, with their values for one image."""
        values = self._run_processor([Image.new("RGB", (64, 64))], pad=False).values
        extra = {key: value for key, value in values.items() if key not in _REBUILT}
        # One entry of 1 per image counts tiles; with dynamic resolution every image is one tile.
        unknown = [key for key, value in extra.items() if value.shape != (1,) or value.item() != 1]
        if unknown:
            raise ValueError(
                f"{type(self.processor).__name__} also returns {', '.join(unknown)}, which a repair does not know how "
                "to rebuild; switch grpo.media_alignment off for this checkpoint"
            )
        return extra

    def _completed(self, tensors: MediaTensors) -> MediaTensors:
        extra = {key: value.repeat(len(tensors.grids)) for key, value in self._extra_keys.items()}
        return MediaTensors(grids=tensors.grids, values={**tensors.values, **extra})

    def _tiler_matches_processor(self) -> bool:
        images = [Image.new("RGB", size) for size in _PROBE_SIZES]
        predicted = self._predict([(image.height, image.width) for image in images])
        found = self._run_processor(images, pad=True).grids
        if predicted != found:
            logger.warning(
                "%s gives blank images of %s the grids %s, its configuration suggests %s: static tensors are made "
                "to be compared, which takes longer",
                type(self.processor).__name__,
                list(_PROBE_SIZES),
                list(map(str, found)),
                list(map(str, predicted)),
            )
        return predicted == found


def _is_data_url(reference: str) -> bool:
    return reference[:5].lower() == "data:"


def _content_key(reference: str) -> bytes | None:
    """Identifies the content of a data URL; None for any other reference."""
    if not _is_data_url(reference):
        return None
    # Paid for every rollout: on processors with instructions for it, SHA-256 is the fastest of the strong hashes.
    return hashlib.sha256(reference.encode("utf-8", "surrogatepass")).digest()


def _plain_size(data: bytes) -> tuple[bool, Size]:
    """Whether `Image.convert("RGB")` alone gives the engine's pixels, and the (height, width) that it gives."""
    with Image.open(io.BytesIO(data)) as image:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        plain = image.mode in ("RGB", "L") and "transparency" not in image.info and orientation in (0, 1)
        return plain, (image.height, image.width)
