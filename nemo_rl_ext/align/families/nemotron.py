# SPDX-License-Identifier: Apache-2.0
"""Nemotron VL: `<img>` + N x `<image>` + `</img>`, dynamic resolution, two tensor layouts."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.align.grids import DynamicTiler, Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.pixels import neutral_grids, patchify, resize_and_normalize
from nemo_rl_ext.align.runs import Grammar

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
    [images, 2] (height, width) in patches."""


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

    @classmethod
    def from_pretrained(
        cls, model_dir: str | Path, *, layout: Layout = Layout.REMOTE, dtype: torch.dtype = torch.float32
    ) -> NemotronFamily:
        """Read a checkpoint directory's tokenizer and image processor configuration; no weights, no code of its own.

        Raises:
            ValueError: when a file is missing or lacks a value, naming both.
        """
        model_dir = Path(model_dir)
        vocabulary = _vocabulary(model_dir)
        return cls._from_parts(
            vocabulary, _read_json(model_dir / "preprocessor_config.json"), str(model_dir), layout, dtype
        )

    @classmethod
    def from_processor(
        cls, processor: Any, *, layout: Layout = Layout.REMOTE, dtype: torch.dtype = torch.float32
    ) -> NemotronFamily:
        """Read a live transformers processor (`tokenizer` and `image_processor`), remote code or native."""
        image_processor = getattr(processor, "image_processor", processor)
        names = ("patch_size", "min_num_patches", "max_num_patches", "max_model_len", "downsample_ratio")
        config = {name: getattr(image_processor, name) for name in names if hasattr(image_processor, name)}
        for short in ("mean", "std"):
            value = getattr(image_processor, f"norm_{short}", None)
            value = getattr(image_processor, f"image_{short}", None) if value is None else value
            if value is not None:
                config[f"norm_{short}"] = [float(number) for number in value]
        return cls._from_parts(processor.tokenizer.get_vocab(), config, type(processor).__name__, layout, dtype)

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

    def num_runs(self, item: MediaItem) -> int:
        return 1

    def static_grids(self, items: Sequence[MediaItem]) -> tuple[Grid, ...]:
        budgets = (self._static_budget(item.size, len(items)) for item in items)
        return tuple(self.tiler.grid(item.size, budget) for item, budget in zip(items, budgets, strict=True))

    def _static_budget(self, size: Size, num_images: int) -> int:
        """The training processor's budget for each image of a call, in patches."""
        if not self.processor_max_model_len:
            return self.tiler.max_budget(size)
        minimum, limit = self.tiler.min_num_patches, self.tiler.max_num_patches
        available = (self.processor_max_model_len - RESERVED_TOKENS) * self.merge_size**2
        available = max(available, minimum * num_images)
        return max(min(available, limit) if limit else available, minimum)

    def feasible_grids(self, item: MediaItem, num_tokens: int) -> tuple[Grid, ...]:
        return self.tiler.feasible_grids(item.size, num_tokens)

    def joint_grids(self, sizes: Sequence[Size], max_model_len: int) -> tuple[Grid, ...] | None:
        return self.tiler.joint_grids(sizes, max_model_len - RESERVED_TOKENS)

    def render(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        """One image: [3, height, width] in the remote layout, [patches, 3 * patch_size**2] in the native one."""
        pixels = resize_and_normalize(
            item.pixels()[:1],
            grid,
            patch_size=self.tiler.patch_size,
            mean=self.mean,
            std=self.std,
            dtype=self.dtype,
        )
        return patchify(pixels, self.tiler.patch_size) if self.layout is Layout.NATIVE else pixels[0]

    def pack(self, items: Sequence[MediaItem], grids: Sequence[Grid], rendered: Sequence[torch.Tensor]) -> MediaTensors:
        del items
        return self._pack(tuple(grids), rendered)

    def _pack(self, grids: tuple[Grid, ...], rendered: Sequence[torch.Tensor]) -> MediaTensors:
        if self.layout is Layout.NATIVE:
            pixels = torch.cat(list(rendered)) if len(rendered) > 1 else rendered[0]
            values = {"pixel_values": pixels, "image_grid_hw": torch.tensor(grids, dtype=torch.int64)}
            return MediaTensors(grids=grids, values=values)
        height, width = (max(image.shape[axis] for image in rendered) for axis in (1, 2))
        pixels = rendered[0].new_zeros(len(rendered), 3, height, width)
        for row, image in zip(pixels, rendered, strict=True):
            row[:, : image.shape[1], : image.shape[2]] = image
        patch = self.tiler.patch_size
        return MediaTensors(
            grids=grids,
            values={
                "pixel_values": pixels,
                "imgs_sizes": torch.tensor([(g.height * patch, g.width * patch) for g in grids], dtype=torch.int32),
                "num_frames": torch.ones(len(grids), dtype=torch.int64),
            },
        )

    def neutral(self, run_lengths: Sequence[int]) -> MediaTensors:
        grids = tuple(
            grid
            for length in run_lengths
            for grid in neutral_grids(length, merge_size=self.merge_size, max_num_patches=self.tiler.max_num_patches)
        )
        patch = self.tiler.patch_size
        blank = [torch.zeros(1, 3, g.height * patch, g.width * patch, dtype=self.dtype) for g in grids]
        if self.layout is Layout.NATIVE:
            return self._pack(grids, [patchify(image, patch) for image in blank])
        return self._pack(grids, [image[0] for image in blank])


def _vocabulary(model_dir: Path) -> Mapping[str, int]:
    """Token -> id, from tokenizer.json where there is one, else through transformers."""
    path = model_dir / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    if not model_dir.is_dir():
        raise ValueError(f"{model_dir} is not a directory; a checkpoint directory with a tokenizer is expected")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True).get_vocab()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; a checkpoint directory with its processor files is expected") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
