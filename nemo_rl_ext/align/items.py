# SPDX-License-Identifier: Apache-2.0
"""The media of a turn, as alignment sees them: sizes first, pixels only when a repair needs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nemo_rl_ext.align.grids import Array, Size
from nemo_rl_ext.align.verdict import MediaKind


class ContentChangedError(ValueError):
    """A medium is no longer what it was when it was measured; one string that names it."""


@dataclass(frozen=True, kw_only=True)
class MediaItem:
    """One image or video of a turn, in prompt order.

    `size` is (height, width) in pixels after decoding. `load` returns uint8 RGB [frames, height, width, 3] and is
    called only when pixels are needed: without arguments for an image, with the frame indices for a video. It
    raises `ValueError` or `OSError` when the file is broken. `content_hash` identifies the content, so that equal
    repairs are made once. `error` is set instead when the item could not even be measured.

    For a video `frame_indices` are the frames that the training side sampled, counted in the clip's own frames,
    of which there are `total_frames` at `fps` per second. `max_num_tiles` is a row's own limit for families with
    fixed tiles. `digest` is that of the decoded pixels (of these frames), where it was taken: the item's identity,
    which no name and no hash of a file is. `identify` takes it, of uint8 RGB [height, width, 3] of an image or
    [frames, height, width, 3] of a video.
    """

    kind: MediaKind = "image"
    size: Size
    source: str
    content_hash: str = ""
    load: Callable[..., Array] | None = field(default=None, compare=False, repr=False)
    frame_indices: tuple[int, ...] = ()
    fps: float = 0.0
    total_frames: int = 0
    max_num_tiles: int | None = None
    error: str = ""
    digest: str = ""
    identify: Callable[[Array], str] | None = field(default=None, compare=False, repr=False)

    @property
    def num_frames(self) -> int:
        return len(self.frame_indices) if self.kind == "video" else 1

    def pixels(self) -> Array:
        """Decode the item: uint8 RGB [frames, height, width, 3]."""
        if self.load is None:
            raise ValueError(
                f"{self.kind} {self.source} was described by its size alone and has no pixels to load"
            )
        frames = self.load(self.frame_indices) if self.kind == "video" else self.load()
        if frames.ndim != 4 or frames.shape[1:] != (*self.size, 3) or frames.dtype != np.uint8:
            raise ValueError(
                f"{self.kind} {self.source}: expected uint8 pixels [frames, {self.size[0]}, {self.size[1]}, 3], "
                f"got {frames.dtype} {list(frames.shape)}; the file changed after it was measured"
            )
        return frames

    def identified(self) -> MediaItem:
        """The item with its digest, decoded once for it and for what follows; itself where it cannot be identified."""
        if self.digest or self.identify is None:
            return self
        pixels = self.pixels()
        digest = self.identify(pixels if self.kind == "video" else pixels[0])
        return dataclasses.replace(self, digest=digest, load=lambda *_: pixels)

    def identified_if_readable(self, identify: Callable[[MediaItem], MediaItem] | None = None) -> MediaItem:
        """The item with its digest; one that can no longer be read says so in `error`."""
        try:
            return identify(self) if identify is not None else self.identified()
        except (ValueError, OSError) as error:
            return dataclasses.replace(self, error=str(error))
