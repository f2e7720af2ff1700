# SPDX-License-Identifier: Apache-2.0
"""What an engine makes of random media: its own arithmetic, imported from it, and the ids that it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from PIL import Image

from nemo_rl_ext.align.families.family import Geometry, MediaFamily
from nemo_rl_ext.align.families.internvl import Implementation, InternVLFamily
from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
from nemo_rl_ext.align.families.qwen_vl import QwenVLFamily
from nemo_rl_ext.align.fixed_tiles import FixedTiler
from nemo_rl_ext.align.grids import DynamicTiler, Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.runs import Grammar
from nemo_rl_ext.align.smart_resize import SmartResizer
from nemo_rl_ext.align.video_grids import VideoTiler

START, CONTEXT, END, WORD, FIRST_CHAR = 6, 5, 7, 20, 1000


@dataclass(frozen=True, kw_only=True)
class Served:
    """One medium as the engine had it: the content, what it chose for it, and the runs that it wrote."""

    item: MediaItem
    geometry: Geometry
    runs: tuple[int, ...]


class Session(Protocol):
    """One conversation's engine. `shares_one_budget`: all images of a request are sized together."""

    shares_one_budget: bool
    max_model_len: int

    def request(self, items: Sequence[MediaItem]) -> list[Served] | None:
        """What the engine makes of all media so far; None where it refuses the request."""
        ...


class Engine(Protocol):
    """One checkpoint of a family, on the engine's side and on ours."""

    family: MediaFamily

    def draw(self, rng: np.random.Generator, place: int) -> MediaItem: ...
    def rewritten(self, item: MediaItem) -> MediaItem: ...
    def session(self, rng: np.random.Generator) -> Session: ...
    def write(self, served: Sequence[Served], rng: np.random.Generator) -> np.ndarray: ...


def draw_size(rng: np.random.Generator) -> Size:
    """(height, width): near-square, ordinary, or a sliver."""
    kind = rng.random()
    side = int(np.exp(rng.uniform(np.log(32), np.log(2600))))
    if kind < 0.5:
        return side, max(16, side + int(rng.integers(-40, 41)))
    if kind < 0.92:
        return side, int(np.exp(rng.uniform(np.log(32), np.log(2600))))
    thin, long = int(rng.integers(16, 41)), int(rng.integers(1000, 4001))
    return (thin, long) if rng.random() < 0.5 else (long, thin)


def draw_item(rng: np.random.Generator, place: int, *, videos: float, num_frames: Sequence[int]) -> MediaItem:
    """An image, or with probability `videos` a clip whose frames are evenly spaced."""
    name = f"{place}:{int(rng.integers(1 << 40)):x}"
    if rng.random() >= videos:
        return MediaItem(size=draw_size(rng), source=f"{place}.png", content_hash=name, digest=name)
    total = int(rng.integers(8, 400))
    count = min(total, int(rng.choice(num_frames)))
    frames = tuple(int(index) for index in np.linspace(0, total - 1, count).round())
    size = int(rng.integers(48, 900)), int(rng.integers(48, 900))
    fps = float(rng.choice([7.5, 24.0, 25.0, 29.97, 30.0]))
    return MediaItem(
        kind="video",
        size=size,
        source=f"{place}.mp4",
        content_hash=name,
        digest=name,
        frame_indices=frames,
        fps=fps,
        total_frames=total,
    )


def rewritten(item: MediaItem) -> MediaItem:
    """The same name and size with other content."""
    other = f"{item.content_hash}-rewritten"
    return dataclasses.replace(item, content_hash=other, digest=other)


class SizeOnly(Image.Image):
    """An image that is only asked for its size; nothing is allocated."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._size = (size[1], size[0])


def characters(ids: Sequence[int]) -> str:
    """Text of ids that were made of characters; media tokens and words are `|`."""
    return "".join(chr(token - FIRST_CHAR) if token >= FIRST_CHAR else "|" for token in ids)


def spelled(text: str) -> list[int]:
    return [FIRST_CHAR + ord(char) for char in text]


@dataclass(kw_only=True)
class NemotronEngine:
    """vLLM's `DynamicResolutionImageTiler` and its sizes of video frames."""

    minimum: int
    maximum: int
    max_model_lens: tuple[int, ...]
    target: int = 256
    per_tubelet: int = 2
    family: NemotronFamily = field(init=False)

    def __post_init__(self) -> None:
        self.family = NemotronFamily(
            grammar=Grammar(START, CONTEXT, END),
            tiler=DynamicTiler(16, 2, self.minimum, self.maximum),
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
            layout=Layout.NATIVE,
            video=VideoTiler(16, 2, self.target, True, self.per_tubelet),
            decoder=characters,
        )

    def draw(self, rng: np.random.Generator, place: int) -> MediaItem:
        return draw_item(rng, place, videos=0.15, num_frames=(2, 4, 7, 8))

    def rewritten(self, item: MediaItem) -> MediaItem:
        return rewritten(item)

    def session(self, rng: np.random.Generator) -> NemotronSession:
        return NemotronSession(engine=self, rng=rng, max_model_len=int(rng.choice(self.max_model_lens)))

    def write(self, served: Sequence[Served], rng: np.random.Generator) -> np.ndarray:
        ids = [WORD]
        for one in served:
            if one.item.kind == "image":
                ids += [START, *[CONTEXT] * one.runs[0], END, *[WORD] * int(rng.integers(1, 3))]
                continue
            frames, step = one.item.frame_indices, int(1000 / one.item.fps)
            for tubelet, length in enumerate(one.runs):
                first = tubelet * self.per_tubelet
                label = " and ".join(
                    f"{'frame' if place else 'Frame'} {first + place + 1} sampled at {index * step / 1000:.2f} seconds"
                    for place, index in enumerate(frames[first : first + self.per_tubelet])
                )
                ids += [*spelled(("\n" if tubelet else "") + label + ": "), START, *[CONTEXT] * length, END]
            ids.append(WORD)
        return np.array(ids)


@dataclass(kw_only=True)
class NemotronSession:
    """One conversation: text taken off the budget or not, a processor cache that is off, cold or warm."""

    engine: NemotronEngine
    rng: np.random.Generator
    max_model_len: int
    kept: dict[str, Grid] = field(default_factory=dict)
    shares_one_budget: bool = field(init=False)

    def __post_init__(self) -> None:
        from vllm.transformers_utils.processors.nano_nemotron_vl import DynamicResolutionImageTiler

        self.shares_one_budget = bool(self.rng.random() < 0.5)
        self.deducts_text = bool(self.rng.random() < 0.4)
        self.warmth = float(self.rng.choice([0.0, 0.3, 0.8]))
        self.tiler = DynamicResolutionImageTiler(
            max_model_len=self.max_model_len,
            patch_size=16,
            min_num_patches=self.engine.minimum,
            max_num_patches=self.engine.maximum,
            downsample_ratio=0.5,
            norm_mean=[0.5] * 3,
            norm_std=[0.5] * 3,
        )

    def request(self, items: Sequence[MediaItem]) -> list[Served] | None:
        images = [item for item in items if item.kind == "image"]
        grids: dict[str, Grid] = {}
        if not self.shares_one_budget:
            for image in images:
                if image.digest not in self.kept and self.rng.random() < self.warmth:
                    # Another request, with another budget, had it before.
                    other = self._joint([image], int(self.rng.integers(16, self.max_model_len)))
                    if other is not None:
                        self.kept[image.digest] = other[0]
            grids = {image.digest: self.kept[image.digest] for image in images if image.digest in self.kept}
        missing = [image for image in images if image.digest not in grids]
        text = int(self.rng.integers(0, 60)) if self.deducts_text else 0
        joint = self._joint(missing, self.max_model_len - 4 - text) if missing else ()
        if joint is None:
            return None
        fresh = {image.digest: grid for image, grid in zip(missing, joint, strict=True)}
        if not self.shares_one_budget:
            self.kept |= fresh
        grids |= fresh
        return [self._served(item, grids.get(item.digest)) for item in items]

    def _joint(self, images: Sequence[MediaItem], tokens: int) -> tuple[Grid, ...] | None:
        try:
            params = self.tiler.compute_params([SizeOnly(image.size) for image in images], tokens)
        # Slivers: the engine divides by zero, or looks up what it did not set.
        except (ZeroDivisionError, AttributeError, ValueError):
            return None
        grids = tuple(Grid(p.patch_size[1], p.patch_size[0]) for p in params)
        return grids if all(grid.num_patches for grid in grids) else None

    def _served(self, item: MediaItem, grid: Grid | None) -> Served:
        if item.kind == "image":
            assert grid is not None
            return Served(item=item, geometry=Geometry(grid), runs=(grid.num_tokens(2),))
        from vllm.transformers_utils.processors.nano_nemotron_vl import (
            get_video_target_size_and_feature_size,
        )

        width, height, tokens = get_video_target_size_and_feature_size(
            item.size[1], item.size[0], self.engine.target, True, 16, 0.5
        )
        tubelets = -(-item.num_frames // self.engine.per_tubelet)
        grid = Grid(height // 16, width // 16)
        return Served(item=item, geometry=Geometry(grid, tubelets), runs=(tokens,) * tubelets)


def nemotron(rng: np.random.Generator) -> list[Engine]:
    """The released limits, tiny ones, and some between."""
    return [
        NemotronEngine(minimum=16, maximum=1024, max_model_lens=(128, 512, 657, 902, 2048)),
        NemotronEngine(minimum=1024, maximum=13312, max_model_lens=(2048, 8192, 32768)),
        NemotronEngine(minimum=256, maximum=3072, max_model_lens=(512, 1024, 4096)),
        NemotronEngine(minimum=4, maximum=64, max_model_lens=(40, 96, 256), target=40, per_tubelet=1),
    ]


IMAGE_PAD, VIDEO_PAD = 5, 8


@dataclass(kw_only=True)
class QwenEngine:
    """transformers' `smart_resize` under the limits of each request, as vLLM calls it."""

    family: QwenVLFamily

    def draw(self, rng: np.random.Generator, place: int) -> MediaItem:
        return draw_item(rng, place, videos=0.25, num_frames=(2, 4, 5, 8))

    def rewritten(self, item: MediaItem) -> MediaItem:
        return rewritten(item)

    def session(self, rng: np.random.Generator) -> QwenSession:
        return QwenSession(family=self.family, rng=rng)

    def write(self, served: Sequence[Served], rng: np.random.Generator) -> np.ndarray:
        ids = [WORD]
        for one in served:
            if one.item.kind == "image":
                ids += [START, *[IMAGE_PAD] * one.runs[0], END]
            elif not self.family.run_per_tubelet:
                ids += [START, *[VIDEO_PAD] * one.runs[0], END]
            else:
                ids.append(START)
                for time, length in zip(_tubelet_times(one.item), one.runs, strict=True):
                    ids += [*spelled(f"<{time:.1f} seconds>"), START, *[VIDEO_PAD] * length, END]
                ids.append(END)
            ids += [WORD] * int(rng.integers(0, 3))
        return np.array(ids)


def _tubelet_times(item: MediaItem) -> list[float]:
    """vLLM's `Qwen3VLProcessingInfo._calculate_timestamps`."""
    from vllm.model_executor.models.qwen3_vl import Qwen3VLProcessingInfo

    return Qwen3VLProcessingInfo._calculate_timestamps(None, list(item.frame_indices), item.fps, 2)


@dataclass(kw_only=True)
class QwenSession:
    """One conversation whose requests may bring limits of their own, and whose clips other frames."""

    family: QwenVLFamily
    rng: np.random.Generator
    shares_one_budget: bool = False
    max_model_len: int = 0

    def request(self, items: Sequence[MediaItem]) -> list[Served] | None:
        limits = [self._limits(self.family.image), self._limits(self.family.video)]
        served: list[Served] = []
        for item in items:
            one = self._served(item, limits[item.kind == "video"])
            if one is None:
                return None
            served.append(one)
        return served

    def _limits(self, resizer: SmartResizer) -> tuple[int, int]:
        if self.rng.random() < 0.5:
            return resizer.min_pixels, resizer.max_pixels
        low = int(resizer.min_pixels * self.rng.uniform(0.3, 2))
        return low, low + int(np.exp(self.rng.uniform(np.log(1e4), np.log(4e6))))

    def _served(self, item: MediaItem, limits: tuple[int, int]) -> Served | None:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_whole_clip

        resizer = self.family.video if item.kind == "video" else self.family.image
        if item.kind == "video" and self.rng.random() < 0.1:
            first = int(self.rng.integers(0, max(1, item.total_frames - item.num_frames)))
            frames = tuple(range(first, first + item.num_frames))
            if frames != item.frame_indices:
                item = dataclasses.replace(item, frame_indices=frames, digest=f"{item.digest}@{first}")
        try:
            if item.kind == "video" and self.family.run_per_tubelet:
                height, width = of_whole_clip(item.num_frames, *item.size, 2, resizer.factor, *limits)
            else:
                height, width = smart_resize(*item.size, resizer.factor, *limits)
        except ValueError:
            return None
        grid = Grid(height // resizer.patch_size, width // resizer.patch_size)
        if not grid.num_patches:
            return None
        tubelets = self.family.num_tubelets(item)
        geometry = Geometry(grid, tubelets)
        runs = (grid.num_tokens(2),)
        if item.kind == "video":
            runs = runs * tubelets if self.family.run_per_tubelet else (runs[0] * tubelets,)
        return Served(item=item, geometry=geometry, runs=runs)


def _delimited(ids: Sequence[int]) -> str:
    names = {START: "<|vision_start|>", END: "<|vision_end|>"}
    return "".join(names.get(token) or characters([token]) for token in ids)


def _qwen(patch: int, image: tuple[int, int], video: tuple[int, int], *, run_per_tubelet: bool) -> Engine:
    return QwenEngine(
        family=QwenVLFamily(
            image_grammar=Grammar(START, IMAGE_PAD, END),
            video_grammar=Grammar(START, VIDEO_PAD, END),
            image=SmartResizer(patch, 2, *image),
            video=SmartResizer(patch, 2, *video, over_all_frames=run_per_tubelet),
            run_per_tubelet=run_per_tubelet,
            image_config={},
            video_config={},
            decoder=_delimited,
        )
    )


def qwen2_5_vl(rng: np.random.Generator) -> list[Engine]:
    """The released limits and small ones."""
    return [
        _qwen(14, (3136, 12845056), (100352, 602112), run_per_tubelet=False),
        _qwen(14, (3136, 100352), (3136, 50176), run_per_tubelet=False),
    ]


def qwen3_vl(rng: np.random.Generator) -> list[Engine]:
    """The released limits and small ones."""
    return [
        _qwen(16, (65536, 16777216), (4096, 25165824), run_per_tubelet=True),
        _qwen(16, (4096, 131072), (4096, 262144), run_per_tubelet=True),
    ]


@dataclass(kw_only=True)
class InternVLEngine:
    """The tilings of transformers' processor or of vLLM's `InternVLChatModel`, under a request's own most tiles."""

    family: InternVLFamily

    def draw(self, rng: np.random.Generator, place: int) -> MediaItem:
        return draw_item(rng, place, videos=0.2, num_frames=(2, 3, 5, 8))

    def rewritten(self, item: MediaItem) -> MediaItem:
        return rewritten(item)

    def session(self, rng: np.random.Generator) -> InternVLSession:
        return InternVLSession(family=self.family, rng=rng)

    def write(self, served: Sequence[Served], rng: np.random.Generator) -> np.ndarray:
        ids = [WORD]
        between = "\n" if self.family.implementation is Implementation.NATIVE else ""
        for one in served:
            if one.item.kind == "image":
                ids += [START, *[IMAGE_PAD] * one.runs[0], END]
            else:
                for frame, length in enumerate(one.runs):
                    ids += spelled((between if frame else "") + f"Frame{frame + 1}: ")
                    ids += [START, *[VIDEO_PAD] * length, END]
            ids += [WORD] * int(rng.integers(0, 3))
        return np.array(ids)


@dataclass(kw_only=True)
class InternVLSession:
    """One conversation whose requests may allow other numbers of tiles, and whose clips other frames."""

    family: InternVLFamily
    rng: np.random.Generator
    shares_one_budget: bool = False
    max_model_len: int = 0

    def request(self, items: Sequence[MediaItem]) -> list[Served] | None:
        tiler = self.family.tiler
        most = tiler.max_num_tiles if self.rng.random() < 0.5 else int(self.rng.integers(1, 25))
        return [self._served(item, most) for item in items]

    def _served(self, item: MediaItem, most: int) -> Served:
        tiler = self.family.tiler
        side = tiler.patches_per_side
        if item.kind == "video":
            if self.rng.random() < 0.1:
                frames = tuple(range(item.num_frames))
                if frames != item.frame_indices:
                    item = dataclasses.replace(item, frame_indices=frames, digest=f"{item.digest}@0")
            runs = (tiler.tokens_per_tile,) * item.num_frames
            return Served(item=item, geometry=Geometry(Grid(side, side), item.num_frames), runs=runs)
        columns, rows = self._canvas(item.size, most)
        tiles = rows * columns + (rows * columns > 1)
        grid = Grid(rows * side, columns * side)
        return Served(item=item, geometry=Geometry(grid), runs=(tiles * tiler.tokens_per_tile,))

    def _canvas(self, size: Size, most: int) -> tuple[int, int]:
        tile = self.family.tiler.tile_size
        if self.family.implementation is Implementation.NATIVE:
            from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

            return get_optimal_tiled_canvas(size, (tile, tile), 1, most)
        from vllm.transformers_utils.processors.internvl import (
            calculate_internvl_targets,
            get_internvl_target_ratios,
        )

        _, width, height = calculate_internvl_targets(
            orig_width=size[1],
            orig_height=size[0],
            target_ratios=get_internvl_target_ratios(1, most),
            image_size=tile,
            use_thumbnail=False,
        )
        return width // tile, height // tile


def internvl(rng: np.random.Generator) -> list[Engine]:
    """Both implementations with the released tiles."""
    return [
        InternVLEngine(
            family=InternVLFamily(
                image_grammar=Grammar(START, IMAGE_PAD, END),
                video_grammar=Grammar(START, VIDEO_PAD, END),
                tiler=FixedTiler(448, 14, 2, 12, use_thumbnail=True),
                implementation=implementation,
                decoder=characters,
            )
        )
        for implementation in Implementation
    ]


ENGINES: dict[str, Callable[[np.random.Generator], list[Engine]]] = {
    "nemotron": nemotron,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "internvl": internvl,
}
