# SPDX-License-Identifier: Apache-2.0
"""A small run directory with real media, and a checkpoint directory with a tokenizer and a processor."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint: Path) -> Path:
    """The embedded run's own tiny checkpoint."""
    return tiny_checkpoint


def step(number: int, **extra: float) -> dict:
    return {
        "step": number,
        "train/reward_mean": 0.4 + number / 100,
        "alignment/media_matched": 20.0,
        "alignment/media_repaired": 12.0,
        "alignment/media_ambiguous": 0.0,
        "alignment/media_unalignable": 1.0,
        "alignment/rows": 32.0,
        "alignment/rows_masked": 1.0,
        "alignment/token_delta": 640.0,
        "alignment/repair_ms": 30.0,
        "alignment/logprob_gap_matched_mean": 0.002,
        "alignment/logprob_gap_matched_max": 0.01,
        "alignment/logprob_gap_repaired_mean": 0.002,
        "alignment/logprob_gap_repaired_max": 0.02,
        "alignment/reason/resized": 12.0,
        "alignment/reason/run_count": 1.0,
        "timing/step_s": 3.0,
        "timing/wait_for_rollouts_s": 0.5,
        **extra,
    }


def medium(source: str, size: tuple[int, int], *, grid=(12, 60), verdict="repaired") -> dict:
    return {
        "kind": "image",
        "source": source,
        "size": list(size),
        "verdict": verdict,
        "expected": [252],
        "found": [180],
        "static_grid": [14, 72],
        "grid": None if grid is None else list(grid),
        "grid_source": "captured",
        "reason": "resized",
        "num_frames": 1,
    }


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """`tmp_path/runs/demo`, as a run started in `tmp_path` writes it."""
    media = tmp_path / "data" / "media"
    media.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 255, (230, 1248, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(media / "a.png")
    row = {
        "id": "row-7",
        "responses_create_params": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "media/a.png"}]}]
        },
    }
    write_lines(tmp_path / "data" / "train.jsonl", [row])
    model = tmp_path / "checkpoint"
    model.mkdir()
    (model / "preprocessor_config.json").write_text('{"patch_size": 16}')
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    config = {
        "policy": {"model_name": "checkpoint"},
        "data": {"train": {"data_path": "data/train.jsonl"}, "media_roots": []},
        "logger": {"log_dir": "runs/demo"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    first = {"step": 0, "eval/accuracy": 0.4}
    write_lines(
        folder / "metrics.jsonl", [first, *(step(n) for n in range(1, 9)), step(9, **{"eval/accuracy": 0.8})]
    )
    turn = {
        "step": 2,
        "row_id": "row-7",
        "turn": 0,
        "rollouts": 8,
        "neutral": False,
        "reasons": ["resized"],
        "detail": "",
        "num_expected": 252,
        "num_found": 180,
        "repair_ms": 12.0,
        "num_bytes": 4096,
        "num_media": 1,
        "media": [medium("media/a.png", (230, 1248))],
    }
    masked = {
        **turn,
        "row_id": "row-9",
        "neutral": True,
        "reasons": ["run_count"],
        "detail": "1 runs expected, 2 found",
        "media": [medium("media/gone.png", (100, 100), grid=None, verdict="unalignable")],
    }
    write_lines(folder / "turns.jsonl", [turn, {**turn, "step": 5}, masked])
    occurrence = {
        "step": 2,
        "reason": "resized",
        "story": "row 'row-7': the whole story",
        "row_id": "row-7",
        "turn": 0,
        "media": [medium("media/a.png", (230, 1248))],
    }
    gone = {**occurrence, "reason": "run_count", "row_id": "row-9", "media": masked["media"]}
    write_lines(folder / "offences.jsonl", [occurrence, gone])
    return folder
