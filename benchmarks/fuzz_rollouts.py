# SPDX-License-Identifier: Apache-2.0
"""Random rollouts over images and clips, ways to damage them, and a judge that shares no code with alignment."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_rl_ext.align.families.nemotron import NemotronFamily
from nemo_rl_ext.align.grids import DynamicTiler, Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.plan import EngineRequest
from nemo_rl_ext.align.verdict import TurnReport, Verdict
from nemo_rl_ext.align.video_grids import VideoTiler

SIDES = (8, 17, 32, 40, 64, 65, 96, 120, 130, 200, 210, 300)
RATES = (7.5, 12.0, 24.0, 29.97, 30.0)
_LABEL = re.compile(r"((?:[Ff]rame \d+ sampled at \d+\.\d\d seconds(?: and )?)+): \x01\x02+\x03")
_TIME = re.compile(r"sampled at (\d+\.\d\d) seconds")
DAMAGES = (
    "cut", "cut_head", "delete", "duplicate", "rotate", "insert", "noise",
    "delete_run", "duplicate_run", "swap_runs", "resize_run", "empty_run",
    "drop_media", "duplicate_media", "swap_media",
)  # fmt: skip


@dataclass(kw_only=True)
class Turn:
    """One message of a rollout with the media that belong to it, and what the engine really did."""

    token_ids: np.ndarray
    media: list[MediaItem]
    grids: tuple[Grid, ...]
    frames: tuple[tuple[int, ...], ...]
    captured: tuple[Grid, ...] | None = None
    request: EngineRequest | None = None
    damage: list[str] = field(default_factory=list)


class Rollouts:
    """Draws rollouts. Everything follows from the seed."""

    def __init__(self, family: NemotronFamily, seed: int, *, broken_share: float = 0.0) -> None:
        self.family, self.broken_share = family, broken_share
        # Many single draws: numpy's generator takes microseconds for each.
        self.rng = random.Random(seed)
        grammar = family.grammar
        self.special = {grammar.start_id: "\x01", grammar.context_id: "\x02", grammar.end_id: "\x03"}
        vocabulary = {family.decode([token]): token for token in range(8, 400)} if family.decoder else {}
        self.ids_of = {char: token for char, token in vocabulary.items() if len(char) == 1 and char.isascii()}
        self.chars_of = {token: char for char, token in self.ids_of.items()} | self.special

    def rollout(self) -> list[Turn]:
        """One to three messages; a later request may re-size the media of the first, which then comes again."""
        rng = self.rng
        turns = [self._turn() for _ in range(1 + (rng.random() < 0.3) + (rng.random() < 0.1))]
        for turn in turns:
            while rng.random() < 0.5:
                damage(turn, rng.choice(DAMAGES), self)
        return turns

    def _turn(self) -> Turn:
        rng, family = self.rng, self.family
        media = [self._media() for _ in range(rng.randrange(4))]
        sizes = tuple(item.size for item in media if item.kind == "image")
        max_model_len = rng.randrange(20, 300)
        joint = family.joint_grids(sizes, max_model_len)
        request = None
        if joint is not None and len(sizes) == len(media) and sizes and rng.random() < 0.3:
            request = EngineRequest(max_model_len=max_model_len, sizes=sizes)
        images = iter(joint if joint is not None else [family.tiler.static_grid(size) for size in sizes])
        grids, frames, ids = [], [], self.text("ab"[: rng.randrange(3)])
        for item in media:
            if item.kind == "image":
                grids.append(next(images))
                frames.append(())
                ids += self.run(grids[-1]) + self.text("\n")
            else:
                target = None if rng.random() < 0.8 else rng.randrange(4, 100)
                grids.append(family.video.grid(item.size, target))
                used = item.frame_indices if rng.random() < 0.8 else _sample(rng, item.total_frames)
                frames.append(used)
                ids += self.clip(used, item.fps, grids[-1]) + self.text("\n")
        ids += self.text("?")
        captured = tuple(grids) if rng.random() < 0.4 else None
        return Turn(
            token_ids=np.array(ids, np.int64),
            media=media,
            grids=tuple(grids),
            frames=tuple(frames),
            captured=captured,
            request=request,
        )

    def _media(self) -> MediaItem:
        rng = self.rng
        size = (rng.choice(SIDES), rng.choice(SIDES))
        value, broken = rng.randrange(256), rng.random() < self.broken_share
        name = f"{size[0]}x{size[1]}-{value}"

        def load(indices: Sequence[int] = (0,)) -> np.ndarray:
            if broken:
                raise ValueError(f"{name}: the file ends early")
            return np.full((len(indices), *size, 3), value, np.uint8)

        if rng.random() < 0.65:
            return MediaItem(size=size, source=name, content_hash=name, load=load)
        total, fps = rng.randrange(1, 200), rng.choice(RATES)
        return MediaItem(
            kind="video",
            size=size,
            source=name,
            content_hash=name,
            load=load,
            frame_indices=_sample(rng, total),
            fps=fps,
            total_frames=total,
        )

    def text(self, text: str) -> list[int]:
        """Ids of ordinary text."""
        return [self.ids_of[char] for char in text]

    def run(self, grid: Grid) -> list[int]:
        """One wrapped run."""
        grammar = self.family.grammar
        return [
            grammar.start_id,
            *[grammar.context_id] * grid.num_tokens(self.family.merge_size),
            grammar.end_id,
        ]

    def clip(self, frames: Sequence[int], fps: float, grid: Grid) -> list[int]:
        """Labels and runs of a clip in the engine's form."""
        duration, per_tubelet, ids = int(1000 / fps), self.family.frames_per_tubelet(), []
        for start in range(0, len(frames), per_tubelet):
            label = " and ".join(
                f"{'frame' if place else 'Frame'} {start + place + 1} sampled at {index * duration / 1000:.2f} seconds"
                for place, index in enumerate(frames[start : start + per_tubelet])
            )
            ids += self.text(("\n" if start else "") + label + ": ") + self.run(grid)
        return ids


def _sample(rng: random.Random, total: int) -> tuple[int, ...]:
    return tuple(sorted(rng.choices(range(total), k=rng.randrange(1, 7))))


def damage(turn: Turn, kind: str, source: Rollouts) -> None:
    """Break a turn's ids or its list of media, as broken rollouts do."""
    rng, ids = source.rng, turn.token_ids.tolist()
    begin, end = sorted(rng.choices(range(len(ids) + 1), k=2))
    turn.damage.append(kind)
    if kind.endswith("_media"):
        _damage_media(turn, kind, rng)
        return
    if kind.endswith(("_run", "_runs")):
        ids = _damage_runs(ids, kind, source)
    elif kind == "insert":
        ids[begin:begin] = rng.choices([*source.special, 30], k=rng.randrange(1, 6))
    elif kind == "noise":
        ids = rng.choices([*source.special, 30], k=rng.randrange(40))
    else:
        ids = {
            "cut": ids[:end],
            "cut_head": ids[begin:],
            "delete": ids[:begin] + ids[end:],
            "duplicate": ids + ids[begin:end],
            "rotate": ids[end:] + ids[begin:end] + ids[:begin],
        }[kind]
    turn.token_ids = np.array(ids, np.int64)


def _damage_media(turn: Turn, kind: str, rng: random.Random) -> None:
    """The training side lists other media than the engine had; what the engine recorded stays with its own."""
    if not turn.media:
        return
    place, other = rng.choices(range(len(turn.media)), k=2)
    order = list(range(len(turn.media)))
    if kind == "drop_media":
        del order[place]
    elif kind == "duplicate_media":
        order.insert(place, place)
    else:
        order[place], order[other] = order[other], order[place]
    turn.media = [turn.media[index] for index in order]
    if len(order) != len(turn.grids):
        turn.captured, turn.request = None, None


def _damage_runs(ids: list[int], kind: str, source: Rollouts) -> list[int]:
    start_id, context_id, end_id = source.special
    starts = [index for index, token in enumerate(ids) if token == start_id]
    spans = [(start, ids.index(end_id, start) + 1) for start in starts if end_id in ids[start:]]
    if not spans:
        return ids
    first, second = sorted(source.rng.choices(range(len(spans)), k=2))
    begin, end = spans[first]
    if kind == "delete_run":
        return ids[:begin] + ids[end:]
    if kind == "duplicate_run":
        return ids[:end] + ids[begin:end] + ids[end:]
    if kind == "empty_run":
        return ids[: begin + 1] + ids[end - 1 :]
    if kind == "resize_run":
        return ids[: begin + 1] + [context_id] * source.rng.randrange(1, 60) + ids[end - 1 :]
    later, last = spans[second]
    if later < end:
        return ids
    return ids[:begin] + ids[later:last] + ids[end:later] + ids[begin:end] + ids[last:]


def fault(turn: Turn, report: TurnReport, source: Rollouts) -> str:
    """What is wrong with a verdict, or nothing. A turn that is not neutral must be right in every particular."""
    family, ids = source.family, turn.token_ids
    num_context = int((ids == family.grammar.context_id).sum())
    if sum(report.found) != num_context:
        return f"{num_context} context tokens, the report counts {sum(report.found)}"
    if report.neutral:
        return "" if report.reasons() else "a neutral turn without a reason"
    if len(report.media) != len(turn.media):
        return f"{len(turn.media)} media, {len(report.media)} verdicts"
    text = "".join(source.chars_of.get(token, "?") for token in ids.tolist())
    runs = [len(found) for found in re.findall("\x01(\x02*)\x03", text)]
    wanted: list[int] = []
    for item, judged, place in zip(turn.media, report.media, range(len(turn.media)), strict=True):
        if judged.verdict not in (Verdict.MATCHED, Verdict.REPAIRED) or judged.grid is None:
            return f"media {place} of a turn that is not neutral is {judged.verdict.value}"
        tokens = judged.grid.height * judged.grid.width // family.merge_size**2
        frames = len(judged.frames or item.frame_indices)
        wanted += [tokens] * (1 if item.kind == "image" else -(-frames // family.frames_per_tubelet()))
        if turn.captured is not None:
            if judged.grid != turn.captured[place]:
                return f"media {place}: grid {judged.grid}, the engine recorded {turn.captured[place]}"
            continue
        tiler = family.video if item.kind == "video" else family.tiler
        reachable = [grid for grid in _reachable(tiler, item.size) if grid.num_tokens() == tokens]
        if judged.grid not in reachable:
            return f"media {place}: no budget leads to grid {judged.grid}"
        if len(reachable) > 1 and turn.request is None:
            return f"media {place}: grid {judged.grid} of {reachable} was guessed"
    if runs != wanted:
        return f"runs {runs}, the tensors have {wanted}"
    if not turn.damage and tuple(judged.grid for judged in report.media) != turn.grids:
        return f"grids {[judged.grid for judged in report.media]}, the engine used {turn.grids}"
    return _frame_fault(turn, report, text)


def _frame_fault(turn: Turn, report: TurnReport, text: str) -> str:
    """Whether the frames of every clip are those at the times that the text before its runs tells."""
    if not any(item.kind == "video" for item in turn.media):
        return (
            ""  # people write such text before images too; only a list of media with a clip gives it meaning
        )
    told = [time for label in _LABEL.findall(text) for time in _TIME.findall(label)]
    used = []
    for item, judged in zip(turn.media, report.media, strict=True):
        if item.kind == "video":
            if max(judged.frames) >= item.total_frames:
                return f"frame {max(judged.frames)} of a clip of {item.total_frames}"
            used += [f"{index * int(1000 / item.fps) / 1000:.2f}" for index in judged.frames]
    return "" if used == told else f"frames at {used}, the text tells {told}"


@functools.cache
def _reachable(tiler: DynamicTiler | VideoTiler, size: tuple[int, int]) -> tuple[Grid, ...]:
    """Every grid of a size, by trying all budgets."""
    return tuple(sorted({tiler.grid(size, budget) for budget in range(1, 1024)}))
