# SPDX-License-Identifier: Apache-2.0
"""Writes `example.jsonl`: noise with one half lit, and which."""

import base64
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

ROWS, HEIGHT, WIDTH = 16, 96, 128

lines = []
for number in range(ROWS):
    noise = np.random.default_rng(number).integers(0, 90, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)
    right = number % 2
    noise[:, WIDTH // 16 * right : WIDTH // 16 * (right + 1)] += 150
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.NEAREST).save(
        buffer, "PNG", optimize=True
    )
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    content = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": "l or r?"},
    ]
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        "verifier_metadata": {"answer": "lr"[right]},
        "agent_ref": {"type": "responses_api_agents", "name": "second_look"},
    }
    lines.append(json.dumps(row) + "\n")
(Path(__file__).parent / "example.jsonl").write_text("".join(lines), encoding="utf-8")
