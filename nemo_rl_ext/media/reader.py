# SPDX-License-Identifier: Apache-2.0
"""From media references to the items that alignment works on: measured first, decoded when pixels are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nemo_rl_ext.align.grids import Size
from nemo_rl_ext.align.items import ContentChangedError, MediaItem
from nemo_rl_ext.align.verdict import MediaKind
from nemo_rl_ext.media.identity import file_digest, pixel_digest
from nemo_rl_ext.media.images import image_size, load_image
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.sources import open_local, read_media_bytes, read_opened, reference_kind
from nemo_rl_ext.media.unchanged_files import UnchangedFiles
from nemo_rl_ext.media.video import Backend, DecodedVideo, load_frame_list, load_video


@dataclass(frozen=True, kw_only=True)
class MediaSource:
    """Where a media item comes from; `where` names its row and manifest line in errors.

    A video is a file (`ref`) or a cached list of frame images (`frame_refs`, with their indices and rate where the
    manifest gives them). `num_frames` frames are sampled from a file, or as many as the run's configuration
    says. `max_num_tiles` is the row's own limit for fixed-tile families.
    """

    ref: str
    kind: MediaKind = "image"
    where: str = ""
    frame_refs: tuple[str, ...] = ()
    frame_indices: tuple[int, ...] | None = None
    fps: float | None = None
    num_frames: int | None = None
    max_num_tiles: int | None = None

    @property
    def name(self) -> str:
        """The reference, shortened where it carries the data itself."""
        return self.ref if len(self.ref) <= 120 else f"{self.ref[:100]}... ({len(self.ref)} characters)"


@dataclass(frozen=True, kw_only=True)
class MediaFacts:
    """What was measured of a media item: enough to judge its runs without touching the file again.

    `content_hash` is what equal media are shared by: SHA-256 of an image's file, or of a clip's frames as decoded.
    `pixel_digest` is the item's identity towards the engine (`media.identity`), empty unless it was asked for.
    """

    kind: MediaKind
    size: Size
    content_hash: str
    pixel_digest: str = ""
    frame_indices: tuple[int, ...] = ()
    fps: float = 0.0
    total_frames: int = 0


@dataclass(frozen=True, kw_only=True)
class MediaReader:
    """Reads media as a run is configured to."""

    policy: MediaPolicy
    base_dir: Path | None
    num_frames: int
    frames_per_tubelet: int
    backend: Backend
    _unchanged: UnchangedFiles[MediaFacts] = field(
        default_factory=UnchangedFiles, init=False, compare=False, repr=False
    )
    """Of images: the generations of a prompt bring the same files again and again."""

    def decode(self, source: MediaSource, *, identify: bool = False) -> tuple[MediaFacts, np.ndarray]:
        """Facts and pixels: uint8 RGB [height, width, 3], or [frames, height, width, 3] of a video.

        `identify` adds the digest of these pixels to the facts; an image's costs a tenth of decoding it.

        Raises:
            ValueError: for a file that cannot be used, naming it and its row.
        """
        if source.kind == "video":
            clip = self._video(source)
            facts = MediaFacts(
                kind="video",
                size=clip.size,
                content_hash=clip.content_hash,
                pixel_digest=clip.content_hash if identify else "",
                frame_indices=clip.frame_indices,
                fps=clip.fps,
                total_frames=clip.total_num_frames,
            )
            return facts, clip.frames
        data = read_media_bytes(source.ref, self.policy, self.base_dir, where=source.where)
        image = load_image(data, self.policy, where=_place(source))
        facts = MediaFacts(
            kind="image",
            size=image.size,
            content_hash=file_digest(data),
            pixel_digest=image.content_hash if identify else "",
        )
        return facts, image.pixels

    def measure(self, source: MediaSource) -> MediaItem:
        """An item from its header alone where the format allows it; one that cannot be read says so in `error`."""
        try:
            if source.kind == "video":
                facts, frames = self.decode(source)
                return self.item(source, facts, frames)
            facts = self._image_facts(source)
        except (ValueError, OSError) as error:
            return MediaItem(kind=source.kind, size=(1, 1), source=source.name, error=str(error))
        return self.item(source, facts)

    def _image_facts(self, source: MediaSource) -> MediaFacts:
        if reference_kind(source.ref, where=source.where) != "local":
            return self._facts_of(
                read_media_bytes(source.ref, self.policy, self.base_dir, where=source.where), source
            )
        with open_local(source.ref, self.policy, self.base_dir, where=source.where) as handle:
            state = self._unchanged.state(handle)
            facts = self._unchanged.get(state)
            if facts is None:
                facts = self._facts_of(
                    read_opened(handle, source.ref, self.policy, where=source.where), source
                )
                self._unchanged.keep(state, facts)
            return facts

    def _facts_of(self, data: bytes, source: MediaSource) -> MediaFacts:
        size = image_size(data, self.policy, where=_place(source))
        return MediaFacts(kind="image", size=size, content_hash=file_digest(data))

    def item(self, source: MediaSource, facts: MediaFacts, pixels: np.ndarray | None = None) -> MediaItem:
        """An item that decodes on demand, or serves `pixels` that were decoded already."""

        def unchanged(content_hash: str) -> None:
            if facts.content_hash and content_hash != facts.content_hash:
                raise ContentChangedError(
                    f"{_place(source)}: the content is another than when the prompt was made; keep media as they are "
                    "while a run reads them"
                )

        def load_one() -> np.ndarray:
            if pixels is not None:
                return pixels[None]
            found, image = self.decode(source)
            unchanged(found.content_hash)
            return image[None]

        def load_frames(indices: Sequence[int]) -> np.ndarray:
            same = tuple(indices) == facts.frame_indices
            if pixels is not None and same:
                return pixels
            clip = self._video(source, indices)
            if same:
                unchanged(clip.content_hash)
            return clip.frames

        return MediaItem(
            kind=facts.kind,
            size=facts.size,
            source=source.name,
            content_hash=facts.content_hash,
            load=load_frames if facts.kind == "video" else load_one,
            frame_indices=facts.frame_indices,
            fps=facts.fps,
            total_frames=facts.total_frames,
            max_num_tiles=source.max_num_tiles,
            digest=facts.pixel_digest,
            identify=pixel_digest,
        )

    def _video(self, source: MediaSource, indices: Sequence[int] | None = None) -> DecodedVideo:
        if source.frame_refs:
            return self._frame_list(source, indices)
        return load_video(
            source.ref,
            self.policy,
            num_frames=source.num_frames or self.num_frames,
            temporal_patch_size=self.frames_per_tubelet,
            frame_indices=indices,
            backend=self.backend,
            base_dir=self.base_dir,
            where=source.where,
        )

    def _frame_list(self, source: MediaSource, indices: Sequence[int] | None) -> DecodedVideo:
        refs, listed = source.frame_refs, source.frame_indices or tuple(range(len(source.frame_refs)))
        fps = source.fps or 1.0
        if indices is not None:
            missing = sorted(set(indices) - set(listed))
            if missing:
                raise ValueError(
                    f"{_place(source)}: the engine used frames {missing[:4]}, which the cached list does not hold "
                    f"(it holds {len(refs)} frames, {listed[0]} to {listed[-1]})"
                )
            refs = tuple(refs[listed.index(index)] for index in indices)
            listed = tuple(indices)
        return load_frame_list(
            refs,
            self.policy,
            frame_indices=listed,
            fps=fps,
            source=source.name,
            base_dir=self.base_dir,
            where=source.where,
        )


def _place(source: MediaSource) -> str:
    return f"{source.where} ({source.name})" if source.where else source.name
