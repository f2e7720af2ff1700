# SPDX-License-Identifier: Apache-2.0
"""Rendered media of one aligner: looked up before anything is rendered, and put where everybody may read them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
import torch
from cachetools import LRUCache, TTLCache
from torch.overrides import TorchFunctionMode

from nemo_rl_ext.align.families.family import MediaFamily, MediaTensors
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import ContentChangedError, MediaItem
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.broker import BROKER, SPARE, made_once, owned
from nemo_rl_ext.rollout.cache import RenderCache
from nemo_rl_ext.rollout.stored import Blob, StoredTensor, as_array

NUM_DIGESTS = 65536

KEPT_S = 60.0
"""How long an aligner takes what the broker said of an item as still so: what was lost since then is made anew."""


class Renders(Protocol):
    """What an aligner class offers for a medium that has to be rendered again."""

    family: MediaFamily

    def item_of(self, source: MediaSource) -> MediaItem:
        """A medium as this aligner reads it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to render an item again in any process: what to read, and what it has to be.

    `encoded` is the reference itself in the object store, where it carries its own data.
    """

    aligner_class: type
    config: Any
    source: MediaSource
    encoded: Any
    content_hash: str
    frame_indices: tuple[int, ...]
    grid: Grid

    def __call__(self) -> torch.Tensor:
        """The item, rendered here.

        Raises:
            ContentChangedError: when the medium is another by now.
        """
        aligner: Renders = _aligner(self.aligner_class, _Config(self.config))
        source = self.source
        if self.encoded is not None:
            source = dataclasses.replace(source, ref=ray.get(self.encoded))
        item = aligner.item_of(source)
        if item.error:
            raise ValueError(item.error)
        if item.content_hash != self.content_hash and item.frame_indices == self.frame_indices:
            raise ContentChangedError(
                f"{item.source}: the content is another than when it was first rendered"
            )
        return aligner.family.render(dataclasses.replace(item, frame_indices=self.frame_indices), self.grid)


@dataclass(frozen=True)
class _Config:
    """A configuration as a key: equal when it is the same in writing."""

    value: Any

    def __hash__(self) -> int:
        return hash(repr(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and repr(self.value) == repr(other.value)


@functools.lru_cache(maxsize=1)
def _aligner(aligner_class: type, config: _Config) -> Any:
    return aligner_class(config.value)


class SharedRender:
    """Used as `align_turn`'s `render`, `identify` and `pack`; what it gives are `StoredTensor`s once there is a broker.

    Without one, as in tests and in the processes of a library's user, it is the cache that it stands on.
    """

    def __init__(self, family: MediaFamily, cache: RenderCache, aligner_class: type, config: Any) -> None:
        self.family, self.cache = family, cache
        self._aligner_class = aligner_class
        # An aligner that renders again shares nothing: it runs where the broker may be gone.
        self._config = dataclasses.replace(config, share=False)
        self._share = bool(config.share)
        self._sources: dict[str, MediaSource] = {}
        self._digests: LRUCache[str, str] = LRUCache(NUM_DIGESTS)
        # What this aligner had from the broker lately: a generation that asks again costs no call. Bounded as the cache
        # of rendered tensors is, which stays empty where media are shared.
        self._had: TTLCache[str, Blob] = TTLCache(
            cache.max_bytes, ttl=KEPT_S, getsizeof=lambda blob: blob.num_bytes
        )

    def remember(self, item: MediaItem, source: MediaSource) -> MediaItem:
        """Note where an item came from, for whoever has to render it again."""
        if self._share and item.content_hash:
            self._sources[item.content_hash] = source
        return item

    def forget_sources(self) -> None:
        """At the end of a call: references may carry megabytes of data."""
        self._sources.clear()

    def identify(self, item: MediaItem) -> MediaItem:
        """The item with the digest of its pixels, decoded once for all who ask for this content and these frames."""
        if item.digest or not item.content_hash:
            return item.identified()
        key = f"digest|{item.kind}|{item.content_hash}|{item.frame_indices}"
        found = [item]

        def decode() -> str:
            found[0] = item.identified()
            return found[0].digest

        if key not in self._digests:
            self._digests[key] = made_once(key, len, decode) if self._share else decode()
        if found[0].digest or not self._digests[key]:
            return found[0]
        return dataclasses.replace(item, digest=self._digests[key])

    def __call__(self, item: MediaItem, grid: Grid) -> Any:
        """The item on the grid: a tensor, or a stored one."""
        source = self._sources.get(item.content_hash)
        if not self._share or source is None:
            return self.cache(item, grid)
        identity = "|".join(
            map(str, (item.kind, item.content_hash, item.frame_indices, grid, item.max_num_tiles))
        )
        identity = hashlib.sha256(f"{identity}|{self._config.dtype}".encode()).hexdigest()[:32]
        blob = self._had.get(identity)
        if blob is None:
            blob = made_once(
                identity, lambda made: made.num_bytes, lambda: self._blob(identity, source, item, grid)
            )
            if blob.num_bytes <= self._had.maxsize:
                self._had[identity] = blob
        return StoredTensor([blob], blob.shape)

    def _blob(self, identity: str, source: MediaSource, item: MediaItem, grid: Grid) -> Blob:
        rendered = self.family.render(item, grid)
        encoded = None
        if source.ref.startswith("data:"):
            encoded = owned(source.ref, f"{identity}|source", SPARE)
            source = dataclasses.replace(source, ref="")
        return Blob(
            identity=identity,
            ref=owned(as_array(rendered), f"{identity}|pixels", BROKER),
            shape=tuple(rendered.shape),
            dtype=rendered.dtype,
            remake=Recipe(
                aligner_class=self._aligner_class,
                config=self._config,
                source=source,
                encoded=encoded,
                content_hash=item.content_hash,
                frame_indices=item.frame_indices,
                grid=grid,
            ),
        )

    def pack(
        self, items: Sequence[MediaItem], grids: Sequence[Grid], rendered: Sequence[Any]
    ) -> MediaTensors:
        """As the family packs tensors, without opening what is stored: on stand-ins that have shapes alone."""
        if not any(isinstance(value, StoredTensor) for value in rendered):
            return self.family.pack(items, grids, rendered)
        if not all(isinstance(value, StoredTensor) for value in rendered):
            opened = [value.open() if isinstance(value, StoredTensor) else value for value in rendered]
            return self.family.pack(items, grids, opened)
        shapes = [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in rendered]
        with ShapesJoined():
            packed = self.family.pack(items, grids, shapes)
        parts: dict[str, list[Blob]] = {}
        for item, grid, shape, value in zip(items, grids, shapes, rendered, strict=True):
            alone = self.family.pack([item], [grid], [shape]).values
            for key, tensor in alone.items():
                if tensor.is_meta:
                    parts.setdefault(key, []).extend(value.blobs)
        values = {
            key: StoredTensor(parts[key], tensor.shape, tensor.dtype) if tensor.is_meta else tensor
            for key, tensor in packed.values.items()
        }
        return MediaTensors(grids=packed.grids, values=values)  # type: ignore[arg-type]


class ShapesJoined(TorchFunctionMode):
    """`torch.cat` of stand-ins along their first axis, without torch's own, which first loads 800 modules (1.4 s)."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.cat and len(args) == 1 and not kwargs and all(part.is_meta for part in args[0]):
            first, *others = args[0]
            if all(part.shape[1:] == first.shape[1:] and part.dtype == first.dtype for part in others):
                return first.new_empty((sum(map(len, args[0])), *first.shape[1:]))
        return function(*args, **(kwargs or {}))
