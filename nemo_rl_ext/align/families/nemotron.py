# SPDX-License-Identifier: Apache-2.0
"""Nemotron VL: `<img>` + N x `<image>` + `</img>`, dynamic resolution, two tensor layouts."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.align.grids import DynamicTiler, Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.pixels import neutral_grids, patchify, resize_and_normalize
from nemo_rl_ext.align.runs import Grammar
from nemo_rl_ext.align.video_grids import VideoTiler

START_TOKEN, CONTEXT_TOKEN, END_TOKEN = "<img>", "<image>", "</img>"
RESERVED_TOKENS = 4
"""Context tokens that the engine's processor sets aside before it shares the rest among the images."""


class Layout(enum.Enum):
    """How the training side wants its media."""

    REMOTE = "remote"
    """Released checkpoints' own processors, as NeMo-RL feeds them: `pixel_values` [images, 3, Hmax, Wmax],
    `imgs_sizes` int32 [images, 2] (height, width) in pixels, `num_frames` int64 [images]."""
    NATIVE = "native"
    """transformers' `nemotron_h_omni`: `pixel_values` [patches, 3 * patch_size**2] and `image_grid_hw` int64
    [images, 2] (height, width) in patches. With videos the items of a turn stand in prompt order in the same two
    tensors, a clip frame by frame, and `num_frames` int64 [items] counts each clip's frames, 0 for an image."""


@dataclass(frozen=True, kw_only=True)
class NemotronFamily:
    """The Nemotron Nano/Super VL and Omni models.

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

        Raises:
            ValueError: when a file is missing or lacks a value, naming both.
        """
        model_dir = Path(model_dir)
        vocabulary, decoder = _tokenizer(model_dir)
        family = cls._from_parts(
            vocabulary, _read_json(model_dir / "preprocessor_config.json"), str(model_dir), layout, dtype
        )
        return dataclasses.replace(
            family, decoder=decoder, video=_video_tiler(_read_json(model_dir / "config.json"), family.tiler)
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
            decoder=lambda ids: processor.tokenizer.decode(list(ids), skip_special_tokens=False),
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
        missing = [token for token in (START_TOKEN, CONTEXT_TOKEN, END_TOKEN) if token not in vocabulary]
        if missing:
            raise ValueError(
                f"{origin}: the tokenizer has no {', '.join(missing)}; a Nemotron VL checkpoint is expected, whose "
                f"tokenizer knows {START_TOKEN}, {CONTEXT_TOKEN} and {END_TOKEN}"
            )

        def read(*names: str) -> Any:
            for name in names:
                if config.get(name) is not None:
                    return config[name]
            raise ValueError(
                f"{origin}: the image processor configuration has no {' or '.join(names)}; it has "
                f"{', '.join(sorted(config))}"
            )

        return cls(
            grammar=Grammar(*(vocabulary[token] for token in (START_TOKEN, CONTEXT_TOKEN, END_TOKEN))),
            tiler=DynamicTiler(
                patch_size=int(read("patch_size")),
                merge_size=round(1 / float(config.get("downsample_ratio", 0.5))),
                min_num_patches=int(read("min_num_patches")),
                max_num_patches=int(read("max_num_patches")),
            ),
            mean=tuple(read("norm_mean", "image_mean")),
            std=tuple(read("norm_std", "image_std")),
            processor_max_model_len=int(config.get("max_model_len") or 0),
            layout=layout,
            dtype=dtype,
        )

    @property
    def merge_size(self) -> int:
        return self.tiler.merge_size

    def decode(self, token_ids: Sequence[int]) -> str | None:
        return self.decoder(token_ids) if self.decoder is not None else None

    def frames_per_tubelet(self) -> int:
        return self._video().temporal_patch_size

    def _video(self) -> VideoTiler:
        if self.video is None:
            raise ValueError(
                "a video came up, but the family has no video settings (target patches, temporal patch size): give "
                "NemotronFamily a VideoTiler"
            )
        return self.video

    def num_runs(self, item: MediaItem) -> int:
        return self._video().num_tubelets(item.num_frames) if item.kind == "video" else 1

    def num_tokens(self, grid: Grid) -> int:
        return grid.num_tokens(self.merge_size)

    def static_grids(self, items: Sequence[MediaItem]) -> tuple[Grid, ...]:
        num_images = sum(item.kind == "image" for item in items)
        return tuple(
            self._video().static_grid(item.size)
            if item.kind == "video"
            else self.tiler.grid(item.size, self._static_budget(item.size, num_images))
            for item in items
        )

    def _static_budget(self, size: Size, num_images: int) -> int:
        """The training processor's budget for each image of a call, in patches."""
        if not self.processor_max_model_len:
            return self.tiler.max_budget(size)
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

    def pack(
        self, items: Sequence[MediaItem], grids: Sequence[Grid], rendered: Sequence[torch.Tensor]
    ) -> MediaTensors:
        runs = tuple(
            grid for item, grid in zip(items, grids, strict=True) for _ in range(self.num_runs(item))
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
        for target, tensor in zip(pixels.split(list(counts)), frames, strict=True):
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

    def neutral(self, run_lengths: Sequence[int]) -> MediaTensors:
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


def _tokenizer(model_dir: Path) -> tuple[Mapping[str, int], Callable[[Sequence[int]], str]]:
    """Token -> id and a decoder, from tokenizer.json where there is one, else through transformers."""
    path = model_dir / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
    if not model_dir.is_dir():
        raise ValueError(
            f"{model_dir} is not a directory; a checkpoint directory with a tokenizer is expected"
        )
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    return slow.get_vocab(), lambda ids: slow.decode(list(ids), skip_special_tokens=False)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing; a checkpoint directory with its processor files is expected"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
