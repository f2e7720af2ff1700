# SPDX-License-Identifier: Apache-2.0
"""The demo's manifests: rows that cannot be answered without the right pixels.

The question is which half of a picture is lit, `l` or `r`. Rows bring one to three pictures in many sizes,
part of them over the engine's budget for one request, odd file kinds included and near-square ones, whose run
length alone does not tell their grid; some bring their last pictures as a tool's result in a second turn. Where a
row has several pictures one of them is lit, and the question names it: the demo's two-layer model is not asked
to learn counting.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_ext.align.grids import DynamicTiler
from nemo_rl_ext.manifest.demo_pictures import ODD_KINDS, PHOTOGRAPHS, Picture, encode, photograph_dir

_VERSION = 1
_STAMP = "demo_manifest.json"
_MEDIA_PREFIX = "demo-media-"
ANSWERS = ("l", "r")

# The arithmetic and the context of the demo's checkpoint and engine (grpo/checkpoint.py, configs/).
TILER = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=16, max_num_patches=1024)
MAX_MODEL_LEN = 512
# vLLM keeps four positions of the context back from the images of a request.
_RESERVED_TOKENS = 4
# Upper bounds for the byte-level chat template: role headers and question of a turn, wrapper of an image.
_TEXT_TOKENS_PER_TURN, _TEXT_TOKENS_PER_IMAGE = 26, 3

_SMALL = (
    (96, 128),
    (128, 96),
    (120, 200),
    (200, 300),
    (240, 160),
    (64, 64),
    (112, 128),
    (180, 190),
    (224, 224),
)
_LARGE = ((480, 640), (1024, 300), (300, 1024), (640, 480), (500, 512), (512, 496), (360, 720), (768, 400))

# One cycle of rows; those of `_RESIZED` exceed the engine's budget.
_RESIZED = ("many", "square", "tool_many")
_CYCLE = (
    "one", "odd", "one", "many", "one", "tool", "two", "one", "odd", "many",
    "square", "one", "tool_many", "odd", "one", "two", "many", "one", "tool", "one",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """One row before its files exist: the pictures of each turn, and which of them all is lit."""

    shape: str
    turns: tuple[tuple[Picture, ...], ...]
    lit: int

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(picture for turn in self.turns for picture in turn)


def score(row: Any, text: str) -> float:
    """1.0 when the first letter of `text` is the row's answer, else 0.0; never raises.

    `row` is a `ManifestRow` or a mapping with `verifier_metadata`.
    """
    try:
        metadata = row["verifier_metadata"] if isinstance(row, dict) else row.verifier_metadata
        answer = metadata["answer"]
        return float(isinstance(answer, str) and answer != "" and text.strip()[:1] == answer)
    except (AttributeError, KeyError, TypeError):
        return 0.0


def build_demo_manifest(
    out_dir: str | Path, *, num_rows: int, seed: int, num_validation_rows: int | None = None
) -> tuple[Path, Path]:
    """Write `train.jsonl` and `validation.jsonl` with their pictures into `out_dir`, unless they exist.

    `num_validation_rows` defaults to half of `num_rows`. The result depends on the arguments and the installed
    libraries only. Files appear complete or not at all: pictures go to a directory of their own, which is
    renamed into place, then the manifests, last the stamp. Other files in `out_dir` are left alone. Raises
    `ValueError` when scikit-image, whose photographs are used, is missing.
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
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=out_dir) as temporary:
        staged = Path(temporary)
        (staged / "media").mkdir()
        for number, (split, count) in enumerate(counts.items()):
            plans = _plan_rows(split, count, np.random.default_rng([seed, number]))
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


def _plan_rows(split: str, count: int, rng: np.random.Generator) -> list[_Plan]:
    """Every choice but the answer first, then the answers, balanced within each shape of row."""
    layouts = [_layout(_CYCLE[index % len(_CYCLE)], split, rng) for index in range(count)]
    answers = _balanced_answers([plan.shape for plan in layouts], rng)
    return [_light(plan, answer) for plan, answer in zip(layouts, answers, strict=True)]


def _layout(shape: str, split: str, rng: np.random.Generator) -> _Plan:
    """A row of the given shape whose runs fit the engine's context."""
    kinds = {"odd": ODD_KINDS, "two": ("jpeg", "png", *ODD_KINDS)}.get(shape, ("jpeg", "png"))
    turns = _sizes(shape, rng)
    large = shape in _RESIZED
    pictures = [
        tuple(
            Picture(
                photograph=str(rng.choice(PHOTOGRAPHS[split])),
                size=size,
                kind="jpeg" if large else str(rng.choice(kinds)),
                lit="",
                crop=tuple(float(value) for value in rng.random(3)),
            )
            for size in turn
        )
        for turn in turns
    ]
    return _Plan(shape=shape, turns=tuple(pictures), lit=int(rng.integers(sum(map(len, turns)))))


def _sizes(shape: str, rng: np.random.Generator) -> list[list[tuple[int, int]]]:
    """The picture sizes of each turn, drawn until they are what the shape promises."""
    counts = {"two": (2,), "many": (3,), "square": (3,), "tool": (1, 1), "tool_many": (1, 2)}.get(shape, (1,))
    draw = {"square": _near_square, "many": _large, "tool_many": _long}.get(shape, _small)
    for _ in range(20_000):
        turns = [[draw(rng) for _ in range(count)] for count in counts]
        if not _fits(turns) or _is_resized(turns) != (shape in _RESIZED):
            continue
        if shape != "square" or _is_ambiguous(turns[0]):
            return turns
    raise RuntimeError(f"no sizes found for a row of shape {shape!r}; was the tiler or the context changed?")


def _small(rng: np.random.Generator) -> tuple[int, int]:
    return _jitter(_SMALL[rng.integers(len(_SMALL))], rng)


def _large(rng: np.random.Generator) -> tuple[int, int]:
    return _jitter(_LARGE[rng.integers(len(_LARGE))], rng)


def _long(rng: np.random.Generator) -> tuple[int, int]:
    size = int(rng.integers(100, 300)), int(rng.integers(900, 1600))
    return size if rng.random() < 0.5 else size[::-1]


def _near_square(rng: np.random.Generator) -> tuple[int, int]:
    height = int(rng.integers(380, 700))
    return height, int(height * rng.uniform(0.93, 1.07))


def _jitter(size: tuple[int, int], rng: np.random.Generator) -> tuple[int, int]:
    """A size nearby: real pictures are seldom multiples of the patch size."""
    return tuple(int(side + rng.integers(-side // 16, side // 16 + 1)) for side in size)


def _is_resized(turns: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether the engine gives some picture of the last request another grid than the static one."""
    sizes = [size for turn in turns for size in turn]
    grids = TILER.joint_grids(sizes, MAX_MODEL_LEN - _RESERVED_TOKENS)
    return grids is not None and any(
        grid != TILER.static_grid(size) for grid, size in zip(grids, sizes, strict=True)
    )


def _is_ambiguous(sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether some run of the request fits more than one grid of its picture."""
    grids = TILER.joint_grids(sizes, MAX_MODEL_LEN - _RESERVED_TOKENS) or ()
    tokens = [grid.num_tokens(TILER.merge_size) for grid in grids]
    return any(len(TILER.feasible_grids(size, num)) > 1 for size, num in zip(sizes, tokens, strict=True))


def _fits(turns: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether the request of every turn leaves room for its text and the answer."""
    for last in range(len(turns)):
        sizes = [size for turn in turns[: last + 1] for size in turn]
        grids = TILER.joint_grids(sizes, MAX_MODEL_LEN - _RESERVED_TOKENS)
        text = _TEXT_TOKENS_PER_TURN * (last + 1) + _TEXT_TOKENS_PER_IMAGE * len(sizes)
        if grids is None or sum(grid.num_tokens(TILER.merge_size) for grid in grids) + text > MAX_MODEL_LEN:
            return False
    return True


def _balanced_answers(shapes: Sequence[str], rng: np.random.Generator) -> list[str]:
    """As many of either answer within each shape as its number allows, and in total."""
    answers = [""] * len(shapes)
    surplus = int(rng.integers(2))
    for shape in sorted(set(shapes)):
        places = [index for index, other in enumerate(shapes) if other == shape]
        labels = [ANSWERS[(index + surplus) % 2] for index in range(len(places))]
        surplus = (surplus + len(places)) % 2
        for index, label in zip(places, rng.permutation(labels), strict=True):
            answers[index] = str(label)
    return answers


def _light(plan: _Plan, answer: str) -> _Plan:
    flat = [
        Picture(**{**vars(picture), "lit": answer if index == plan.lit else ""})
        for index, picture in enumerate(plan.pictures)
    ]
    turns, start = [], 0
    for turn in plan.turns:
        turns.append(tuple(flat[start : start + len(turn)]))
        start += len(turn)
    return _Plan(shape=plan.shape, turns=tuple(turns), lit=plan.lit)


def _write_rows(
    split: str, plans: Sequence[_Plan], media_dir: Path, media_name: str
) -> Iterator[dict[str, Any]]:
    for number, plan in enumerate(plans):
        row_id = f"{split}-{number:05d}"
        total = len(plan.pictures)
        turns, index = [], 0
        for turn in plan.turns:
            parts: list[dict[str, Any]] = []
            for picture in turn:
                data, suffix = encode(picture)
                name = f"{row_id}-{index}.{suffix}"
                (media_dir / name).write_bytes(data)
                parts.append({"type": "input_image", "image_url": f"{media_name}/{name}", "detail": "auto"})
                index += 1
            # Before the lit picture has come there is nothing to name; only the last answer counts.
            question = f"{plan.lit + 1}?" if total > 1 and plan.lit < index else "?"
            parts.append({"type": "input_text", "text": question})
            turns.append([{"role": "tool" if turns else "user", "content": parts}])
        row = {
            "id": row_id,
            "responses_create_params": {"input": turns[0]},
            "verifier_metadata": {
                "task": "half",
                "answer": plan.pictures[plan.lit].lit,
                "image": plan.lit,
                "shape": plan.shape,
            },
            "agent_ref": {"type": "responses_api_agents", "name": "lit_half"},
        }
        yield row | {"turns": turns[1:]} if turns[1:] else row
