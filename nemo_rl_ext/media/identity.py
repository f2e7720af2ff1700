# SPDX-License-Identifier: Apache-2.0
"""One digest for what was decoded, the same on the engine's side and on the trainer's.

It covers uint8 RGB pixels as they stand and nothing is converted for it: what reached the engine in another mode, depth
or layout than the trainer decodes has no digest, and so proves nothing. Hashing costs about a tenth of decoding; it is
done only where somebody compares.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def pixel_digest(pixels: np.ndarray) -> str:
    """SHA-256, in hex, of uint8 RGB: an image `[height, width, 3]` or a clip's frames `[frames, height, width, 3]`.

    An image and a clip of that one frame have different digests.
    """
    # On processors with instructions for it, SHA-256 is the fastest of the strong hashes.
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def item_digest(item: Any) -> str | None:
    """`pixel_digest` of a decoded item of vLLM (`get_all_items_for_hash` of vllm/multimodal/parse.py).

    An item is an array, a tensor, a PIL image of mode RGB, a list of these as frames, `(frames, metadata)`, or vLLM's
    `MediaWithBytes` around any of them. None for whatever is not uint8 RGB pixels, and for an item (None) that only the
    processor cache still holds.
    """
    pixels = _pixels(item)
    if pixels is None or pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or pixels.shape[-1] != 3:
        return None
    return pixel_digest(pixels)


def file_digest(data: bytes) -> str:
    """SHA-256, in hex, of an encoded file: an equal file with other pixels is a difference between decoders."""
    return hashlib.sha256(data).hexdigest()


def encoded_bytes(item: Any) -> bytes | None:
    """The file that an item of vLLM's server was decoded from; None where vLLM was handed decoded pixels."""
    if isinstance(item, tuple) and item:
        item = item[0]
    data = getattr(item, "original_bytes", None)
    return data if isinstance(data, bytes) else None


def _pixels(item: Any) -> np.ndarray | None:
    """The item as one array; None where it is none."""
    if hasattr(item, "original_bytes"):  # known by its field: this side of the package does not import vLLM
        item = item.media
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], dict | None):
        return _pixels(item[0])
    if isinstance(item, list | tuple):
        frames = [frame for frame in map(_pixels, item) if frame is not None]
        same = len(frames) == len(item) and len({frame.shape for frame in frames}) == 1
        return np.stack(frames) if same else None
    if hasattr(
        item, "getbands"
    ):  # a PIL image; other modes would hide what a palette or an alpha channel means
        return np.asarray(item) if item.mode == "RGB" else None
    if hasattr(item, "detach"):  # a torch tensor, on whatever device
        item = item.detach().cpu()
        return item.numpy() if item.element_size() == 1 else None
    return item if isinstance(item, np.ndarray) else None
