# SPDX-License-Identifier: Apache-2.0
"""What goes into the engine and what comes out. Plain data: numpy and Pillow, no vLLM, no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from nemo_rl_ext.receipts.receipt import Receipt


class EngineError(RuntimeError):
    """The engine cannot serve: an infrastructure failure, worth retrying on a new engine. One string."""


class ContextExceededError(ValueError):
    """The engine refuses a request because its prompt, media expanded, leaves no room in the context."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoInput:
    """Decoded frames of one clip, uint8 `[num_frames, height, width, 3]`, and vLLM's metadata of them.

    `metadata` needs `fps` and `frames_indices`: the timestamps in the prompt come from them.
    """

    frames: np.ndarray
    metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationRequest:
    """One prompt and how to sample from it.

    `prompt_token_ids` is `[tokens]` as the chat template renders it, before expansion: one context token per
    image and one `<video>` token per video. For a later turn of a conversation, append to the earlier
    *unexpanded* ids what was sampled and the tokens of the new messages, and give the images of all turns:
    the engine sizes all images of a request together.
    """

    prompt_token_ids: np.ndarray | tuple[int, ...]
    images: tuple[np.ndarray | Image.Image, ...] = ()
    """Decoded RGB images in prompt order: uint8 `[height, width, 3]`, or Pillow images of mode RGB."""
    videos: tuple[VideoInput, ...] = ()
    n: int = 1
    """Sequences to sample."""
    max_new_tokens: int = 16
    temperature: float = 1.0
    """0 samples greedily."""
    seed: int | None = None
    """Sequence i of the request draws from seed + i; None draws from the engine's own generator."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be sampled; None allows all."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that get a logit bias of -100, the strongest that vLLM applies."""
    ignore_eos: bool = False
    """Sample on to max_new_tokens."""
    name: str = ""
    """Row id for messages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratedSequence:
    """One sampled continuation."""

    token_ids: np.ndarray
    """Sampled ids, the end-of-turn token included, int32 `[tokens]`."""
    logprobs: np.ndarray
    """Log-prob of each sampled id, in the engine's `logprobs_mode`, float32 `[tokens]`."""
    finish_reason: str
    """`stop` or `length`."""
    weight_versions: tuple[tuple[int, int, int], ...]
    """`(version, start, end)`: tokens `[start, end)` were drawn with these weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationResult:
    """What the engine made of one request, or why it refused it.

    A refusal (`error` is not None) is a fault of this request alone: too long, too many images, a token that
    is not in the vocabulary. It has no outputs.
    """

    name: str
    prompt_token_ids: np.ndarray
    """The prompt as the engine used it, media expanded, int32 `[tokens]`; as it was given after a refusal."""
    outputs: tuple[GeneratedSequence, ...] = ()
    weight_version_start: int
    """Weights that drew the first tokens; when refused, the engine's at that moment."""
    weight_version_end: int
    """Weights that drew the last tokens."""
    receipt: Receipt | None = None
    """What vLLM did with each medium; None where this vLLM gives no receipts."""
    error: str | None = None
    exceeds_context: bool = False
    """The refusal is that the prompt, media expanded, leaves no room in the context."""
