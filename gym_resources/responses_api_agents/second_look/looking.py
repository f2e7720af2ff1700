# SPDX-License-Identifier: Apache-2.0
"""What the agent shows in its later turns, and what an answer is worth. No Gym: plain data."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image


def first_image(items: Sequence[Mapping[str, Any]]) -> str:
    """The data URL of the first image of a request's input. Raises ValueError when there is none."""
    for item in items:
        content = item.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "input_image":
                return str(part["image_url"])
    raise ValueError("second_look needs a row with an image (an `input_image` part) in its prompt")


def enlarged(url: str, factor: float) -> str:
    """The image of a data URL, its sides `factor` times as long, as the data URL of a PNG."""
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
        size = tuple(max(1, round(side * factor)) for side in image.size)
        buffer = io.BytesIO()
        image.convert("RGB").resize(size).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def score(text: str, answer: str) -> float:
    """Of the letters l and r in an answer the share that equals `answer`; 0 without any."""
    letters = [letter for letter in text if letter in "lr"]
    return letters.count(answer) / len(letters) if letters else 0.0
