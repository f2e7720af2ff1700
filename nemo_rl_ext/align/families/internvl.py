# SPDX-License-Identifier: Apache-2.0
"""InternVL: square tiles of one size, a thumbnail behind several, clips of one tile per frame.

An image is `<img>` + 256 x tiles `<IMG_CONTEXT>` + `</img>`. A clip is `Frame1: <img>` + 256 video tokens + `</img>`,
and so on: its ids count its frames and do not name them. Two implementations are in use, whose pixels differ by up to
15 of 255: transformers' own (`internvl`), which resizes bytes with torchvision, and `InternVLChatModel`
(`internvl_chat`), whose remote code, and vLLM's, resize them with Pillow.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_rl_ext.align import hf_pixels
from nemo_rl_ext.align.families.checkpoint import (
    Decoder,
    decoder_of,
    processor_part,
    read_json,
    setting,
    token_ids,
    tokenizer_of,
    triple,
)
from nemo_rl_ext.align.families.family import (
    Geometry,
    Layout,
    MediaTensors,
    PackedItem,
    Seen,
    Written,
    join_rows,
    refuse_arguments,
)
from nemo_rl_ext.align.fixed_tiles import FixedTiler
from nemo_rl_ext.align.grids import Array, Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.limits import Limits
from nemo_rl_ext.align.runs import Grammar, PlaceholderRuns
from nemo_rl_ext.align.verdict import Fault, MediaKind, Reason

START_TOKEN, END_TOKEN, CONTEXT_TOKEN = "<img>", "</img>", "<IMG_CONTEXT>"
MODEL_TYPES = ("internvl", "internvl_chat")
ARCHITECTURES = ("InternVLForConditionalGeneration", "InternVLChatModel")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LIMIT_PLACES: tuple[Mapping[str, tuple[tuple[str, ...], ...]], ...] = (
    {
        "preprocessor_config.json": (("max_patches",),),
        "processor_config.json": (("image_processor", "max_patches"),),
        "config.json": (("max_dynamic_patch",),),
    },
)
"""transformers' own implementation has the first or the second, the chat one the third, for engine and trainer."""
IMAGE, VIDEO = 0, 1
"""Positions of the two grammars."""
_FRAME = re.compile(r"Frame(\d{1,9}): \Z")


class Implementation(enum.Enum):
    """Whose pixels: the family alone does not say."""

    NATIVE = "native"
    """transformers' GotOcr2 image processor and InternVL video processor."""
    CHAT = "chat"
    """The released `InternVLChatModel` code, as vLLM repeats it."""


@dataclass(frozen=True, kw_only=True)
class InternVLFamily:
    """Tensors are `pixel_values` [tiles, 3, tile, tile], all media of a turn in prompt order, a clip frame by frame.

    The chat implementation also has `image_flags` int64 [tiles, 1], which its forward asks for. `video_grammar` is None
    for a checkpoint that takes no video. The two configurations make transformers' processors for the native one.
    """

    image_grammar: Grammar
    video_grammar: Grammar | None
    tiler: FixedTiler
    implementation: Implementation
    image_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    video_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    dtype: torch.dtype = torch.float32
    decoder: Decoder | None = field(default=None, compare=False, repr=False)

    @property
    def grammar(self) -> Grammar:
        return self.image_grammar

    @property
    def grammars(self) -> tuple[Grammar, ...]:
        return (
            (self.image_grammar,) if self.video_grammar is None else (self.image_grammar, self.video_grammar)
        )

    @property
    def _tile(self) -> Grid:
        return Grid(self.tiler.patches_per_side, self.tiler.patches_per_side)

    @property
    def sizer(self) -> FixedTiler:
        return self.tiler

    def served_with(self, arguments: Mapping[str, Any]) -> InternVLFamily:
        name = self.tiler.argument
        refuse_arguments(arguments, known=(name,))
        limit = arguments.get(name) or self.tiler.limit
        return dataclasses.replace(self, tiler=self.tiler.with_limit(int(limit)))

    def placeholders(self) -> tuple[str, ...]:
        return CONTEXT_TOKEN, "<video>", "<image>"

    def marker(self, kind: MediaKind) -> str:
        return "<video>" if kind == "video" else CONTEXT_TOKEN

    def written(self, item: MediaItem) -> Written:
        if item.kind == "image":
            return Written((), 2)
        between = "\n" if self.implementation is Implementation.NATIVE else ""
        texts = tuple(f"{between if frame else ''}Frame{frame + 1}: " for frame in range(item.num_frames))
        return Written(texts, 2 * len(texts))

    def decode(self, token_ids: Sequence[int]) -> str | None:
        return self.decoder(token_ids) if self.decoder is not None else None

    def frames_per_tubelet(self) -> int:
        return 1

    def num_tubelets(self, item: MediaItem) -> int:
        return item.num_frames if item.kind == "video" else 1

    def split(
        self, runs: PlaceholderRuns, texts: Sequence[str] | None, items: Sequence[MediaItem]
    ) -> list[Seen] | Fault:
        groups: list[Seen] = []
        counts = iter([item.num_frames for item in items if item.kind == "video"])
        left = 0
        for place, (length, grammar) in enumerate(
            zip(runs.lengths.tolist(), runs.grammars.tolist(), strict=True)
        ):
            labels: tuple[int, ...] = ()
            follows = False
            if grammar == VIDEO and texts is None:
                follows = left > 0
                left = left - 1 if follows else next(counts, 1) - 1
            elif grammar == VIDEO and texts is not None:
                found = _FRAME.search(texts[place])
                if found is None:
                    return Fault(Reason.TUBELET_COUNT, f"no frame number stands before the video run {place}")
                labels = (int(found.group(1)),)
                follows = bool(groups and groups[-1].labels and groups[-1].labels[-1] == labels[0] - 1)
            if follows:
                last = groups[-1]
                groups[-1] = dataclasses.replace(
                    last, lengths=(*last.lengths, length), labels=(*last.labels, *labels)
                )
            else:
                groups.append(Seen(lengths=(length,), grammar=grammar, labels=labels))
        kinds = ["video" if group.grammar == VIDEO else "image" for group in groups]
        wanted = [item.kind for item in items]
        if kinds == wanted:
            return groups
        reason = Reason.TUBELET_COUNT if "video" in wanted else Reason.RUN_COUNT
        return Fault(
            reason,
            f"media {', '.join(wanted) or 'none'} expected, runs of {', '.join(kinds) or 'none'} found",
        )

    def static(self, items: Sequence[MediaItem]) -> tuple[Geometry, ...]:
        return tuple(
            Geometry(self._tile, self.num_tubelets(item))
            if item.kind == "video"
            else Geometry(self.tiler.grid(item.size, item.max_num_tiles))
            for item in items
        )

    def run_lengths(self, geometry: Geometry, kind: MediaKind) -> tuple[int, ...]:
        if kind == "video":
            return (self.tiler.tokens_per_tile,) * geometry.tubelets
        return (self.tiler.num_tokens(geometry.grid),)

    def frames(self, item: MediaItem, seen: Seen, hint: Sequence[int]) -> tuple[int, ...] | Fault | None:
        """The frames that were captured: the ids only count them."""
        if item.kind == "image":
            return Fault(Reason.TUBELET_COUNT, "its run is one of a video") if seen.grammar == VIDEO else None
        if seen.grammar != VIDEO:
            return Fault(Reason.TUBELET_COUNT, "its run is one of an image")
        if seen.labels and list(seen.labels) != list(range(1, len(seen.labels) + 1)):
            return Fault(
                Reason.TUBELET_COUNT,
                f"frames are numbered from {seen.labels[0]} instead of from 1 without gaps",
            )
        if not hint:
            return Fault(
                Reason.FRAMES_UNKNOWN, f"{len(seen.lengths)} numbered runs name no frames of the clip"
            )
        if len(hint) != len(seen.lengths):
            return Fault(Reason.TUBELET_COUNT, f"{len(seen.lengths)} runs for {len(hint)} frames")
        return tuple(hint)

    def candidates(self, item: MediaItem, seen: Seen) -> tuple[Geometry, ...] | Fault:
        if len(set(seen.lengths)) != 1:
            return Fault(Reason.FRAME_GRID, "the frames' runs differ in length")
        if item.kind == "video":
            whole = seen.lengths[0] == self.tiler.tokens_per_tile and len(seen.lengths) == item.num_frames
            return (Geometry(self._tile, item.num_frames),) if whole else ()
        grids = self.tiler.feasible_grids(item.size, seen.lengths[0], item.max_num_tiles)
        return tuple(Geometry(grid) for grid in grids)

    def limits(self, item: MediaItem, seen: Seen) -> tuple[Limits, ...]:
        """The request's most tiles per image."""
        if item.kind == "video":
            return (Limits(),)
        numbers = self.tiler.limits(item.size, seen.lengths[0])
        return tuple(Limits(max_low=number, max_high=number) for number in numbers)

    def most_tokens(self, item: MediaItem) -> int | None:
        return None

    def captured(self, item: MediaItem, values: Mapping[str, Any]) -> Geometry | None:
        """`image_num_patches` and `video_num_patches` count tiles, and one canvas has so many for an image."""
        count = values.get("video_num_patches" if item.kind == "video" else "image_num_patches")
        if count is None:
            return None
        tiles = int(torch.as_tensor(count).sum())
        if item.kind == "video":
            return Geometry(self._tile, tiles)
        grids = self.tiler.feasible_grids(item.size, tiles * self.tiler.tokens_per_tile, item.max_num_tiles)
        return Geometry(grids[0]) if len(grids) == 1 else None

    def shared_outcomes(self, sizes: Sequence[Size], max_tokens: int) -> Array | None:
        """Images share no budget: nothing to replay."""
        return None

    def render(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        """Tiles [tiles, 3, tile, tile] of one item: row by row, the thumbnail last; one per frame of a clip."""
        side, tile = self.tiler.patches_per_side, self.tiler.tile_size
        pixels = item.pixels()
        if item.kind == "video":
            return self._resized(pixels, (tile, tile), "video").to(self.dtype)
        rows, columns = grid.height // side, grid.width // side
        whole = self._resized(pixels[:1], (rows * tile, columns * tile), "image")
        tiles = (
            whole.reshape(1, 3, rows, tile, columns, tile)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(-1, 3, tile, tile)
        )
        if self.tiler.use_thumbnail and rows * columns > 1:
            tiles = torch.cat([tiles, self._resized(pixels[:1], (tile, tile), "image")])
        return tiles.to(self.dtype).contiguous()

    def _resized(self, frames: Array, size: Size, kind: MediaKind) -> torch.Tensor:
        """Resized and normalised, float32 [frames, 3, height, width]."""
        if self.implementation is Implementation.CHAT:
            return hf_pixels.pillow_resized(frames, size, mean=self.mean, std=self.std)
        video = kind == "video"
        processor = hf_pixels.processor_of(
            self.video_config if video else self.image_config,
            kind,
            "InternVLVideoProcessor" if video else "GotOcr2ImageProcessor",
        )
        return hf_pixels.normalized(processor, hf_pixels.resized(processor, frames, size))

    def pack(
        self, items: Sequence[MediaItem], grids: Sequence[Grid], rendered: Sequence[torch.Tensor]
    ) -> MediaTensors:
        per_tubelet = [
            grid for item, grid in zip(items, grids, strict=True) for _ in range(self.num_tubelets(item))
        ]
        return MediaTensors(grids=tuple(per_tubelet), values=self._values(torch.cat(list(rendered))))

    def _values(self, tiles: torch.Tensor) -> dict[str, torch.Tensor]:
        values = {"pixel_values": tiles}
        if self.implementation is Implementation.CHAT:
            values["image_flags"] = torch.ones(len(tiles), 1, dtype=torch.int64)
        return values

    def items_in(self, values: Mapping[str, torch.Tensor]) -> tuple[PackedItem, ...]:
        """Nothing: tiles alone do not say where an item ends."""
        return ()

    def keys(self) -> Mapping[str, bool]:
        chat = self.implementation is Implementation.CHAT
        return dict.fromkeys(["pixel_values", "image_flags"] if chat else ["pixel_values"], False)

    def join(self, rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return join_rows(rows, self.keys())

    def num_features(self, tensors: MediaTensors) -> int:
        return self._num_features(tensors.values)

    def _num_features(self, values: Mapping[str, torch.Tensor]) -> int:
        return len(values["pixel_values"]) * self.tiler.tokens_per_tile if "pixel_values" in values else 0

    def neutral(self, run_lengths: Sequence[int], grammars: Sequence[int] = ()) -> MediaTensors:
        """As many blank tiles as the tokens are enough for.

        A tower of tiles projects to whole tiles alone: what is over, `sequence` takes out of the ids that the forward
        counts, which is no loss in a row that is not trained on.
        """
        count, tile = sum(run_lengths) // self.tiler.tokens_per_tile, self.tiler.tile_size
        if not count:
            return MediaTensors(grids=(), values={})
        blank = torch.zeros(count, 3, tile, tile, dtype=self.dtype)
        return MediaTensors(grids=(self._tile,) * count, values=self._values(blank))

    def sequence(
        self, token_ids: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`input_ids` int64 [tokens] as the forward counts them: every context token is `<IMG_CONTEXT>`.

        Context tokens beyond the features that there are become the start token. Nothing where no id changes.
        """
        counted = token_ids.clone()
        context = torch.zeros(len(token_ids), dtype=torch.bool)
        for grammar in self.grammars:
            context |= token_ids == grammar.context_id
        counted[context] = self.image_grammar.context_id
        surplus = context.nonzero()[self._num_features(values) :, 0]
        counted[surplus] = self.image_grammar.start_id
        return {} if torch.equal(counted, token_ids) else {"input_ids": counted}


def from_pretrained(
    model_dir: str | Path, *, layout: Layout = Layout.NATIVE, dtype: torch.dtype = torch.float32
) -> InternVLFamily:
    """Read a checkpoint directory's tokenizer and configurations; config.json names the implementation."""
    model_dir = Path(model_dir)
    config = read_json(model_dir / "config.json")
    vocabulary, decoder = tokenizer_of(model_dir)
    if config.get("model_type") == "internvl_chat" or "InternVLChatModel" in (
        config.get("architectures") or ()
    ):
        return _chat(vocabulary, decoder, config, model_dir, dtype)
    joint = model_dir / "processor_config.json"
    sequence = read_json(joint).get("image_seq_length") if joint.is_file() else config.get("image_seq_length")
    return _native(
        vocabulary,
        decoder,
        processor_part(model_dir, "image"),
        processor_part(model_dir, "video"),
        int(sequence or config.get("image_seq_length") or 256),
        str(model_dir),
        dtype,
        str(read_json(model_dir / "tokenizer_config.json").get("video_token") or "<video>"),
    )


def from_processor(
    processor: Any, *, layout: Layout = Layout.NATIVE, dtype: torch.dtype = torch.float32
) -> InternVLFamily:
    """Read transformers' live processor."""
    return _native(
        processor.tokenizer.get_vocab(),
        decoder_of(processor.tokenizer),
        processor.image_processor.to_dict(),
        processor.video_processor.to_dict(),
        int(processor.image_seq_length),
        type(processor).__name__,
        dtype,
        str(processor.video_token),
    )


def disagreement(model_dir: Path) -> str:
    """Nothing: both sides read one file."""
    return ""


def recognises(processor: Any) -> bool:
    """Whether a live processor is transformers' own of this family."""
    return type(processor).__name__ == "InternVLProcessor" and hasattr(processor, "image_seq_length")


def _native(
    vocabulary: Mapping[str, int],
    decoder: Decoder,
    image: Mapping[str, Any],
    video: Mapping[str, Any],
    tokens_per_tile: int,
    origin: str,
    dtype: torch.dtype,
    video_token: str,
) -> InternVLFamily:
    size = setting(image, origin, "size")
    tile = int(size["height"])
    _require_one(int(image.get("min_patches") or 1), origin, "min_patches")
    start, end, context = token_ids(
        vocabulary, (START_TOKEN, END_TOKEN, CONTEXT_TOKEN), origin, "an InternVL"
    )
    return InternVLFamily(
        image_grammar=Grammar(start, context, end),
        video_grammar=Grammar(start, vocabulary[video_token], end) if video_token in vocabulary else None,
        tiler=_tiler(tile, tokens_per_tile, int(image.get("max_patches") or 12), use_thumbnail=True),
        implementation=Implementation.NATIVE,
        image_config=dict(image),
        video_config=dict(video) or dict(image),
        mean=triple(setting(image, origin, "image_mean")),
        std=triple(setting(image, origin, "image_std")),
        dtype=dtype,
        decoder=decoder,
    )


def _chat(
    vocabulary: Mapping[str, int],
    decoder: Decoder,
    config: Mapping[str, Any],
    model_dir: Path,
    dtype: torch.dtype,
) -> InternVLFamily:
    origin = str(model_dir / "config.json")
    vision = config.get("vision_config") or {}
    tile = int(vision.get("image_size") or setting(config, origin, "force_image_size"))
    patch = int(setting(vision, origin, "patch_size"))
    merge = round(1 / float(setting(config, origin, "downsample_ratio")))
    dynamic = bool(config.get("dynamic_image_size", True))
    _require_one(int(config.get("min_dynamic_patch") or 1) if dynamic else 1, origin, "min_dynamic_patch")
    start, end, context = token_ids(
        vocabulary, (START_TOKEN, END_TOKEN, CONTEXT_TOKEN), str(model_dir), "an InternVL"
    )
    video = vocabulary.get("<|video_pad|>")
    return InternVLFamily(
        image_grammar=Grammar(start, context, end),
        video_grammar=None if video is None else Grammar(start, video, end),
        tiler=FixedTiler(
            tile_size=tile,
            patch_size=patch,
            merge_size=merge,
            max_num_tiles=int(config.get("max_dynamic_patch") or 12) if dynamic else 1,
            use_thumbnail=bool(config.get("use_thumbnail", True)),
            argument="max_dynamic_patch",
        ),
        implementation=Implementation.CHAT,
        dtype=dtype,
        decoder=decoder,
    )


def _tiler(tile: int, tokens_per_tile: int, max_num_tiles: int, *, use_thumbnail: bool) -> FixedTiler:
    """A tiler whose patches are merged features: only their number is known of a processor."""
    side = round(tokens_per_tile**0.5)
    if side * side != tokens_per_tile or tile % side:
        raise ValueError(f"{tokens_per_tile} tokens do not make a square of a tile of {tile} pixels")
    return FixedTiler(
        tile_size=tile,
        patch_size=tile // side,
        merge_size=1,
        max_num_tiles=max_num_tiles,
        use_thumbnail=use_thumbnail,
        argument="max_patches",
    )


def _require_one(minimum: int, origin: str, name: str) -> None:
    if minimum != 1:
        raise ValueError(f"{origin}: {name} is {minimum}; only images of one tile and more are known")
