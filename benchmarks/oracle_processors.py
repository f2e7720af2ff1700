# SPDX-License-Identifier: Apache-2.0
"""Counts wrong proofs against vLLM's own media processors: random requests through its real front end.

Where `oracle` repeats the engine's arithmetic, this runs what serves: tiny checkpoints of each family behind vLLM's
renderer, processors, caches and request limits, with its receipts. Which pixels, frames and geometry a request got is
read off the tensors that a model would be given. Conversations have one to six media over one to three turns: images,
clips, both, near-square sizes and slivers, prompts as text and as ids, limits of a request's own where the family takes
them, a processor cache that is off, cold or warm, the same medium twice, media in another order than the row's, files
that were rewritten, clips of other frames, media that a client named.

    python -m benchmarks oracle_processors --family qwen3_vl --requests 20000
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.front_end import FrontEnd, Processed, RefusedError, as_trained, pixels_of
from benchmarks.oracle import MODES, OracleTurn, judge, order_shown, summary
from benchmarks.oracle_engines import Served
from nemo_rl_ext.align.evidence import EngineRequest
from nemo_rl_ext.align.families.family import Geometry, MediaFamily
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.grids import Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.receipts.evidence import belongs_to, evidence_of, items_of_turn

Arguments = Mapping[str, Any]
PIXELS_EVERY = 20
"""Of so many conversations one has its pixels compared."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One family: its tiny checkpoint, the limits of which each request brings one, and how to read what was made.

    Every choice of limits makes a processor of its own in vLLM, so there are few of them in one run.
    """

    build: Callable[[Path], Path]
    limits: Callable[[np.random.Generator], list[Arguments | None]]
    geometry: Callable[[MediaItem, Mapping[str, Any], MediaFamily], Geometry]
    max_model_lens: tuple[int, ...] = (4096,)
    largest_side: int = 300


def _nemotron(path: Path) -> Path:
    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint

    return build_tiny_checkpoint(path)


def _tiny(name: str) -> Callable[[Path], Path]:
    def build(path: Path) -> Path:
        from nemo_rl_ext.models.tiny_families import build_tiny_family

        return build_tiny_family(name, path)

    return build


def _of_pixels(item: MediaItem, tensors: Mapping[str, Any], family: MediaFamily) -> Geometry:
    """Nemotron: the tensor is the resized medium itself."""
    pixels, patch = pixels_of(tensors), family.sizer.patch_size
    grid = Grid(pixels.shape[-2] // patch, pixels.shape[-1] // patch)
    return Geometry(grid, family.num_tubelets(item))


def _of_grid_thw(item: MediaItem, tensors: Mapping[str, Any], family: MediaFamily) -> Geometry:
    """Qwen-VL: the grid is what the model cuts its patches by."""
    grid = tensors["video_grid_thw" if item.kind == "video" else "image_grid_thw"]
    tubelets, height, width = (int(side) for side in grid.reshape(-1))
    return Geometry(Grid(height, width), tubelets)


def _of_tiles(item: MediaItem, tensors: Mapping[str, Any], family: MediaFamily) -> Geometry:
    """InternVL: red grows from left to right and green from top to bottom, so the tiles say where they lie."""
    tiles = pixels_of(tensors).float()
    side = family.tiler.patches_per_side  # type: ignore[attr-defined]
    if item.kind == "video":
        return Geometry(Grid(side, side), len(tiles))
    canvas = tiles[:-1] if len(tiles) > 1 else tiles
    columns, rows = (_levels(canvas[:, channel].mean((1, 2))) for channel in (0, 1))
    assert rows * columns == len(canvas), (item.size, rows, columns, len(canvas))
    return Geometry(Grid(rows * side, columns * side))


def _levels(means: torch.Tensor) -> int:
    ordered = means.sort().values
    return 1 + int((ordered.diff() > 0.05).sum())


def _pixel_limits(rng: np.random.Generator) -> list[Arguments | None]:
    limits: list[Arguments | None] = []
    for number in range(12):
        low = int(rng.integers(4, 40)) * 1024
        high = low + int(rng.integers(10, 200)) * 1024
        forms: list[Arguments] = [
            {"size": {"shortest_edge": low, "longest_edge": high}},
            {"min_pixels": low, "max_pixels": high},
            {"max_pixels": high},
        ]
        limits.append(forms[number % len(forms)])
    return [*limits, *[None] * 18]


def _tile_limits(rng: np.random.Generator) -> list[Arguments | None]:
    return [*({"max_patches": most} for most in range(1, 13)), *[None] * 18]


CASES: dict[str, Case] = {
    "nemotron": Case(
        build=_nemotron, limits=lambda _: [None], geometry=_of_pixels, max_model_lens=(384, 1024)
    ),
    "qwen2_5_vl": Case(build=_tiny("qwen2_5_vl"), limits=_pixel_limits, geometry=_of_grid_thw),
    "qwen3_vl": Case(build=_tiny("qwen3_vl"), limits=_pixel_limits, geometry=_of_grid_thw),
    "internvl": Case(build=_tiny("internvl"), limits=_tile_limits, geometry=_of_tiles),
}


def draw_size(rng: np.random.Generator, largest: int) -> Size:
    """(height, width): near-square, ordinary, or a sliver."""
    kind, side = rng.random(), int(np.exp(rng.uniform(np.log(24), np.log(largest))))
    if kind < 0.5:
        return side, max(16, side + int(rng.integers(-24, 25)))
    if kind < 0.93:
        return side, int(np.exp(rng.uniform(np.log(24), np.log(largest))))
    thin, long = int(rng.integers(16, 33)), int(rng.integers(largest, 3 * largest))
    return (thin, long) if rng.random() < 0.5 else (long, thin)


def paint(size: Size, frames: Sequence[int], seed: int) -> np.ndarray:
    """uint8 [frames, height, width, 3]: two ramps that say where a pixel lies, and blue that says whose it is."""
    height, width = size
    pixels = np.empty((len(frames), height, width, 3), dtype=np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width).astype(np.uint8)
    pixels[..., 1] = np.linspace(0, 255, height).astype(np.uint8)[:, None]
    rows, columns = np.arange(height) * 8 // height, np.arange(width) * 8 // width
    for place, frame in enumerate(frames):
        blocks = np.random.default_rng([seed, frame]).integers(0, 256, (8, 8), dtype=np.uint8)
        pixels[place, ..., 2] = blocks[rows[:, None], columns]
    return pixels


def draw_item(rng: np.random.Generator, place: int, largest: int) -> MediaItem:
    """An image, or in a fifth of the cases a clip whose frames are evenly spaced."""
    seed = int(rng.integers(1 << 40))
    if rng.random() >= 0.2:
        return _item("image", draw_size(rng, largest), (0,), seed, place, 0.0, 1)
    total = int(rng.integers(8, 200))
    frames = tuple(int(i) for i in np.linspace(0, total - 1, int(rng.choice([2, 3, 4, 5, 8]))).round())
    size = int(rng.integers(32, largest // 2)), int(rng.integers(32, largest // 2))
    fps = float(rng.choice([7.5, 24.0, 25.0, 29.97, 30.0]))
    return _item("video", size, frames, seed, place, fps, total)


def _item(
    kind: Any, size: Size, frames: tuple[int, ...], seed: int, place: int, fps: float, total: int
) -> MediaItem:
    pixels = paint(size, frames, seed)
    return MediaItem(
        kind=kind,
        size=size,
        source=f"{place}.{'mp4' if kind == 'video' else 'png'}",
        content_hash=f"{seed:x}",
        load=lambda *_: pixels,
        frame_indices=frames if kind == "video" else (),
        fps=fps,
        total_frames=total if kind == "video" else 0,
        digest=pixel_digest(pixels if kind == "video" else pixels[0]),
    )


def _other_frames(item: MediaItem, rng: np.random.Generator) -> MediaItem:
    """The clip as an engine has it that sampled other frames, as many."""
    first = int(rng.integers(0, max(1, item.total_frames - item.num_frames)))
    frames = tuple(range(first, first + item.num_frames))
    seed = int(item.content_hash, 16)
    return _item(
        "video", item.size, frames, seed, int(item.source.split(".")[0]), item.fps, item.total_frames
    )


@dataclass(kw_only=True)
class Oracle:
    """One family's front ends, without and with a processor cache, and what became of its requests."""

    case: Case
    model_dir: Path
    rng: np.random.Generator
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.limits = self.case.limits(self.rng)
        self.family = family_of(self.model_dir)
        self.front_ends = [
            FrontEnd(self.model_dir, max_model_len=length, cache_gb=cache)
            for length in self.case.max_model_lens
            for cache in (0.0, 0.25)
        ]

    def _arguments(self, rng: np.random.Generator) -> Arguments | None:
        return self.limits[int(rng.integers(len(self.limits)))]

    def conversation(self, number: int) -> Iterator[OracleTurn]:
        """The turns of one random conversation, a restarted one as the single turn that training makes of it."""
        rng = self.rng
        front_end = self.front_ends[number % len(self.front_ends)]
        total = int(rng.choice([1, 2, 3, 4, 5, 6], p=[0.35, 0.25, 0.15, 0.1, 0.1, 0.05]))
        cuts = sorted(rng.integers(1, total + 1, int(rng.choice([0, 1, 2], p=[0.6, 0.25, 0.15]))).tolist())
        spans = [
            (first, last) for first, last in zip([0, *cuts], [*cuts, total], strict=True) if last > first
        ]
        items = [draw_item(rng, place, self.case.largest_side) for place in range(total)]
        if total > 1 and rng.random() < 0.05:
            items[1] = dataclasses.replace(items[0], source=items[1].source)
        order = order_shown(rng, spans)
        shown = [items[place] for place in order]
        shown = [
            _other_frames(item, rng) if item.kind == "video" and rng.random() < 0.1 else item
            for item in shown
        ]
        held = [self._rewritten(item) if rng.random() < 0.02 else item for item in items]
        names = [f"named-{item.digest}" if rng.random() < 0.02 else None for item in shown]
        if front_end.has_cache and rng.random() < 0.3:
            self._warm(front_end, shown, names, rng)
        as_text, text = bool(rng.random() < 0.5), ""
        before: Processed | None = None
        for first, last in spans:
            text += self._message(front_end, shown[first:last], rng)
            prompt = text if as_text else front_end.tokenizer.encode(text, add_special_tokens=False)
            try:
                made = front_end.process(
                    prompt, shown[:last], names=names[:last], arguments=self._arguments(rng)
                )
            except RefusedError as error:
                self.counts[f"refused: {_short(error)}"] += 1
                return
            restarts = before is not None and not np.array_equal(
                made.token_ids[: len(before.token_ids)], before.token_ids
            )
            start, offset = (0, 0) if restarts or before is None else (first, len(before.token_ids))
            served = self._served(made, shown[:last])
            if number % PIXELS_EVERY == PIXELS_EVERY - 1:
                self._compare(made, served)
            yield self._turn(front_end, made, items, held, served, order, start, offset)
            before = made

    def _turn(
        self,
        front_end: FrontEnd,
        made: Processed,
        items: Sequence[MediaItem],
        held: Sequence[MediaItem],
        served: Sequence[Served],
        order: Sequence[int],
        start: int,
        offset: int,
    ) -> OracleTurn:
        last = len(served)
        ids = made.token_ids[offset:]
        assert belongs_to(made.receipt, made.token_ids)
        own = tuple(held[start:last])
        joint = not front_end.has_cache and all(one.item.kind == "image" for one in served)
        request = EngineRequest(
            max_model_len=front_end.max_model_len,
            sizes=tuple(item.size for item in items[:last]),
            first=start,
            lengths=tuple(one.runs[0] for one in served),
        )
        return OracleTurn(
            token_ids=ids,
            items=own,
            served=tuple(served[start:]),
            evidence=evidence_of(items_of_turn(made.receipt, start, offset), own, ids, self.family),
            request=request if joint else None,
            swapped=list(order[start:last]) != list(range(start, last)),
        )

    def _served(self, made: Processed, shown: Sequence[MediaItem]) -> list[Served]:
        context = np.isin(made.token_ids, [grammar.context_id for grammar in self.family.grammars])
        served = []
        for item, kind, tensors, (offset, length) in zip(
            shown, made.kinds, made.tensors, made.ranges, strict=True
        ):
            assert kind == item.kind
            edges = np.flatnonzero(
                np.diff(np.concatenate(([False], context[offset : offset + length], [False])))
            )
            runs = tuple(int(last - first) for first, last in edges.reshape(-1, 2))
            geometry = self.case.geometry(item, tensors, self.family)
            served.append(Served(item=item, geometry=geometry, runs=runs))
        return served

    def _message(self, front_end: FrontEnd, items: Sequence[MediaItem], rng: np.random.Generator) -> str:
        content: list[dict[str, str]] = []
        for item in items:
            content.append({"type": item.kind})
            if rng.random() < 0.5:
                content.append({"type": "text", "text": " and" * int(rng.integers(1, 12))})
        chat = [{"role": "user", "content": [*content, {"type": "text", "text": "?"}]}]
        text: str = front_end.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return text + "yes<|im_end|>\n"

    def _warm(
        self,
        front_end: FrontEnd,
        shown: Sequence[MediaItem],
        names: Sequence[str | None],
        rng: np.random.Generator,
    ) -> None:
        """Another request that had some of the media before, beside others and under limits of its own."""
        kept = [place for place in range(len(shown)) if rng.random() < 0.6]
        media = [shown[place] for place in kept] + [draw_item(rng, 99, self.case.largest_side)]
        try:
            front_end.process(
                self._message(front_end, media, rng),
                media,
                names=[*(names[place] for place in kept), None],
                arguments=self._arguments(rng),
            )
        except RefusedError as error:
            self.counts[f"refused: {_short(error)}"] += 1

    def _rewritten(self, item: MediaItem) -> MediaItem:
        """The same name and size with other content."""
        seed = int(item.content_hash, 16) ^ 1
        place = int(item.source.split(".")[0])
        frames = item.frame_indices or (0,)
        return _item(item.kind, item.size, frames, seed, place, item.fps, item.total_frames)

    def _compare(self, made: Processed, served: Sequence[Served]) -> None:
        """Count media whose pixels, rendered on the engine's geometry, are not the engine's own to the last bit."""
        for one, tensors in zip(served, made.tensors, strict=True):
            ours = self.family.render(one.item, one.geometry.grid)
            theirs = as_trained(pixels_of(tensors), self.family, one.item.kind).to(ours.dtype)
            self.counts["media compared pixel by pixel"] += 1
            self.counts["wrong pixels"] += not torch.equal(ours.reshape(theirs.shape), theirs)


def _short(error: Exception) -> str:
    text = str(error)
    for words in ("longer than the maximum", "aspect ratio"):
        if words in text:
            return words
    return text.split("\n")[0][:100]


def run(
    name: str, requests: int, seed: int, model_dir: Path, *, report_every: int = 0
) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Judge `requests` conversations of a family in every mode; also returns what vLLM refused, and pixels."""
    oracle = Oracle(case=CASES[name], model_dir=model_dir, rng=np.random.default_rng(seed))
    totals: dict[str, Counter[str]] = {mode: Counter() for mode in MODES}
    for number in range(requests):
        for turn in oracle.conversation(number):
            for mode in MODES:
                totals[mode].update(judge(oracle.family, turn, mode))
        for counts in totals.values():
            counts["requests"] += 1
        if report_every and (number + 1) % report_every == 0:
            print(json.dumps({"requests": number + 1, **summary(totals)}), flush=True)
    return totals, oracle.counts


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Print what became of the requests; a wrong proof ends the run with a failure."""
    parser = argparse.ArgumentParser(
        prog="benchmarks oracle_processors", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--family", choices=sorted(CASES), default="nemotron")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        totals, other = run(
            options.family,
            options.requests,
            options.seed,
            CASES[options.family].build(Path(scratch) / options.family),
            report_every=max(1, options.requests // 20),
        )
    result = {
        "family": options.family,
        "seconds": round(time.perf_counter() - started, 1),
        "requests": dict(other.most_common()),
        "modes": {mode: dict(sorted(counts.items())) for mode, counts in totals.items()},
    }
    print(json.dumps(result, indent=1))
    wrong = sum(
        count
        for counts in (*totals.values(), other)
        for name, count in counts.items()
        if name.startswith("wrong")
    )
    if wrong:
        raise SystemExit(f"{wrong} wrong proofs")
    return result


if __name__ == "__main__":
    main()
