# SPDX-License-Identifier: Apache-2.0
"""Literals that released vision-language checkpoints read as media.

Some checkpoints ship them as added tokens that are not marked special, beside others that are ordinary text.
"""

from __future__ import annotations

from collections.abc import Collection

MEDIA_MARKERS = (
    "<image>", "</image>", "<img>", "</img>", "<video>", "</video>", "<audio>", "</audio>",
    "<|image|>", "<|video|>", "<|audio|>", "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|media_pad|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|media_begin|>", "<|media_end|>",
    "<|media_content|>", "<IMG_CONTEXT>", "<image_soft_token>", "<start_of_image>", "<end_of_image>",
    "<so_start>", "<so_embedding>", "<so_end>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
)  # fmt: skip

# Also an HTML tag. It delimits media only where the vocabulary has a context token to stand between.
_HTML_WRAPPERS = frozenset({"<img>", "</img>"})
_WRAPPED_CONTEXT = ("<image>", "<IMG_CONTEXT>")


def media_markers(vocabulary: Collection[str]) -> frozenset[str]:
    """The media markers among a tokenizer's added tokens.

    Gemma's `<img>` is HTML like its `<table>`: its media stands between `<start_of_image>` and `<end_of_image>`.
    """
    found = frozenset(MEDIA_MARKERS).intersection(vocabulary)
    return found if found.intersection(_WRAPPED_CONTEXT) else found - _HTML_WRAPPERS
