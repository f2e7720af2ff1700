# SPDX-License-Identifier: Apache-2.0
"""What an aligner knows about images: their size as the engine and as NeMo-RL see it, found out once per content."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass

from cachetools import LRUCache
from PIL import ExifTags, Image

from nemo_rl_ext.align.grids import Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.media.reader import MediaFacts, MediaReader, MediaSource

MAX_MEASURED = 16384
"""Images whose measurements an aligner remembers, a few hundred bytes each."""


@dataclass(frozen=True, kw_only=True)
class MeasuredImage:
    """What was found out about an image that decodes.

    `plain`: NeMo-RL's own loader gives the engine's pixels, at `loaded_size`, (height, width).
    """

    facts: MediaFacts
    plain: bool
    loaded_size: Size


class MeasuredImages:
    """Measures images through `reader`; `read` returns the bytes behind a reference."""

    def __init__(self, reader: MediaReader, read: Callable[[MediaSource], bytes]) -> None:
        self.reader, self.read = reader, read
        self._remembered: LRUCache[bytes, MeasuredImage] = LRUCache(MAX_MEASURED)

    def measure(self, source: MediaSource) -> MeasuredImage | MediaItem:
        """The measurements of one image; an item with `error` set where it cannot be read.

        The rollouts of a prompt group bring the same images. Only a data URL is its own content: whatever else a
        reference names can change, and what cannot be read is never remembered.
        """
        key = _content_key(source.ref)
        found = self._remembered.get(key) if key is not None else None
        if found is not None:
            return found
        fresh = self._open(source)
        if key is not None and isinstance(fresh, MeasuredImage):
            self._remembered[key] = fresh
        return fresh

    def _open(self, source: MediaSource) -> MeasuredImage | MediaItem:
        item = self.reader.measure(source)
        if item.error:
            return item
        facts = MediaFacts(kind="image", size=item.size, content_hash=item.content_hash)
        try:
            plain, size = _plain_size(self.read(source))
        # Pillow's plugins raise almost anything on a damaged file; the engine's decode says whether it is one.
        except Exception:
            try:
                self.reader.decode(source)
            except (ValueError, OSError) as error:
                return MediaItem(kind="image", size=(1, 1), source=source.name, error=str(error))
            plain, size = False, item.size
        return MeasuredImage(facts=facts, plain=plain, loaded_size=size)


def is_data_url(reference: str) -> bool:
    """Whether a reference holds its content itself."""
    return reference[:5].lower() == "data:"


def _content_key(reference: str) -> bytes | None:
    """Identifies the content of a data URL; None for any other reference."""
    if not is_data_url(reference):
        return None
    # Paid for every rollout: on processors with instructions for it, SHA-256 is the fastest of the strong hashes.
    return hashlib.sha256(reference.encode("utf-8", "surrogatepass")).digest()


def _plain_size(data: bytes) -> tuple[bool, Size]:
    """Whether `Image.convert("RGB")` alone gives the engine's pixels, and the (height, width) that it gives."""
    with Image.open(io.BytesIO(data)) as image:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        plain = image.mode in ("RGB", "L") and "transparency" not in image.info and orientation in (0, 1)
        return plain, (image.height, image.width)
