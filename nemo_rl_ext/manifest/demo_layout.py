# SPDX-License-Identifier: Apache-2.0
"""What the demo's rows hold: which pictures and clips in which turn, how large, and which of them is lit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemo_rl_ext.align.grids import RESERVED_TOKENS, DynamicTiler
from nemo_rl_ext.manifest.demo_clips import VIDEOS, Clip
from nemo_rl_ext.manifest.demo_pictures import ODD_KINDS, PHOTOGRAPHS, Picture

ANSWERS = ("l", "r")

# The arithmetic and the context of the demo's checkpoint and engine (models/checkpoint.py, configs/).
TILER = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=16, max_num_patches=1024)
MAX_MODEL_LEN = 512
# vLLM keeps four positions of the context back from the images of a request.
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

# Frame sizes of clips, even as MPEG-4 wants them; their grids do not share the images' budget.
_FRAMES = ((96, 128), (128, 96), (112, 112), (80, 160), (140, 100), (90, 120))
_RATES = (12.0, 24.0, 25.0, 30000 / 1001)

RESIZED = ("many", "square", "tool_many")
"""Shapes of rows whose pictures exceed the engine's budget."""
MOVING = ("clip", "short_clip", "frames", "picture_and_clip", "tool_clip")
"""Shapes of rows that ask which way the light of a clip moves."""
CYCLE = (
    "one", "clip", "many", "one", "odd", "tool", "frames", "one", "text", "short_clip", "two", "one", "tool_many",
    "clip", "one", "square", "tool_clip", "odd", "one", "frames", "one", "many", "clip", "one", "picture_and_clip",
    "one",
)  # fmt: skip
"""One cycle of rows."""
OVERLONG, OVERLONG_PERIOD, OVERLONG_PLACE = "overlong", 120, 60
"""Of so many training rows one outgrows the engine's context in its second turn: a masked row, as runs have them."""


_Turns = tuple[tuple[Picture | Clip, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One row before its files exist: the media of each turn, and which of them all (if any) is lit."""

    shape: str
    turns: _Turns
    lit: int
    answer: str = ""

    @property
    def media(self) -> tuple[Picture | Clip, ...]:
        return tuple(item for turn in self.turns for item in turn)


def plan_rows(split: str, count: int, rng: np.random.Generator) -> list[Plan]:
    """Every choice but the answer first, then the answers, balanced within each shape of row."""
    layouts = [_layout(_shape(split, index), split, rng) for index in range(count)]
    answers = _balanced_answers([plan.shape for plan in layouts], rng)
    return [_light(plan, answer) for plan, answer in zip(layouts, answers, strict=True)]


def _shape(split: str, index: int) -> str:
    if split == "train" and index % OVERLONG_PERIOD == OVERLONG_PLACE:
        return OVERLONG
    return CYCLE[index % len(CYCLE)]


def _layout(shape: str, split: str, rng: np.random.Generator) -> Plan:
    """A row of the given shape whose runs fit the engine's context."""
    if shape == "text":
        return Plan(shape=shape, turns=((),), lit=-1)
    if shape in MOVING:
        clip = _clip(shape, split, rng)
        picture = _picture("one", _small(rng), split, rng)
        special: dict[str, _Turns] = {
            "picture_and_clip": ((picture, clip),),
            "tool_clip": ((picture,), (clip,)),
        }
        turns = special.get(shape, ((clip,),))
        return Plan(shape=shape, turns=turns, lit=sum(map(len, turns)) - 1)
    sizes = _sizes("one" if shape == OVERLONG else shape, rng)
    turns = tuple(tuple(_picture(shape, size, split, rng) for size in turn) for turn in sizes)
    if shape == OVERLONG:
        turns = (*turns, ())
    return Plan(shape=shape, turns=turns, lit=int(rng.integers(sum(map(len, turns)))))


def _picture(shape: str, size: tuple[int, int], split: str, rng: np.random.Generator) -> Picture:
    kinds = {"odd": ODD_KINDS, "two": ("jpeg", "png", *ODD_KINDS)}.get(shape, ("jpeg", "png"))
    return Picture(
        photograph=str(rng.choice(PHOTOGRAPHS[split])),
        size=size,
        kind="jpeg" if shape in RESIZED else str(rng.choice(kinds)),
        lit="",
        crop=(rng.random(), rng.random(), rng.random()),
    )


def _clip(shape: str, split: str, rng: np.random.Generator) -> Clip:
    return Clip(
        video=str(rng.choice(VIDEOS[split])),
        size=_FRAMES[rng.integers(len(_FRAMES))],
        num_frames=int(rng.integers(12, 41)),
        fps=float(rng.choice(_RATES)),
        lit="",
        cut=(rng.random(), rng.random(), rng.random()),
        cached=shape == "frames",
        asked_frames=2 if shape == "short_clip" else None,
    )


def _sizes(shape: str, rng: np.random.Generator) -> list[list[tuple[int, int]]]:
    """The picture sizes of each turn, drawn until they are what the shape promises."""
    counts = {"two": (2,), "many": (3,), "square": (3,), "tool": (1, 1), "tool_many": (1, 2)}.get(shape, (1,))
    draw = {"square": _near_square, "many": _large, "tool_many": _long}.get(shape, _small)
    for _ in range(20_000):
        turns = [[draw(rng) for _ in range(count)] for count in counts]
        if not _fits(turns) or _is_resized(turns) != (shape in RESIZED):
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
    height, width = (int(side + rng.integers(-side // 16, side // 16 + 1)) for side in size)
    return height, width


def _is_resized(turns: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether the engine gives some picture of the last request another grid than the static one."""
    sizes = [size for turn in turns for size in turn]
    grids = TILER.joint_grids(sizes, MAX_MODEL_LEN - RESERVED_TOKENS)
    return grids is not None and any(
        grid != TILER.static_grid(size) for grid, size in zip(grids, sizes, strict=True)
    )


def _is_ambiguous(sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether some run of the request fits more than one grid of its picture."""
    grids = TILER.joint_grids(sizes, MAX_MODEL_LEN - RESERVED_TOKENS) or ()
    tokens = [grid.num_tokens(TILER.merge_size) for grid in grids]
    return any(len(TILER.feasible_grids(size, num)) > 1 for size, num in zip(sizes, tokens, strict=True))


def _fits(turns: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether the request of every turn leaves room for its text and the answer."""
    for last in range(len(turns)):
        sizes = [size for turn in turns[: last + 1] for size in turn]
        grids = TILER.joint_grids(sizes, MAX_MODEL_LEN - RESERVED_TOKENS)
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


def _light(plan: Plan, answer: str) -> Plan:
    places = iter(range(len(plan.media)))
    turns = tuple(
        tuple(
            replace(item, lit=answer if place == plan.lit else "")
            for item, place in zip(turn, places, strict=False)
        )
        for turn in plan.turns
    )
    return replace(plan, turns=turns, answer=answer)
