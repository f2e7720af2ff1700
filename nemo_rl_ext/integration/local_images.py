# SPDX-License-Identifier: Apache-2.0
"""Local image files of Gym rows, sent to the engine as data URLs: found here, read by aligners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl_ext.rollout.gym_conversation import IMAGE_TYPES

ImagePart = tuple[dict[str, Any], str]
"""A content part and the key of it that holds the reference."""


def local_image_parts(examples: Sequence[dict[str, Any]]) -> Iterator[ImagePart]:
    """The parts that NeMo-RL's `encode_images_in_examples` would encode."""
    for example in examples:
        messages = example.get("responses_create_params", {}).get("input", [])
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                if not isinstance(part, dict) or part.get("type") not in IMAGE_TYPES:
                    continue
                key = next((name for name in ("image_url", "image", "url") if name in part), None)
                if key is None or not isinstance(part[key], str | dict):
                    continue
                reference = reference_of(part[key])
                if reference and not reference.startswith(("http://", "https://", "data:")):
                    yield part, key


def reference_of(source: Any) -> str:
    """A source of a Gym conversation as a reference: a string as it is, a decoded image as a data URL."""
    if isinstance(source, Mapping):
        source = source.get("url") or source.get("path") or ""
    if isinstance(source, str):
        return source
    from nemo_rl.data.multimodal_utils import image_to_data_url

    return str(image_to_data_url(source))
