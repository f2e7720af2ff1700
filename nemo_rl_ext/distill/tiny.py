# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints and records to try the command without a download.

``python -m nemo_rl_ext.distill.tiny DIR --kind text --records 2`` writes ``DIR/teacher``, ``DIR/student`` and
``DIR/data/{training,validation}.jsonl``; ``--kind vlm`` writes image-text checkpoints and pairs with images.
The models are random: what a run on them shows is the machinery, not a language model.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint
from nemo_rl_ext.models.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, save_byte_tokenizer

logger = logging.getLogger(__name__)

_COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 60, 220), "white": (245, 245, 245)}


def build_tiny_text_checkpoint(
    out_dir: Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    initializer_range: float = 0.2,
) -> Path:
    """Write a random Llama with a byte tokenizer; a large ``initializer_range`` makes it opinionated."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=initializer_range,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(out_dir)
    save_byte_tokenizer(out_dir)
    return out_dir


def write_records(data_dir: Path, *, kind: Literal["text", "vlm"], num_records: int, seed: int = 0) -> None:
    """Write ``training.jsonl`` with ``num_records`` pairs and ``validation.jsonl`` with at most 32."""
    rng = np.random.default_rng(seed)
    data_dir.mkdir(parents=True, exist_ok=True)
    make = _image_pair if kind == "vlm" else _sum_pair
    for name, count in (("training", num_records), ("validation", min(num_records, 32))):
        with (data_dir / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                file.write(json.dumps(make(rng, data_dir)) + "\n")


def _sum_pair(rng: np.random.Generator, data_dir: Path) -> dict[str, Any]:
    a, b = (int(x) for x in rng.integers(0, 1000, 2))
    return {"input": f"What is {a} plus {b}?\n", "output": f"{a} plus {b} is {a + b}."}


def _image_pair(rng: np.random.Generator, data_dir: Path) -> dict[str, Any]:
    from PIL import Image

    name = str(rng.choice(list(_COLOURS)))
    width, height = (int(x) for x in rng.integers(48, 320, 2))
    path = Path("images") / f"{name}_{width}x{height}.png"
    (data_dir / "images").mkdir(exist_ok=True)
    Image.new("RGB", (width, height), _COLOURS[name]).save(data_dir / path)
    return {"input": "<image>\nWhich colour is it?\n", "output": f"{name}", "images": [str(path)]}


def main(
    out_dir: Annotated[Path, typer.Argument(help="New directory for teacher, student and data.")],
    kind: Annotated[Literal["text", "vlm"], typer.Option(help="Causal or image-text models.")] = "text",
    records: Annotated[int, typer.Option(min=1, help="Training records.")] = 2,
) -> None:
    """Write tiny checkpoints and records for `nemo-rl-ext distill`."""
    for role, seed in (("teacher", 0), ("student", 1)):
        if kind == "vlm":
            build_tiny_checkpoint(out_dir / role, seed=seed)
        else:
            build_tiny_text_checkpoint(
                out_dir / role, seed=seed, initializer_range=0.2 if seed == 0 else 0.02
            )
    write_records(out_dir / "data", kind=kind, num_records=records)
    print(f"wrote {out_dir}/teacher, {out_dir}/student and {out_dir}/data")


if __name__ == "__main__":
    typer.run(main)
