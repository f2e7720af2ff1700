# SPDX-License-Identifier: Apache-2.0
"""Media values of a message log: NeMo-RL's `PackedTensor` where it is installed, else one with its attributes."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nemo_rl_ext.rollout.stored import StoredTensor

PACKED_LAYOUT = {"pixel_values": True}
"""Keys whose tensors are padded to the largest shape before they are concatenated; all others need no padding."""


class PackedTensor:
    """Rows of tensors that are concatenated along `dim_to_pack` only when a forward needs them.

    `tensors` holds one tensor, or None for a row without this modality, per row. Copies and slices share the
    tensors: media are never written to after they are made.
    """

    def __init__(
        self,
        tensors: torch.Tensor | list[torch.Tensor | None],
        dim_to_pack: int,
        *,
        pad_to_max_shape: bool = False,
    ) -> None:
        self.tensors: list[torch.Tensor | None] = (
            [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        )
        if not self.tensors:
            raise ValueError("a packed tensor needs at least one row")
        self.dim_to_pack = dim_to_pack
        self.pad_to_max_shape = pad_to_max_shape

    def __len__(self) -> int:
        return len(self.tensors)

    def __deepcopy__(self, memo: dict[int, object]) -> PackedTensor:
        copied = PackedTensor(self.tensors, self.dim_to_pack, pad_to_max_shape=self.pad_to_max_shape)
        memo[id(self)] = copied
        return copied

    def slice(self, indices: Sequence[int]) -> PackedTensor:
        """The rows at `indices`, sharing their tensors."""
        rows = [self.tensors[index] for index in indices]
        return PackedTensor(rows, self.dim_to_pack, pad_to_max_shape=self.pad_to_max_shape)

    @classmethod
    def concat(cls, parts: Sequence[PackedTensor]) -> PackedTensor:
        """The rows of several values of one key, in order."""
        if len({(part.dim_to_pack, part.pad_to_max_shape) for part in parts}) != 1:
            raise ValueError("packed tensors of one key must agree in dim_to_pack and pad_to_max_shape")
        rows = [tensor for part in parts for tensor in part.tensors]
        return cls(rows, parts[0].dim_to_pack, pad_to_max_shape=parts[0].pad_to_max_shape)

    def as_tensor(self, device: torch.device | None = None) -> torch.Tensor | None:
        """All rows as one tensor, padded where asked; None when every row is empty."""
        rows = [row if device is None else row.to(device) for row in self.tensors if row is not None]
        if not rows:
            return None
        if self.pad_to_max_shape:
            rows = _pad_to_max_shape(rows, self.dim_to_pack)
        return torch.cat(rows, dim=self.dim_to_pack) if len(rows) > 1 else rows[0]


def _pad_to_max_shape(rows: list[torch.Tensor], dim_to_pack: int) -> list[torch.Tensor]:
    """Zero-pad every dimension but the packed one to the largest."""
    largest = [max(row.shape[axis] for row in rows) for axis in range(rows[0].ndim)]
    out = []
    for row in rows:
        shape = [row.shape[axis] if axis == dim_to_pack else largest[axis] for axis in range(row.ndim)]
        if shape != list(row.shape):
            padded = row.new_zeros(shape)
            padded[tuple(slice(0, side) for side in row.shape)] = row
            row = padded
        out.append(row)
    return out


@functools.cache
def packed_tensor_class() -> Any:
    """NeMo-RL's own class in a process that has NeMo-RL, so that its batching recognises our values."""
    if importlib.util.find_spec("nemo_rl") is None:
        return PackedTensor
    from nemo_rl.data.multimodal_utils import PackedTensor as NemoPackedTensor

    return NemoPackedTensor


def pack(key: str, tensor: torch.Tensor) -> Any:
    """Wrap one turn's tensor of a media key, which may be a stored one, for a message log."""
    packed = packed_tensor_class()(
        [tensor], 0, pad_to_max_shape=PACKED_LAYOUT.get(key, False) and tensor.ndim == 4
    )
    if isinstance(tensor, StoredTensor) and _knows_provenance(packed):
        packed._segment_provenance = [tensor.identity]
    return packed


def share_segments(messages: Iterable[Mapping[str, Any]]) -> None:
    """Let every media value of NeMo-RL's take part in sharing, once one of a batch may be a stored tensor.

    NeMo-RL joins the segments of a row without opening them only where all of them have a provenance, and refuses rows
    of which only some do (`PackedTensor.flattened_concat`). A value that has none gets one of its own.
    """
    for message in messages:
        for value in message.values():
            if is_packed(value) and _knows_provenance(value):
                value.enable_deduplication()


def _knows_provenance(packed: Any) -> bool:
    return hasattr(packed, "enable_deduplication")


def join_media(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The media values of several messages as those of one, in order; empty for none.

    Only media with a clip carry `num_frames` [items]; beside them an image has 0.
    """
    if any("num_frames" in part for part in parts):
        parts = [
            {"num_frames": torch.zeros(len(part["image_grid_hw"]), dtype=torch.int64), **part}
            for part in parts
        ]
    return {key: torch.cat([part[key] for part in parts]) for key in (parts[0] if parts else ())}


def is_packed(value: object) -> bool:
    """Whether a message-log value carries media."""
    return isinstance(value, (PackedTensor, packed_tensor_class()))
