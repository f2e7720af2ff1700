# SPDX-License-Identifier: Apache-2.0
"""A receipt: one engine request's media, as the engine processed them.

Plain values that survive JSON and pickles, about 180 bytes per item. Names follow vLLM where it has them
(`mm_placeholders`, `prompt_token_ids`; RFC #51472).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

VERSION = 1


class Frames(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Which frames of a clip the engine was given, as its video loader described them."""

    indices: tuple[int, ...] = ()
    fps: float | None = None
    total: int | None = None


class ItemReceipt(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One media item of a request.

    `pixels` is the digest (`media.identity`) of the decoded pixels that arrived, `served` of those that made the
    tensors which the engine used: the two differ where a cache answered with another item's. None is a digest that
    could not be taken. `named` says that the client gave the item a name of its own (a uuid), which replaces the
    content in the engine's caches. `range` is the `(offset, length)` of everything that the item became in the prompt
    as the engine used it, wrappers and timestamps included; `runs` are those of the tokens that got its features, all
    of the range where the model does not say. `geometry` holds the small tensors that the engine's processor made for
    the item, and the shapes of the large ones; None is unknown.
    """

    kind: str
    pixels: str | None = None
    served: str | None = None
    file: str | None = None
    named: bool = False
    cached: bool = False
    size: tuple[int, ...] = ()
    range: tuple[int, int] = (0, 0)
    runs: tuple[tuple[int, int], ...] = ()
    geometry: dict[str, Any] | None = None
    frames: Frames | None = None

    @property
    def is_place(self) -> bool:
        """Whether it says where the item lies and nothing of the item itself."""
        return self.pixels is None and self.served is None and self.geometry is None


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One engine request: its prompt, and its media in prompt order.

    `prompt` is `prompt_digest` of the ids as the engine used them, `prompt_tokens` their number. The rest is what the
    media's sizes may depend on.
    """

    version: int = VERSION
    prompt_tokens: int
    prompt: str
    items: tuple[ItemReceipt, ...] = ()
    max_model_len: int | None = None
    processor_cache: str | None = None
    mm_processor_kwargs: dict[str, Any] = {}

    @property
    def has_places_only(self) -> bool:
        """Whether it is vLLM's own account, which a receipt that names pixels goes before."""
        return bool(self.items) and all(item.is_place for item in self.items)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


def read_receipt(values: Mapping[str, Any]) -> Receipt:
    """A receipt as `as_dict` wrote it.

    Raises:
        ValueError: for values that are not a receipt of this version, naming the first field that is wrong.
    """
    if values.get("version", VERSION) != VERSION:
        raise ValueError(f"media receipt: expected version {VERSION}, found {values.get('version')!r}")
    try:
        return msgspec.convert(values, Receipt, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"media receipt: {error}") from None


def prompt_digest(token_ids: Sequence[int] | np.ndarray) -> str:
    """SHA-256, in hex, of ids as little-endian int32 `[tokens]`."""
    digest = PromptDigest()
    digest.update(token_ids)
    return digest.hex()


class PromptDigest:
    """`prompt_digest` of ids that grow: what was hashed is not hashed again."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._hash = hashlib.sha256()

    def update(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """The next ids `[tokens]`."""
        self._hash.update(np.asarray(token_ids, dtype="<i4").tobytes())
        self.num_tokens += len(token_ids)

    def hex(self) -> str:
        """The digest of all ids so far."""
        return self._hash.copy().hexdigest()
