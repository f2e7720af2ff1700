# SPDX-License-Identifier: Apache-2.0
"""Nemotron VL: `<img>` + N x `<image>` + `</img>`, dynamic resolution, two tensor layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_rl_ext.align.families.checkpoint import (
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
from nemo_rl_ext.align.families.fixed_tile import FixedTileFamily
from nemo_rl_ext.align.fixed_tiles import FixedTiler, uses_fixed_tiles
from nemo_rl_ext.align.grids import RESERVED_TOKENS, Array, DynamicTiler, Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.limits import ANY, Limits
from nemo_rl_ext.align.pixels import neutral_grids, patchify, resize_and_normalize
from nemo_rl_ext.align.runs import Grammar, PlaceholderRuns
from nemo_rl_ext.align.shares import label_problem, share_runs
from nemo_rl_ext.align.timestamps import TubeletLabel, frame_indices, read_label, tubelet_texts
from nemo_rl_ext.align.verdict import Fault, MediaKind, Reason
from nemo_rl_ext.align.video_grids import VideoTiler

__all__ = ["Layout", "NemotronFamily"]

MAX_NUM_TILES = 12
"""Tiles of an image where neither checkpoint nor row says: `DEFAULT_NUM_TILES` of vLLM's processor."""
MODEL_TYPES = ("nemotron_h_omni", "NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3")
ARCHITECTURES = (
    "NemotronH_Nano_VL_V2",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
    "NemotronH_Omni_Reasoning_V3",
)

START_TOKEN, CONTEXT_TOKEN, END_TOKEN = "<img>", "<image>", "</img>"
VIDEO_PLACEHOLDER = "<video>"
LIMIT_PLACES: tuple[Mapping[str, tuple[tuple[str, ...], ...]], ...] = (
    {"config.json": (("vision_config", "args", "max_num_patches"),)},
    {
        "preprocessor_config.json": (("max_num_patches",),),
        "processor_config.json": (("image_processor", "max_num_patches"),),
    },
)
"""The engine reads the first file, the trainer's processor one of the others."""


@dataclass(frozen=True, kw_only=True)
class NemotronFamily:
    """The Nemotron Nano/Super VL and Omni models.

    In `Layout.REMOTE` a turn has `pixel_values` [images, 3, Hmax, Wmax], `imgs_sizes` int32 [images, 2] (height, width)
    in pixels and `num_frames` int64 [images]. In `Layout.NATIVE` it has `pixel_values` [patches, 3 * patch_size**2]
    and `image_grid_hw` int64 [images, 2] (height, width) in patches; with videos the items stand in prompt order in
    the same two tensors, a clip frame by frame, and `num_frames` int64 [items] counts each clip's frames, 0 for an
    image.

    `processor_max_model_len` is the context length that the training side's image processor budgets with; it caps
    every image of a call on its own, unlike the engine's, which all images of a request share.
    """

    grammar: Grammar
    tiler: DynamicTiler
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    processor_max_model_len: int = 0
    layout: Layout = Layout.REMOTE
    dtype: torch.dtype = torch.float32
    video: VideoTiler | None = None
    decoder: Callable[[Sequence[int]], str] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_pretrained(
        cls, model_dir: str | Path, *, layout: Layout = Layout.REMOTE, dtype: torch.dtype = torch.float32
    ) -> NemotronFamily:
        """Read a checkpoint directory's tokenizer and image processor configuration; no weights, no code of its own.

        The released checkpoints without dynamic resolution are another family (`fixed_tile`).

        Raises:
            ValueError: when a file is missing or lacks a value, naming both.
        """
        model_dir = Path(model_dir)
        vocabulary, decoder = tokenizer_of(model_dir)
        family = cls._from_parts(
            vocabulary, processor_part(model_dir, "image"), str(model_dir), layout, dtype
        )
        return dataclasses.replace(
            family, decoder=decoder, video=_video_tiler(read_json(model_dir / "config.json"), family.tiler)
        )

    @classmethod
    def from_processor(
        cls,
        processor: Any,
        *,
        layout: Layout = Layout.REMOTE,
        dtype: torch.dtype = torch.float32,
        video: VideoTiler | None = None,
    ) -> NemotronFamily:
        """Read a live transformers processor (`tokenizer` and `image_processor`), remote code or native.

        Released processors do not carry the video settings; without `video` no clip can be aligned.
        """
        image_processor = getattr(processor, "image_processor", processor)
        names = ("patch_size", "min_num_patches", "max_num_patches", "max_model_len", "downsample_ratio")
        config = {name: getattr(image_processor, name) for name in names if hasattr(image_processor, name)}
        for short in ("mean", "std"):
            value = getattr(image_processor, f"norm_{short}", None)
            value = getattr(image_processor, f"image_{short}", None) if value is None else value
            if value is not None:
                config[f"norm_{short}"] = [float(number) for number in value]
        family = cls._from_parts(
            processor.tokenizer.get_vocab(), config, type(processor).__name__, layout, dtype
        )
        return dataclasses.replace(
            family,
            video=video,
            decoder=decoder_of(processor.tokenizer),
        )

    @classmethod
    def _from_parts(
        cls,
        vocabulary: Mapping[str, int],
        config: Mapping[str, Any],
        origin: str,
        layout: Layout,
        dtype: torch.dtype,
    ) -> NemotronFamily:
        start, context, end = token_ids(
            vocabulary, (START_TOKEN, CONTEXT_TOKEN, END_TOKEN), origin, "a Nemotron VL"
        )

        def read(*names: str) -> Any:
            return setting(config, origin, *names)

        return cls(
            grammar=Grammar(start, context, end),
            tiler=DynamicTiler(
                patch_size=int(read("patch_size")),
                merge_size=round(1 / float(config.get("downsample_ratio", 0.5))),
                min_num_patches=int(read("min_num_patches")),
                max_num_patches=int(read("max_num_patches")),
            ),
            mean=triple(read("norm_mean", "image_mean")),
            std=triple(read("norm_std", "image_std")),
            processor_max_model_len=int(config.get("max_model_len") or 0),
            layout=layout,
            dtype=dtype,
        )

    @property
    def grammars(self) -> tuple[Grammar, ...]:
        return (self.grammar,)

    @property
    def sizer(self) -> DynamicTiler:
        return self.tiler

    def served_with(self, arguments: Mapping[str, Any]) -> NemotronFamily:
        """Itself: vLLM refuses limits that a request or an engine is given beside the checkpoint's."""
        refuse_arguments(arguments, known=())
        return self

    def placeholders(self) -> tuple[str, ...]:
        return CONTEXT_TOKEN, VIDEO_PLACEHOLDER

    def marker(self, kind: MediaKind) -> str:
        return VIDEO_PLACEHOLDER if kind == "video" else CONTEXT_TOKEN

    def written(self, item: MediaItem) -> Written:
        if item.kind == "image":
            return Written((), 2)
        texts = tubelet_texts(item.frame_indices, item.fps, self.frames_per_tubelet())
        return Written(texts, 2 * len(texts))

    @property
    def merge_size(self) -> int:
        return self.tiler.merge_size

    def decode(self, token_ids: Sequence[int]) -> str | None:
        return self.decoder(token_ids) if self.decoder is not None else None

    def frames_per_tubelet(self) -> int:
        return self.video.temporal_patch_size if self.video is not None else 1

    def _video(self) -> VideoTiler:
        if self.video is None:
            raise ValueError(
                "a video came up, but the family has no video settings (target patches, temporal patch size): give "
                "NemotronFamily a VideoTiler"
            )
        return self.video

    def num_tubelets(self, item: MediaItem) -> int:
        return self._video().num_tubelets(item.num_frames) if item.kind == "video" else 1

    def split(
        self, runs: PlaceholderRuns, texts: Sequence[str] | None, items: Sequence[MediaItem]
    ) -> list[Seen] | Fault:
        """One run per image, one labelled run per tubelet of a video."""
        labels = [read_label(text) for text in texts] if texts is not None else None
        counts = [self.num_tubelets(item) for item in items]
        shares = share_runs(runs.lengths.tolist(), labels, items, counts)
        if isinstance(shares, str):
            videos = any(item.kind == "video" for item in items)
            return Fault(Reason.TUBELET_COUNT if videos else Reason.RUN_COUNT, shares)
        return [Seen(lengths=share.lengths, labels=share.labels) for share in shares]

    def static(self, items: Sequence[MediaItem]) -> tuple[Geometry, ...]:
        grids = self.static_grids(items)
        return tuple(Geometry(grid, self.num_tubelets(item)) for grid, item in zip(grids, items, strict=True))

    def run_lengths(self, geometry: Geometry, kind: MediaKind) -> tuple[int, ...]:
        return (self.num_tokens(geometry.grid),) * geometry.tubelets

    def frames(self, item: MediaItem, seen: Seen, hint: Sequence[int]) -> tuple[int, ...] | Fault | None:
        """The frames at the times that the engine wrote before each tubelet."""
        labels = [label for label in seen.labels if isinstance(label, TubeletLabel)]
        if not labels:
            return None
        if item.kind == "image":
            return Fault(Reason.TUBELET_COUNT, "the text before its run names the frames of a video")
        if problem := label_problem(labels, self.frames_per_tubelet()):
            return Fault(Reason.TUBELET_COUNT, problem)
        times = [time for label in labels for time in label.times]
        frames = frame_indices(times, item.fps, hint=hint or item.frame_indices)
        if frames is None or (item.total_frames and max(frames) >= item.total_frames):
            clip = f"a clip of {item.total_frames} frames at {item.fps:g} per second"
            return Fault(
                Reason.FRAME_TIMES, f"the times {times[0]} to {times[-1]} s are not frames of {clip}"
            )
        if frames != item.frame_indices and list(frames) != sorted(frames):
            return Fault(Reason.FRAME_TIMES, f"the times {', '.join(times[:6])} s run backwards")
        return frames

    def candidates(self, item: MediaItem, seen: Seen) -> tuple[Geometry, ...] | Fault:
        if len(seen.lengths) > 1 and len(set(seen.lengths)) != 1:
            return Fault(Reason.FRAME_GRID, "the tubelets' runs differ in length")
        tubelets = self.num_tubelets(item)
        if tubelets != len(seen.lengths):
            return ()
        return tuple(Geometry(grid, tubelets) for grid in self.feasible_grids(item, seen.lengths[0]))

    def limits(self, item: MediaItem, seen: Seen) -> tuple[Limits, ...]:
        return (ANY,)

    def most_tokens(self, item: MediaItem) -> int | None:
        return self.tiler.most_tokens(item.size) if item.kind == "image" else None

    def captured(self, item: MediaItem, values: Mapping[str, Any]) -> Geometry | None:
        """From `imgs_sizes` (height, width) in pixels of an image; a clip's tensors are large, their shape says it."""
        patch = self.tiler.patch_size
        if item.kind == "image":
            size = values.get("imgs_sizes")
            return Geometry(Grid(int(size[0]) // patch, int(size[1]) // patch)) if size is not None else None
        shape = values.get("pixel_values_flat_video")
        shape = shape.get("shape") if isinstance(shape, Mapping) else None
        if not shape or len(shape) != 4:
            return None
        grid = Grid(int(shape[2]) // patch, int(shape[3]) // patch)
        return Geometry(grid, self._video().num_tubelets(int(shape[0])))

    def shared_outcomes(self, sizes: Sequence[Size], max_tokens: int) -> Array | None:
        return self.tiler.shared_outcomes(sizes, max_tokens) if sizes else None

    def num_tokens(self, grid: Grid) -> int:
        return grid.num_tokens(self.merge_size)

    def static_grids(self, items: Sequence[MediaItem]) -> tuple[Grid, ...]:
        num_images = sum(item.kind == "image" for item in items)
        return tuple(
            self._video().static_grid(item.size)
            if item.kind == "video"
            else self.tiler.static_grid(item.size, self._static_budget(item.size, num_images))
            for item in items
        )

    def _static_budget(self, size: Size, num_images: int) -> int:
        """The training processor's budget for each image of a call, in patches."""
        if not self.processor_max_model_len:
            return self.tiler.own_budget(size)
        minimum, limit = self.tiler.min_num_patches, self.tiler.max_num_patches
        available = (self.processor_max_model_len - RESERVED_TOKENS) * self.merge_size**2
        available = max(available, minimum * num_images)
        return max(min(available, limit) if limit else available, minimum)

    def feasible_grids(self, item: MediaItem, num_tokens: int) -> tuple[Grid, ...]:
        tiler = self._video() if item.kind == "video" else self.tiler
        return tiler.feasible_grids(item.size, num_tokens)

    def joint_grids(self, sizes: Sequence[Size], max_model_len: int) -> tuple[Grid, ...] | None:
        return self.tiler.joint_grids(sizes, max_model_len - RESERVED_TOKENS)

    def render(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        """One item: [frames, 3, height, width] in the remote layout (an image without the first dimension),
        [frames * patches, 3 * patch_size**2] in the native one."""
        video = item.kind == "video"
        pixels = resize_and_normalize(
            item.pixels(),
            grid,
            patch_size=self.tiler.patch_size,
            mean=self.mean,
            std=self.std,
            dtype=self.dtype,
            skip_equal_size=video,
        )
        if self.layout is Layout.NATIVE:
            return patchify(pixels, self.tiler.patch_size)
        return pixels if video else pixels[0]

    def items_in(self, values: Mapping[str, torch.Tensor]) -> tuple[PackedItem, ...]:
        sizes, counts = values.get("imgs_sizes"), values.get("num_frames")
        grids, patch = values.get("image_grid_hw"), self.tiler.patch_size
        if grids is not None:
            frames = counts.tolist() if counts is not None else [0] * len(grids)
            return tuple(
                PackedItem(
                    "video" if count else "image",
                    Grid(height, width),
                    (height * patch, width * patch),
                    max(count, 1),
                )
                for (height, width), count in zip(grids.tolist(), frames, strict=True)
            )
        if sizes is None:
            return ()
        items: list[PackedItem] = []
        start = 0
        for count in counts.tolist() if counts is not None else [1] * len(sizes):
            height, width = (int(side) for side in sizes[start].tolist())
            grid = Grid(height // patch, width // patch)
            items.append(PackedItem("video" if count > 1 else "image", grid, (height, width), count))
            start += count
        return tuple(items)

    def keys(self) -> Mapping[str, bool]:
        if self.layout is Layout.NATIVE:
            return {"pixel_values": False, "image_grid_hw": False, "num_frames": False}
        return {"pixel_values": True, "imgs_sizes": False, "num_frames": False}

    def join(self, rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if self.layout is Layout.NATIVE and any("num_frames" in row for row in rows):
            # Only turns with a clip carry it; every item of the others is a still image.
            stills = [torch.zeros(len(row["image_grid_hw"]), dtype=torch.int64) for row in rows]
            rows = [{"num_frames": zeros, **row} for zeros, row in zip(stills, rows, strict=True)]
        return join_rows(rows, self.keys())

    def num_features(self, tensors: MediaTensors) -> int:
        return tensors.num_features(self.merge_size)

    def sequence(
        self, token_ids: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Nothing: positions count tokens, and the ids are those that are trained on."""
        return {}

    def pack(
        self, items: Sequence[MediaItem], grids: Sequence[Grid], rendered: Sequence[torch.Tensor]
    ) -> MediaTensors:
        runs = tuple(
            grid for item, grid in zip(items, grids, strict=True) for _ in range(self.num_tubelets(item))
        )
        if self.layout is Layout.REMOTE:
            frames = [tensor if tensor.ndim == 4 else tensor[None] for tensor in rendered]
            counts = [item.num_frames for item in items]
            return MediaTensors(grids=runs, values=self._remote(grids, frames, counts))
        values = {"pixel_values": _join(rendered), "image_grid_hw": torch.tensor(grids, dtype=torch.int64)}
        if any(item.kind == "video" for item in items):
            counts = [item.num_frames if item.kind == "video" else 0 for item in items]
            values["num_frames"] = torch.tensor(counts, dtype=torch.int64)
        return MediaTensors(grids=runs, values=values)

    def _remote(
        self, grids: Sequence[Grid], frames: Sequence[torch.Tensor], counts: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        height, width = (max(tensor.shape[axis] for tensor in frames) for axis in (2, 3))
        pixels = frames[0].new_zeros(sum(counts), 3, height, width)
        for target, tensor in zip(torch.split(pixels, list(counts)), frames, strict=True):
            target[:, :, : tensor.shape[2], : tensor.shape[3]] = tensor
        patch = self.tiler.patch_size
        sizes = [
            (grid.height * patch, grid.width * patch)
            for grid, count in zip(grids, counts, strict=True)
            for _ in range(count)
        ]
        return {
            "pixel_values": pixels,
            "imgs_sizes": torch.tensor(sizes, dtype=torch.int32),
            "num_frames": torch.tensor(counts, dtype=torch.int64),
        }

    def neutral(self, run_lengths: Sequence[int], grammars: Sequence[int] = ()) -> MediaTensors:
        grids = tuple(
            grid
            for length in run_lengths
            for grid in neutral_grids(
                length, merge_size=self.merge_size, max_num_patches=self.tiler.max_num_patches
            )
        )
        patch = self.tiler.patch_size
        blank = [
            torch.zeros(1, 3, grid.height * patch, grid.width * patch, dtype=self.dtype) for grid in grids
        ]
        if self.layout is Layout.REMOTE:
            return MediaTensors(grids=grids, values=self._remote(grids, blank, [1] * len(grids)))
        values = {
            "pixel_values": _join(patchify(image, patch) for image in blank),
            "image_grid_hw": torch.tensor(grids, dtype=torch.int64),
        }
        return MediaTensors(grids=grids, values=values)


def _join(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    rows = list(tensors)
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _video_tiler(config: Mapping[str, Any], tiler: DynamicTiler) -> VideoTiler | None:
    """The video settings of a checkpoint's vision configuration; None for a checkpoint that takes no video.

    A square `video_target_img_size` stands for the patches that cover it, as in vLLM's `NanoNemotronVLProcessor`.
    """
    vision = config.get("vision_config") or {}
    target = vision.get("video_target_num_patches")
    if target is None and vision.get("video_target_img_size") is not None:
        target = math.ceil(vision["video_target_img_size"] / tiler.patch_size) ** 2
    if target is None:
        return None
    return VideoTiler(
        patch_size=tiler.patch_size,
        merge_size=tiler.merge_size,
        target_num_patches=int(target),
        maintain_aspect_ratio=bool(vision.get("video_maintain_aspect_ratio", False)),
        temporal_patch_size=int(vision.get("video_temporal_patch_size", 1)),
    )


def disagreement(model_dir: Path) -> str:
    """What engine and trainer read differently of a checkpoint's limits; empty where they agree."""
    sizer = from_pretrained(model_dir).sizer
    if not isinstance(sizer, DynamicTiler):
        return ""
    args = (read_json(model_dir / "config.json").get("vision_config") or {}).get("args") or {}
    return "; ".join(
        f"config.json has {key} {args[key]}, the image processor {getattr(sizer, key)}"
        for key in ("min_num_patches", "max_num_patches")
        if key in args and (args[key] or 0) != getattr(sizer, key)
    )


def sized_family(
    *, min_num_patches: int = 1024, max_num_patches: int = 13312, video: VideoTiler | None = None
) -> NemotronFamily:
    """A family for numbers alone, no checkpoint at hand; by default with the released limits."""
    return NemotronFamily(
        grammar=Grammar(0, 1, 2),
        tiler=DynamicTiler(16, 2, min_num_patches, max_num_patches),
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        video=video or VideoTiler(16, 2, 1024, True, 2),
    )


def recognises(processor: Any) -> bool:
    """Whether a live processor is one of this family's: patch limits per image, and the family's media tokens."""
    part = getattr(processor, "image_processor", processor)
    limits = all(hasattr(part, name) for name in ("min_num_patches", "max_num_patches", "patch_size"))
    return limits and CONTEXT_TOKEN in processor.tokenizer.get_vocab()


def from_pretrained(
    model_dir: str | Path, *, layout: Layout = Layout.REMOTE, dtype: torch.dtype = torch.float32
) -> NemotronFamily | FixedTileFamily:
    """The family of a checkpoint with dynamic resolution, or with fixed tiles where it has no patch limits."""
    config = read_json(Path(model_dir) / "config.json")
    if uses_fixed_tiles(config):
        return fixed_tile_family(Path(model_dir), config, dtype)
    return NemotronFamily.from_pretrained(model_dir, layout=layout, dtype=dtype)


def fixed_tile_family(model_dir: Path, config: Mapping[str, Any], dtype: torch.dtype) -> FixedTileFamily:
    """From config.json alone: such checkpoints have no image processor of their own in the engine."""
    vocabulary, decoder = tokenizer_of(model_dir)
    origin = str(model_dir / "config.json")
    start, context, end = token_ids(
        vocabulary, (START_TOKEN, CONTEXT_TOKEN, END_TOKEN), str(model_dir), "a Nemotron VL"
    )
    return FixedTileFamily(
        grammar=Grammar(start, context, end),
        tiler=FixedTiler(
            tile_size=int(setting(config, origin, "force_image_size")),
            patch_size=int(setting(config, origin, "patch_size")),
            merge_size=round(1 / float(setting(config, origin, "downsample_ratio"))),
            max_num_tiles=MAX_NUM_TILES,
            use_thumbnail=bool(setting(config, origin, "use_thumbnail")),
        ),
        mean=triple(setting(config, origin, "norm_mean")),
        std=triple(setting(config, origin, "norm_std")),
        dtype=dtype,
        decoder=decoder,
    )


from_processor = NemotronFamily.from_processor
