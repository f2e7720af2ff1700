# SPDX-License-Identifier: Apache-2.0
"""What receipts and identity cost: a request made ready by vLLM's front end with and without them, in alternation.

python -m benchmarks receipts_cost [--rounds N]

The engine is real and its processor cache off, so that every round processes every image; requests are aborted before a
token is decoded, which receipts have no part in.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks.measure import alternate

SIZES = ((480, 640), (1080, 2400))
CONTEXT = 8192


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        engine, image_token = _engine(Path(folder))
        try:
            _print(engine, image_token, rounds)
        finally:
            engine.shutdown()


def _engine(folder: Path) -> tuple[Any, int]:
    from nemo_rl_ext.grpo.engine.config import EngineConfig
    from nemo_rl_ext.grpo.engine.vllm_engine import VllmEngine
    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint
    from nemo_rl_ext.models.tokenizer import IMAGE_ID

    checkpoint = build_tiny_checkpoint(folder / "tiny", max_num_patches=13312)
    config = EngineConfig(
        model=str(checkpoint), precision="float32", max_model_len=CONTEXT, kv_cache_memory_bytes=512 << 20
    )
    return VllmEngine(config), IMAGE_ID


def _print(engine: Any, image_token: int, rounds: int) -> None:
    from nemo_rl_ext.media.images import load_image
    from nemo_rl_ext.media.policy import MediaPolicy

    table = Table(title="CPU seconds, medians over rounds of alternation")
    for heading in ("", "without, ms", "with, ms", "ratio: median of rounds, middle half"):
        table.add_column(heading)
    rng = np.random.default_rng(0)
    for height, width in SIZES:
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
        data = buffer.getvalue()

        def decode(identify: bool, data: bytes = data) -> None:
            image = load_image(data, MediaPolicy())
            if identify:
                assert image.content_hash

        cases = {
            "engine: one request made ready": {
                "without": lambda p=pixels: _request(engine, image_token, p, recorded=False),
                "with": lambda p=pixels: _request(engine, image_token, p, recorded=True),
            },
            "trainer: one image decoded": {"without": lambda: decode(False), "with": lambda: decode(True)},
            "one rollout: both, and the aligner's decode": {
                name: lambda on=on, p=pixels: _rollout(engine, image_token, p, decode, on)
                for name, on in (("without", False), ("with", True))
            },
        }
        for name, contenders in cases.items():
            found = alternate(contenders, rounds=rounds)
            off, on = found["without"], found["with"]
            table.add_row(
                f"{name}, {width} x {height}",
                f"{off.median * 1e3:.1f}",
                f"{on.median * 1e3:.1f}",
                f"{on.ratio:.3f} ({on.quartiles[0]:.3f} to {on.quartiles[1]:.3f})",
            )
    Console(width=110).print(table)


def _rollout(
    engine: Any, image_token: int, pixels: np.ndarray, decode: Callable[[bool], None], on: bool
) -> None:
    """What a rollout of its own costs: decoded for the request, made ready, and decoded again for a repair."""
    decode(on)
    _request(engine, image_token, pixels, recorded=on)
    decode(on)


def _request(engine: Any, image_token: int, pixels: np.ndarray, *, recorded: bool) -> None:
    from nemo_rl_ext.grpo.engine.requests import GenerationRequest
    from nemo_rl_ext.receipts import recorder

    request = GenerationRequest(prompt_token_ids=(40, image_token, 41), images=(pixels,), max_new_tokens=1)
    restore: Callable[[], None] = (lambda: None) if recorded else _unwrapped()
    try:
        name = engine.add(request)
    finally:
        restore()
    engine._engine.abort_request([name])
    rendered = engine._running.pop(name)
    assert (rendered.receipt is not None) == recorded
    recorder.take(name)


def _unwrapped() -> Callable[[], None]:
    """vLLM's own functions in place of the recorder's; returns what puts the recorder's back."""
    from vllm.multimodal.processing import BaseMultiModalProcessor
    from vllm.v1.engine.input_processor import InputProcessor

    kept = [
        (owner, name, owner.__dict__[name])
        for owner, name in ((BaseMultiModalProcessor, "apply"), (InputProcessor, "process_inputs"))
    ]
    for owner, name, wrapped in kept:
        setattr(owner, name, wrapped.__wrapped__)

    def restore() -> None:
        for owner, name, wrapped in kept:
            setattr(owner, name, wrapped)

    return restore


if __name__ == "__main__":
    main()
