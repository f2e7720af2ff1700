# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids with their media, as one padded batch for the policy's forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

TokenSet = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyMedia:
    """Pixels of some images and videos in transformers' `nemotron_h_omni` layout, in prompt order.

    `pixel_values` is `[num_patches, 3 * patch_size**2]`, the items one after the other, a clip frame by frame;
    `image_grid_hw` is `[num_items, 2] (height, width)` in patches. `num_frames` is `[num_items]`: the frames of
    a clip, 0 for a still image; None where all are images.
    """

    pixel_values: torch.Tensor
    image_grid_hw: torch.Tensor
    num_frames: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyRow:
    """One conversation: prompt, sampled tokens, and media in prompt order.

    `token_ids` is `[tokens]`. `sampled` is `[tokens]` bool, true where the policy drew the token (None: no
    token is singled out). `allowed_token_ids` is the set that the engine drew from (None: the vocabulary).
    Rows that share media share the `PolicyMedia` objects; the forward then encodes them once.
    """

    token_ids: np.ndarray | torch.Tensor | Sequence[int]
    media: tuple[PolicyMedia, ...] = ()
    sampled: np.ndarray | torch.Tensor | Sequence[bool] | None = None
    allowed_token_ids: TokenSet | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyBatch:
    """Padded rows. Padding may stand on either side; each row is true in one block of `attention_mask`."""

    input_ids: torch.Tensor
    """Token ids, int64 `[batch, seq]`."""
    attention_mask: torch.Tensor
    """True on real tokens, bool `[batch, seq]`."""
    pixel_values: torch.Tensor | None = None
    """Patches of all images, `[num_patches, 3 * patch_size**2]`."""
    image_grid_hw: torch.Tensor | None = None
    """Patch grids `(height, width)`, int64 `[num_images, 2]`."""
    num_frames: torch.Tensor | None = None
    """Frames of each item that is a clip, 0 for a still image, int64 `[num_images]`; None: all are images. What
    is said of images here holds for clips too."""
    images_per_row: tuple[int, ...] = ()
    """Images in each row, in prompt order; empty means that no row has any."""
    image_index: torch.Tensor | None = None
    """Which image of `image_grid_hw` each image of each row is, int64 `[sum(images_per_row)]`. None: each is
    its own, in order. Rows that share an image name the same index."""
    sampled_mask: torch.Tensor | None = None
    """True at position i when token i + 1 was sampled, bool `[batch, seq - 1]`; log-probs elsewhere are 0."""
    allowed_token_ids: tuple[TokenSet | None, ...] = ()
    """Per row the ids that could be sampled (None: all); empty means no row was restricted."""

    _patch_offsets: tuple[int, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 2 or self.attention_mask.shape != self.input_ids.shape:
            raise ValueError(
                f"expected input_ids and attention_mask of one shape [batch, seq], found "
                f"{tuple(self.input_ids.shape)} and {tuple(self.attention_mask.shape)}"
            )
        rows, seq = self.input_ids.shape
        for name in ("images_per_row", "allowed_token_ids"):
            value = getattr(self, name)
            if value and len(value) != rows:
                raise ValueError(f"{name}: expected one entry per row ({rows}), found {len(value)}")
        if self.sampled_mask is not None and self.sampled_mask.shape != (rows, seq - 1):
            raise ValueError(
                f"sampled_mask: expected [{rows}, {seq - 1}], found {tuple(self.sampled_mask.shape)}"
            )
        if (self.pixel_values is None) != (self.image_grid_hw is None):
            raise ValueError("pixel_values and image_grid_hw come together: one of them is missing")
        num_uses = sum(self.images_per_row)
        if self.image_grid_hw is None or self.pixel_values is None:
            if num_uses:
                raise ValueError(f"images_per_row names {num_uses} images but there are no pixel_values")
            return
        patches = self.image_grid_hw.prod(-1)
        if self.num_frames is not None:
            patches = patches * self.num_frames.clamp(min=1)
        if int(patches.sum()) != self.pixel_values.shape[0]:
            raise ValueError(
                f"pixel_values hold {self.pixel_values.shape[0]} patches but image_grid_hw describes "
                f"{int(patches.sum())}"
            )
        num_indexed = len(self.image_grid_hw) if self.image_index is None else len(self.image_index)
        if num_indexed != num_uses:
            raise ValueError(f"images_per_row names {num_uses} images, but {num_indexed} are given")
        object.__setattr__(self, "_patch_offsets", (0, *patches.cumsum(0).tolist()))

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, start: int, stop: int) -> PolicyBatch:
        """Rows `start` to `stop` with the images they use, each once; the padded length stays."""
        pixel_values = image_grid_hw = image_index = num_frames = None
        counts = self.images_per_row[start:stop]
        if sum(counts) and self.pixel_values is not None and self.image_grid_hw is not None:
            first = sum(self.images_per_row[:start])
            wanted = slice(first, first + sum(counts))
            uses = torch.arange(len(self.image_grid_hw)) if self.image_index is None else self.image_index
            kept, image_index = torch.unique(uses[wanted], return_inverse=True)
            image_grid_hw = self.image_grid_hw[kept]
            num_frames = None if self.num_frames is None else self.num_frames[kept]
            at = self._patch_offsets
            pixel_values = torch.cat([self.pixel_values[at[i] : at[i + 1]] for i in kept.tolist()])
        return PolicyBatch(
            input_ids=self.input_ids[start:stop],
            attention_mask=self.attention_mask[start:stop],
            pixel_values=pixel_values,
            image_grid_hw=image_grid_hw,
            num_frames=num_frames,
            images_per_row=counts,
            image_index=image_index,
            sampled_mask=None if self.sampled_mask is None else self.sampled_mask[start:stop],
            allowed_token_ids=self.allowed_token_ids[start:stop],
        )

    def micro_batches(self, size: int) -> Iterator[tuple[slice, PolicyBatch]]:
        """Batches of at most `size` rows, each with the slice of rows that it holds."""
        if size < 1:
            raise ValueError(f"micro-batch size: expected at least 1, found {size}")
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            yield slice(start, stop), self.rows(start, stop)


def collate(rows: Sequence[PolicyRow], *, pad_token_id: int) -> PolicyBatch:
    """Right-pad rows into one batch. Media objects that several rows hold appear once.

    Raises ValueError for an empty batch or row, or when a mask does not fit its tokens.
    """
    if not rows:
        raise ValueError("cannot collate an empty batch: expected at least one row")
    ids = [torch.as_tensor(row.token_ids, dtype=torch.int64).reshape(-1) for row in rows]
    lengths = [len(row) for row in ids]
    if min(lengths) < 1:
        raise ValueError(f"row {lengths.index(0)} has no tokens")
    seq = max(lengths)
    input_ids = torch.full((len(rows), seq), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(rows), seq), dtype=torch.bool)
    masks = torch.zeros((len(rows), seq - 1), dtype=torch.bool)
    for i, (row, tokens) in enumerate(zip(rows, ids, strict=True)):
        input_ids[i, : len(tokens)] = tokens
        attention_mask[i, : len(tokens)] = True
        if row.sampled is not None:
            sampled = torch.as_tensor(row.sampled, dtype=torch.bool).reshape(-1)
            if len(sampled) != len(tokens):
                raise ValueError(
                    f"row {i}: the sampled mask has {len(sampled)} entries for {len(tokens)} tokens"
                )
            masks[i, : len(tokens) - 1] = sampled[1:]

    first_image: dict[int, int] = {}
    unique: list[PolicyMedia] = []
    image_index: list[int] = []
    images_per_row: list[int] = []
    num_images = 0
    for row in rows:
        images_per_row.append(sum(len(media.image_grid_hw) for media in row.media))
        for media in row.media:
            if id(media) not in first_image:
                first_image[id(media)] = num_images
                unique.append(media)
                num_images += len(media.image_grid_hw)
            first = first_image[id(media)]
            image_index.extend(range(first, first + len(media.image_grid_hw)))
    grids = [media.image_grid_hw.to(torch.int64) for media in unique]
    return PolicyBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        pixel_values=torch.cat([media.pixel_values for media in unique]) if num_images else None,
        image_grid_hw=torch.cat(grids) if num_images else None,
        num_frames=_num_frames(unique),
        images_per_row=tuple(images_per_row),
        image_index=torch.tensor(image_index, dtype=torch.int64) if num_images else None,
        sampled_mask=masks if any(row.sampled is not None for row in rows) else None,
        allowed_token_ids=(
            tuple(row.allowed_token_ids for row in rows)
            if any(row.allowed_token_ids is not None for row in rows)
            else ()
        ),
    )


def _num_frames(media: Sequence[PolicyMedia]) -> torch.Tensor | None:
    """Frames of every item, 0 for images; None where there is no clip at all."""
    if all(item.num_frames is None for item in media):
        return None
    return torch.cat(
        [
            torch.zeros(len(item.image_grid_hw), dtype=torch.int64)
            if item.num_frames is None
            else item.num_frames
            for item in media
        ]
    )
