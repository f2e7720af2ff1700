# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own processor: the tensors and patch grids that it gives images without knowing any rollout."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from PIL import Image

from nemo_rl_ext.align.families.family import MediaFamily, MediaTensors
from nemo_rl_ext.align.grids import Grid, Size
from nemo_rl_ext.align.items import MediaItem

logger = logging.getLogger(__name__)

_PROBE_SIZES: tuple[tuple[int, int], ...] = ((320, 160), (97, 613), (1900, 41), (512, 512))
"""(width, height) of the blank images on which a processor's grids are compared with the tiler's at start-up."""


class StaticProcessor:
    """A live processor of a NeMo-RL recipe and what was learnt about it at start-up.

    `counters`: keys beyond those that a repair rebuilds, which hold a 1 for every image. `predictable`: the family's
    arithmetic gives the processor's grids, so that they are known without running it.

    Raises:
        ValueError: when the processor returns tensors that a repair could not rebuild.
    """

    def __init__(self, processor: Any, family: MediaFamily) -> None:
        self.processor, self.family = processor, family
        self.counters = self._learn_counters()
        self.predictable = self._arithmetic_gives_its_grids()

    def predict(self, sizes: Sequence[Size]) -> tuple[Grid, ...]:
        """The grids of one message's images of these (height, width), by arithmetic alone."""
        items = [MediaItem(size=size, source="") for size in sizes]
        return tuple(geometry.grid for geometry in self.family.static(items))

    def process(self, images: Sequence[Image.Image], *, pad: bool) -> MediaTensors:
        """One message's images as NeMo-RL attaches them; `pad` where they may differ in size."""
        from nemo_rl.data.multimodal_utils import attach_image_model_inputs_to_message

        message: dict[str, Any] = {}
        attach_image_model_inputs_to_message(
            message, images=list(images), processor=self.processor, pad_dynamic_image_shapes=pad
        )
        values = {key: value.as_tensor() for key, value in message.items()}
        # Images alone: a count of frames that a processor adds is another thing here.
        sizes = {key: value for key, value in values.items() if key != "num_frames"}
        return MediaTensors(grids=tuple(item.grid for item in self.family.items_in(sizes)), values=values)

    def _learn_counters(self) -> tuple[str, ...]:
        values = self.process([Image.new("RGB", (64, 64))], pad=False).values
        extra = {key: value for key, value in values.items() if key not in self.family.keys()}
        # With dynamic resolution every image is one tile.
        unknown = [key for key, value in extra.items() if value.shape != (1,) or value.item() != 1]
        if unknown:
            raise ValueError(
                f"{type(self.processor).__name__} also returns {', '.join(unknown)}, which a repair does not know how "
                "to rebuild; switch grpo.media_alignment off for this checkpoint"
            )
        return tuple(extra)

    def _arithmetic_gives_its_grids(self) -> bool:
        images = [Image.new("RGB", size) for size in _PROBE_SIZES]
        predicted = self.predict([(image.height, image.width) for image in images])
        found = self.process(images, pad=True).grids
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
