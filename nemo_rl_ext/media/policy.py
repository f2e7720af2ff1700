# SPDX-License-Identifier: Apache-2.0
"""What media references may reach and how large media may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_rl_ext.media.errors import MediaDecodeError, describe


@dataclass(frozen=True, kw_only=True)
class MediaPolicy:
    """What a media reference may reach, and how large it may be."""

    roots: tuple[Path, ...] = ()
    """Directories that local media must lie in once symbolic links are resolved. Empty: only the directory
    that the caller names as `base_dir`, which for a manifest is the manifest's own."""
    allow_remote: bool = False
    """Whether http and https references are fetched at all."""
    allow_private_addresses: bool = False
    """Whether a remote host may resolve to a loopback, private, link-local or other non-public address."""
    max_pixels: int = 89_478_485
    """Largest width x height of an image or a video frame, checked in the header before decoding. The default
    is the size at which Pillow starts to warn (a quarter of a GiB as RGB); the engine's own limit is twice
    that (`VLLM_MAX_IMAGE_PIXELS`)."""
    max_bytes: int = 256 << 20
    """Largest encoded size of one media item, in bytes."""
    timeout_s: float = 20.0
    """Longest time for one remote fetch, and for decoding one video in a child process, in seconds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "roots", tuple(Path(root) for root in self.roots))
        for name in ("max_pixels", "max_bytes", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"media policy: {name} must be positive, got {getattr(self, name)}")


def check_num_bytes(num_bytes: int, ref: str, policy: MediaPolicy, where: str = "") -> None:
    """Raise `MediaDecodeError` when an encoded size is zero or over the policy's limit."""
    if num_bytes == 0:
        raise refused(ref, where, "it holds no bytes", "replace the file")
    if num_bytes > policy.max_bytes:
        problem = f"{num_bytes} bytes, over the limit of {policy.max_bytes}"
        raise refused(ref, where, problem, "shrink it or raise max_bytes")


def refused(ref: str, where: str, problem: str, advice: str) -> MediaDecodeError:
    """The error for a reference that a policy or its own form rules out."""
    return MediaDecodeError(describe("media", ref, where, problem, advice))
