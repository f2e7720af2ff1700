# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL, Qwen3-VL and Qwen3.5-VL: two context tokens, grids that a run length names, three-axis positions.

An image is `<|vision_start|>` + N x `<|image_pad|>` + `<|vision_end|>`. A clip of Qwen2.5-VL is one such run of
`<|video_pad|>` for all of its tubelets, whose ids say nothing of its frames. A clip of Qwen3-VL is one run per tubelet
behind `<0.2 seconds>`, the mean time of its frames, and the prompt's own delimiters stay around all of it.
"""

from __future__ import annotations

import dataclasses
import math
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
from nemo_rl_ext.align.grids import Array, Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.limits import Limits
from nemo_rl_ext.align.positions import Block, media_positions
from nemo_rl_ext.align.runs import Grammar, PlaceholderRuns, find_all_runs
from nemo_rl_ext.align.smart_resize import SmartResizer
from nemo_rl_ext.align.verdict import Fault, MediaKind, Reason

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
ARCHITECTURES = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
LIMIT_PLACES: tuple[Mapping[str, tuple[tuple[str, ...], ...]], ...] = (
    {
        "preprocessor_config.json": (("max_pixels",), ("size", "longest_edge")),
        "processor_config.json": (
            ("image_processor", "max_pixels"),
            ("image_processor", "size", "longest_edge"),
        ),
    },
)
"""Engine and trainer read the same file."""
_SCOPES = ("images_kwargs", "videos_kwargs")
"""Arguments of a processor that hold those of one kind of media."""
IMAGE, VIDEO = 0, 1
"""Positions of the two grammars, and, plus one, the token types of transformers."""
_NEXT_TUBELET = re.compile(r"<\|vision_end\|><(\d+\.\d) seconds>\Z")
_TIME = re.compile(r"<(\d+\.\d) seconds>\Z")


@dataclass(frozen=True, kw_only=True)
class QwenVLFamily:
    """Tensors are those of transformers' models: `pixel_values` [patches, 3 * 2 * patch**2] and `image_grid_thw` int64
    [images, 3] of the images, `pixel_values_videos` and `video_grid_thw` of the clips, and for Qwen2.5-VL
    `second_per_grid_ts` float32 [clips].

    `run_per_tubelet`: clips are written as Qwen3-VL writes them. `tokens_per_second` spaces Qwen2.5-VL's tubelets in
    time. The two configurations make transformers' processors, which do the pixels.
    """

    image_grammar: Grammar
    video_grammar: Grammar
    image: SmartResizer
    video: SmartResizer
    run_per_tubelet: bool
    tokens_per_second: float = 1.0
    image_config: Mapping[str, Any] = field(repr=False)
    video_config: Mapping[str, Any] = field(repr=False)
    dtype: torch.dtype = torch.float32
    decoder: Decoder | None = field(default=None, compare=False, repr=False)

    @property
    def grammar(self) -> Grammar:
        return self.image_grammar

    @property
    def grammars(self) -> tuple[Grammar, ...]:
        return self.image_grammar, self.video_grammar

    @property
    def sizer(self) -> SmartResizer:
        return self.image

    def served_with(self, arguments: Mapping[str, Any]) -> QwenVLFamily:
        known = ("size", "min_pixels", "max_pixels")
        flat = {key: value for key, value in arguments.items() if key not in _SCOPES}
        of_images, of_videos = (dict(arguments[key]) if arguments.get(key) else flat for key in _SCOPES)
        for scope in (flat, of_images, of_videos):
            refuse_arguments(scope, known=known)
        if flat and (scoped := [key for key in _SCOPES if arguments.get(key)]):
            raise ValueError(
                f"mm_processor_kwargs: {', '.join(flat)} beside {', '.join(scoped)}: which of them counts for which "
                f"medium differs between processors; give all of them in {' and '.join(_SCOPES)}"
            )
        return dataclasses.replace(
            self, image=self.image.with_arguments(of_images), video=self.video.with_arguments(of_videos)
        )

    def placeholders(self) -> tuple[str, ...]:
        start, end, image, video = TOKENS
        return f"{start}{image}{end}", f"{start}{video}{end}", image, video

    def marker(self, kind: MediaKind) -> str:
        return TOKENS[3] if kind == "video" else TOKENS[2]

    def written(self, item: MediaItem) -> Written:
        """Delimiters of every run; those of the prompt stay around the runs of a clip."""
        if item.kind == "image" or not self.run_per_tubelet:
            return Written((), 2)
        texts = tuple(f"<{time} seconds>" for time in self._times(item.frame_indices, item.fps))
        return Written(texts, 2 * len(texts) + 2)

    def decode(self, token_ids: Sequence[int]) -> str | None:
        return self.decoder(token_ids) if self.decoder is not None else None

    def frames_per_tubelet(self) -> int:
        return self.video.temporal_patch_size

    def num_tubelets(self, item: MediaItem) -> int:
        return -(-item.num_frames // self.video.temporal_patch_size) if item.kind == "video" else 1

    def split(
        self, runs: PlaceholderRuns, texts: Sequence[str] | None, items: Sequence[MediaItem]
    ) -> list[Seen] | Fault:
        groups = self._groups(runs, texts, items)
        if isinstance(groups, Fault):
            return groups
        kinds = ["video" if group.grammar == VIDEO else "image" for group in groups]
        wanted = [item.kind for item in items]
        if kinds == wanted:
            return groups
        reason = Reason.TUBELET_COUNT if "video" in wanted else Reason.RUN_COUNT
        return Fault(
            reason, f"{_listed(wanted)} expected, the {len(runs)} runs are those of {_listed(kinds)}"
        )

    def _groups(
        self, runs: PlaceholderRuns, texts: Sequence[str] | None, items: Sequence[MediaItem]
    ) -> list[Seen] | Fault:
        """The runs of one item each; a tubelet continues a clip when only its own time stands between."""
        groups: list[Seen] = []
        counts = iter([self.num_tubelets(item) for item in items if item.kind == "video"])
        left = 0
        for place, (length, grammar) in enumerate(
            zip(runs.lengths.tolist(), runs.grammars.tolist(), strict=True)
        ):
            labels: tuple[str, ...] = ()
            follows = False
            if grammar == VIDEO and self.run_per_tubelet:
                if texts is None:
                    # Nothing to read: the clips are taken to have the tubelets that were sampled.
                    follows = left > 0
                    left = left - 1 if follows else next(counts, 1) - 1
                else:
                    time = _TIME.search(texts[place])
                    if time is None:
                        return Fault(Reason.TUBELET_COUNT, f"no time stands before the video run {place}")
                    labels = (time.group(1),)
                    follows = bool(
                        groups and groups[-1].grammar == VIDEO and _NEXT_TUBELET.match(texts[place])
                    )
            if follows:
                last = groups[-1]
                groups[-1] = dataclasses.replace(
                    last, lengths=(*last.lengths, length), labels=(*last.labels, *labels)
                )
            else:
                groups.append(Seen(lengths=(length,), grammar=grammar, labels=labels))
        return groups

    def static(self, items: Sequence[MediaItem]) -> tuple[Geometry, ...]:
        return tuple(
            Geometry(self._resizer(item).static_grid(item.size, item.num_frames), self.num_tubelets(item))
            for item in items
        )

    def _resizer(self, item: MediaItem) -> SmartResizer:
        return self.video if item.kind == "video" else self.image

    def run_lengths(self, geometry: Geometry, kind: MediaKind) -> tuple[int, ...]:
        tokens = geometry.grid.num_tokens(self.image.merge_size)
        if kind == "image":
            return (tokens,)
        return (tokens,) * geometry.tubelets if self.run_per_tubelet else (tokens * geometry.tubelets,)

    def frames(self, item: MediaItem, seen: Seen, hint: Sequence[int]) -> tuple[int, ...] | Fault | None:
        """The frames that were captured, or those that were sampled where the times before the tubelets are theirs."""
        if item.kind == "image":
            return Fault(Reason.TUBELET_COUNT, "its run is one of a video") if seen.grammar == VIDEO else None
        if seen.grammar != VIDEO:
            return Fault(Reason.TUBELET_COUNT, "its run is one of an image")
        frames = tuple(hint) or item.frame_indices
        if not self.run_per_tubelet:
            if not hint:
                return Fault(
                    Reason.FRAMES_UNKNOWN,
                    f"one run of {seen.lengths[0]} tokens for all tubelets names no frames",
                )
            return frames
        if not seen.labels:
            return frames if hint else None
        expected = self._times(frames, item.fps)
        if seen.labels == expected:
            return frames
        if len(seen.labels) != len(expected):
            return Fault(
                Reason.TUBELET_COUNT,
                f"{len(seen.labels)} tubelets for {len(frames)} frames, {len(expected)} expected",
            )
        return Fault(
            Reason.FRAME_TIMES,
            f"the tubelets' times {', '.join(map(str, seen.labels[:4]))} s are not those of the sampled frames, "
            f"{', '.join(expected[:4])} s",
        )

    def _times(self, frames: Sequence[int], fps: float) -> tuple[str, ...]:
        """The mean time of the first and last frame of every tubelet, as vLLM's `_calculate_timestamps` writes it."""
        step = self.video.temporal_patch_size
        padded = [*frames, *[frames[-1]] * (-len(frames) % step)] if frames and fps > 0 else []
        seconds = [index / fps for index in padded]
        return tuple(
            f"{(seconds[first] + seconds[first + step - 1]) / 2:.1f}"
            for first in range(0, len(seconds), step)
        )

    def candidates(self, item: MediaItem, seen: Seen) -> tuple[Geometry, ...] | Fault:
        if len(set(seen.lengths)) != 1:
            return Fault(Reason.FRAME_GRID, "the tubelets' runs differ in length")
        tokens, tubelets = seen.lengths[0], self.num_tubelets(item)
        if item.kind == "video":
            if self.run_per_tubelet and tubelets != len(seen.lengths):
                return ()
            if not self.run_per_tubelet:
                if tokens % tubelets:
                    return ()
                tokens //= tubelets
        grids = self._resizer(item).feasible_grids(item.size, tokens, item.num_frames)
        return tuple(Geometry(grid, tubelets) for grid in grids)

    def limits(self, item: MediaItem, seen: Seen) -> tuple[Limits, ...]:
        """The pixel limits of the request: images have one pair of them, clips another."""
        tokens = seen.lengths[0]
        if item.kind == "video" and not self.run_per_tubelet:
            tokens //= self.num_tubelets(item)
        return self._resizer(item).limits(item.size, tokens, item.num_frames)

    def most_tokens(self, item: MediaItem) -> int | None:
        return None

    def captured(self, item: MediaItem, values: Mapping[str, Any]) -> Geometry | None:
        """From `image_grid_thw` or `video_grid_thw`."""
        grid = values.get("video_grid_thw" if item.kind == "video" else "image_grid_thw")
        if grid is None:
            return None
        tubelets, height, width = (int(side) for side in torch.as_tensor(grid).reshape(-1)[:3])
        return Geometry(Grid(height, width), tubelets)

    def shared_outcomes(self, sizes: Sequence[Size], max_tokens: int) -> Array | None:
        """Images share no budget: nothing to replay."""
        return None

    def render(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        """Patches [tubelets * patches, 3 * 2 * patch**2] of one item."""
        video = item.kind == "video"
        if video:
            name = "Qwen3VLVideoProcessor" if self.run_per_tubelet else "Qwen2VLVideoProcessor"
            processor = hf_pixels.processor_of(self.video_config, "video", name)
        else:
            processor = hf_pixels.processor_of(self.image_config, "image", "Qwen2VLImageProcessor")
        return hf_pixels.patches(processor, item.pixels(), grid, video=video).to(self.dtype)

    def pack(
        self, items: Sequence[MediaItem], grids: Sequence[Grid], rendered: Sequence[torch.Tensor]
    ) -> MediaTensors:
        rows = [
            (item.kind, (self.num_tubelets(item), *grid), pixels, self._seconds_per_tubelet(item))
            for item, grid, pixels in zip(items, grids, rendered, strict=True)
        ]
        per_tubelet = [
            grid for (_, (tubelets, *_), *_), grid in zip(rows, grids, strict=True) for _ in range(tubelets)
        ]
        return MediaTensors(grids=tuple(per_tubelet), values=self._values(rows))

    def _seconds_per_tubelet(self, item: MediaItem) -> float:
        """`second_per_grid_ts` as transformers' Qwen2_5_VLProcessor derives it from a clip's metadata."""
        if item.kind == "image" or not item.total_frames or not item.fps:
            return 1.0
        return self.video.temporal_patch_size / (item.num_frames / item.total_frames * item.fps)

    def _values(
        self, rows: Sequence[tuple[MediaKind, tuple[int, int, int], torch.Tensor, float]]
    ) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            own = [row for row in rows if row[0] == kind]
            if own:
                values[pixels] = torch.cat([row[2] for row in own])
                values[grids] = torch.tensor([row[1] for row in own], dtype=torch.int64)
                if kind == "video" and not self.run_per_tubelet:
                    values["second_per_grid_ts"] = torch.tensor([row[3] for row in own], dtype=torch.float32)
        return values

    def items_in(self, values: Mapping[str, torch.Tensor]) -> tuple[PackedItem, ...]:
        """Images or clips; of both together the order is not in the tensors, so () is returned."""
        kinds: list[tuple[MediaKind, str]] = [("image", "image_grid_thw"), ("video", "video_grid_thw")]
        present = [(kind, values[key]) for kind, key in kinds if key in values]
        if len(present) != 1:
            return ()
        ((kind, grids),) = present
        side = self.image.patch_size
        return tuple(
            PackedItem(
                kind,
                Grid(height, width),
                (height * side, width * side),
                tubelets * self.video.temporal_patch_size if kind == "video" else 1,
            )
            for tubelets, height, width in grids.tolist()
        )

    def keys(self) -> Mapping[str, bool]:
        keys = ["pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"]
        return dict.fromkeys(keys if self.run_per_tubelet else [*keys, "second_per_grid_ts"], False)

    def join(self, rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return join_rows(rows, self.keys())

    def num_features(self, tensors: MediaTensors) -> int:
        grids = [tensors.values[key] for key in ("image_grid_thw", "video_grid_thw") if key in tensors.values]
        return sum(int(grid.prod(-1).sum()) for grid in grids) // self.image.merge_size**2

    def neutral(self, run_lengths: Sequence[int], grammars: Sequence[int] = ()) -> MediaTensors:
        """One blank item per run, of the run's own kind."""
        merge = self.image.merge_size
        rows: list[tuple[MediaKind, tuple[int, int, int], torch.Tensor, float]] = []
        for length, grammar in zip(run_lengths, grammars or [IMAGE] * len(run_lengths), strict=True):
            height = next(rows for rows in range(math.isqrt(length), 0, -1) if length % rows == 0)
            grid = Grid(height * merge, length // height * merge)
            resizer = self.video if grammar == VIDEO else self.image
            channels = 3 * resizer.temporal_patch_size * resizer.patch_size**2
            blank = torch.zeros(grid.num_patches, channels, dtype=self.dtype)
            rows.append(("video" if grammar == VIDEO else "image", (1, *grid), blank, 1.0))
        grids = tuple(Grid(height, width) for _, (_, height, width), *_ in rows)
        return MediaTensors(grids=grids, values=self._values(rows))

    def sequence(
        self, token_ids: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`mm_token_type_ids` int64 [tokens] (1 image, 2 video) and `position_ids` int64 [3, tokens], the engine's.

        Runs that the media do not fill in order, as in a row that is masked anyway, count as text from there on.
        """
        runs = find_all_runs(token_ids, self.grammars)
        types = torch.zeros(len(token_ids), dtype=torch.int64)
        for grammar, own in enumerate(self.grammars):
            types[token_ids == own.context_id] = grammar + 1
        return {
            "mm_token_type_ids": types,
            "position_ids": media_positions(len(token_ids), self._blocks(runs, values)),
        }

    def _blocks(self, runs: PlaceholderRuns, values: Mapping[str, torch.Tensor]) -> list[Block]:
        images = iter(values["image_grid_thw"].tolist() if "image_grid_thw" in values else ())
        clips = values["video_grid_thw"].tolist() if "video_grid_thw" in values else []
        seconds = (
            values["second_per_grid_ts"].tolist() if "second_per_grid_ts" in values else [1.0] * len(clips)
        )
        intervals = [1.0 if self.run_per_tubelet else second * self.tokens_per_second for second in seconds]
        if self.run_per_tubelet:
            videos = iter([((1, *grid[1:]), 1.0) for grid in clips for _ in range(grid[0])])
        else:
            videos = iter([(tuple(grid), step) for grid, step in zip(clips, intervals, strict=True)])
        blocks: list[Block] = []
        merge = self.image.merge_size
        for offset, length, grammar in zip(
            runs.offsets.tolist(), runs.lengths.tolist(), runs.grammars.tolist(), strict=True
        ):
            if not length:
                continue
            if grammar == IMAGE:
                grid, interval = next(images, None), 1.0
            else:
                grid, interval = next(videos, (None, 1.0))
            if grid is None:
                break
            tubelets, height, width = grid
            block = Block(offset, tubelets, height // merge, width // merge, interval)
            if block.num_tokens != length:
                break
            blocks.append(block)
        return blocks


def _listed(kinds: Sequence[str]) -> str:
    images, videos = kinds.count("image"), kinds.count("video")
    return f"{images} image{'s' * (images != 1)} and {videos} video{'s' * (videos != 1)}"


def _resizer(config: Mapping[str, Any], origin: str, *, over_all_frames: bool) -> SmartResizer:
    size = config.get("size") or {}
    limits = {**config, **{name: size[name] for name in ("shortest_edge", "longest_edge") if name in size}}
    return SmartResizer(
        patch_size=int(setting(config, origin, "patch_size")),
        merge_size=int(setting(config, origin, "merge_size")),
        min_pixels=int(setting(limits, origin, "min_pixels", "shortest_edge")),
        max_pixels=int(setting(limits, origin, "max_pixels", "longest_edge")),
        over_all_frames=over_all_frames,
        temporal_patch_size=int(config.get("temporal_patch_size") or 2),
    )


def from_pretrained(
    model_dir: str | Path, *, layout: Layout = Layout.NATIVE, dtype: torch.dtype = torch.float32
) -> QwenVLFamily:
    """Read a checkpoint directory's tokenizer and processor configurations; the layout is transformers' own."""
    model_dir = Path(model_dir)
    config = read_json(model_dir / "config.json")
    vocabulary, decoder = tokenizer_of(model_dir)
    image = processor_part(model_dir, "image")
    video = processor_part(model_dir, "video") or image
    return _family(vocabulary, decoder, config, image, video, str(model_dir), dtype)


def from_processor(
    processor: Any, *, layout: Layout = Layout.NATIVE, dtype: torch.dtype = torch.float32
) -> QwenVLFamily:
    """Read a live transformers processor. It does not carry `tokens_per_second`, which is 2 in released checkpoints."""
    older = "Qwen2_5" in type(processor).__name__
    config = {
        "model_type": MODEL_TYPES[0] if older else MODEL_TYPES[1],
        "vision_config": {"tokens_per_second": 2} if older else {},
    }
    return _family(
        processor.tokenizer.get_vocab(),
        decoder_of(processor.tokenizer),
        config,
        processor.image_processor.to_dict(),
        processor.video_processor.to_dict(),
        type(processor).__name__,
        dtype,
    )


def disagreement(model_dir: Path) -> str:
    """Nothing: both sides read one file."""
    return ""


def recognises(processor: Any) -> bool:
    """Whether a live processor is transformers' own of this family."""
    return type(processor).__name__ in ("Qwen2_5_VLProcessor", "Qwen3VLProcessor")


def _family(
    vocabulary: Mapping[str, int],
    decoder: Decoder,
    config: Mapping[str, Any],
    image: Mapping[str, Any],
    video: Mapping[str, Any],
    origin: str,
    dtype: torch.dtype,
) -> QwenVLFamily:
    start, end, image_pad, video_pad = token_ids(vocabulary, TOKENS, origin, "a Qwen-VL")
    older = str(config.get("model_type")) == "qwen2_5_vl"
    default = {"patch_size": 14 if older else 16, "merge_size": 2, "temporal_patch_size": 2}
    return QwenVLFamily(
        image_grammar=Grammar(start, image_pad, end),
        video_grammar=Grammar(start, video_pad, end),
        image=_resizer({**default, **image}, origin, over_all_frames=False),
        video=_resizer({**default, **video}, origin, over_all_frames=not older),
        run_per_tubelet=not older,
        tokens_per_second=float((config.get("vision_config") or {}).get("tokens_per_second", 1.0)),
        image_config=dict(image),
        video_config=dict(video),
        dtype=dtype,
        decoder=decoder,
    )
