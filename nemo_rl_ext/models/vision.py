# SPDX-License-Identifier: Apache-2.0
"""Images and clips of a batch through the vision tower, one tensor of features per item, in prompt order.

transformers 5.19's own forward takes no clips beside images (both use the image token) and raises a TypeError on
clips alone, so each modality is encoded by its own method and handed to the forward in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def encode_media(
    model: PreTrainedModel, pixel_values: torch.Tensor, grids: torch.Tensor, frames: torch.Tensor | None
) -> list[torch.Tensor]:
    """Features `[tokens, hidden]` of every item.

    `pixel_values` `[patches, 3 * patch_size**2]` holds the items one after the other, `grids` `[items, 2]` their
    (height, width) in patches, `frames` `[items]` the frames of a clip and 0 for an image; None: all are images.

    Raises ValueError when the grids describe another number of patches.
    """
    described = grids.prod(-1) * (1 if frames is None else frames.clamp(min=1))
    if int(described.sum()) != len(pixel_values):
        raise ValueError(
            f"pixel_values hold {len(pixel_values)} patches but image_grid_hw describes {int(described.sum())}"
        )
    if frames is None:
        return list(model.get_image_features(pixel_values, grids, return_dict=True).pooler_output)
    patches = pixel_values.split(described.tolist())
    still = [index for index, count in enumerate(frames.tolist()) if not count]
    features: dict[int, torch.Tensor] = {}
    if still:
        pixels = torch.cat([patches[index] for index in still])
        output = model.get_image_features(pixels, grids[still], return_dict=True).pooler_output
        features |= zip(still, output, strict=True)
    for index, count in enumerate(frames.tolist()):
        if count:
            clip = unpatchify(patches[index], count, *grids[index].tolist())
            output = model.get_video_features(clip, return_dict=True).pooler_output
            features[index] = output.reshape(-1, output.shape[-1])
    return [features[index] for index in range(len(patches))]


def unpatchify(patches: torch.Tensor, frames: int, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `align.pixels.patchify`.

    `[frames * rows * columns, 3 * patch_size**2]` becomes `[frames, 3, height, width]`.
    """
    patch = round((patches.shape[1] // 3) ** 0.5)
    pixels = patches.reshape(frames, rows, columns, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
    return pixels.reshape(frames, 3, rows * patch, columns * patch)
