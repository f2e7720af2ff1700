# SPDX-License-Identifier: Apache-2.0
"""Pixels on a given grid as processors of the field make them, most of all transformers' own.

The engine calls the same processors, which choose a grid by a budget; here the grid is known and the budget is not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nemo_rl_ext.align.grids import Array, Grid, Size


@functools.lru_cache(maxsize=16)
def _made(class_name: str, settings: str) -> Any:
    import transformers

    made = getattr(transformers, class_name, None)
    if made is None:
        raise ValueError(
            f"this transformers ({transformers.__version__}) has no {class_name}, which the checkpoint's processor "
            "configuration names; install a version that has it"
        )
    return made(**json.loads(settings))


def processor_of(config: Mapping[str, Any], kind: str, default_class: str) -> Any:
    """The `image` or `video` processor that a configuration describes; one object per configuration and process."""
    settings = {
        name: value for name, value in config.items() if not name.endswith(("processor_type", "_class"))
    }
    name = config.get(f"{kind}_processor_type") or default_class
    return _made(str(name).removesuffix("Fast"), json.dumps(settings, sort_keys=True, default=str))


def resized(processor: Any, frames: Array, size: Size) -> torch.Tensor:
    """uint8 RGB [frames, height, width, 3] resized as the processor does: [frames, 3, height, width]."""
    from transformers.image_processing_backends import TorchvisionBackend
    from transformers.image_utils import SizeDict

    planes = torch.from_numpy(frames.copy()).permute(0, 3, 1, 2).contiguous()
    done: torch.Tensor = TorchvisionBackend.resize(
        processor, planes, SizeDict(height=size[0], width=size[1]), resample=processor.resample
    )
    return done


def normalized(processor: Any, frames: torch.Tensor) -> torch.Tensor:
    """Resized frames as the processor rescales and normalises them, float32 of the same shape."""
    done: torch.Tensor = processor.rescale_and_normalize(
        frames,
        processor.do_rescale,
        processor.rescale_factor,
        processor.do_normalize,
        tuple(processor.image_mean),
        tuple(processor.image_std),
    )
    return done


def patches(processor: Any, frames: Array, grid: Grid, *, video: bool) -> torch.Tensor:
    """Patches [tubelets * patches, channels * temporal * patch * patch] of one image or clip on a grid, float32."""
    side = processor.patch_size
    pixels = normalized(processor, resized(processor, frames, (grid.height * side, grid.width * side)))
    cut = processor.patchify(
        pixels[None] if video else pixels[:1],
        patch_size=side,
        merge_size=processor.merge_size,
        temporal_patch_size=processor.temporal_patch_size,
    )
    values: torch.Tensor = cut[0][0]
    return values


def pillow_resized(frames: Array, size: Size, *, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Frames resized as Pillow does by default, then normalised: float32 [frames, 3, height, width].

    The order of `image_to_pixel_values_internvl` (vllm/transformers_utils/processors/internvl.py): bicubic on bytes,
    `/ 255`, `- mean`, `/ std`.
    """
    from PIL import Image

    pictures = [np.asarray(Image.fromarray(frame).resize((size[1], size[0]))) for frame in frames]
    planes = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous().float().div(255)
    return planes.sub_(torch.tensor(mean).reshape(1, 3, 1, 1)).div_(torch.tensor(std).reshape(1, 3, 1, 1))
