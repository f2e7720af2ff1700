# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids with their media, as one padded batch for the policy's forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

TokenSet = tuple[int, ...]

MediaValues = Mapping[str, torch.Tensor]
"""The media of one message under the names of the model's inputs, items in prompt order.

In transformers' `nemotron_h_omni`: `pixel_values` `[num_patches, 3 * patch_size**2]`, the items one after the other, a
clip frame by frame; `image_grid_hw` `[num_items, 2] (height, width)` in patches; `num_frames` `[num_items]`, the frames
of a clip and 0 for an image, where there is a clip.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyRow:
    """One conversation: prompt, sampled tokens, and media in prompt order.

    `token_ids` is `[tokens]`. `sampled` is `[tokens]` bool, true where the policy drew the token (None: no
    token is singled out). `allowed_token_ids` is the set that the engine drew from (None: the vocabulary).
    Rows that share media share the tensors; the forward then encodes them once.
    """

    token_ids: np.ndarray | torch.Tensor | Sequence[int]
    media: tuple[MediaValues, ...] = ()
    sampled: np.ndarray | torch.Tensor | Sequence[bool] | None = None
    allowed_token_ids: TokenSet | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyBatch:
    """Padded rows. Padding may stand on either side; each row is true in one block of `attention_mask`."""

    input_ids: torch.Tensor
    """Token ids, int64 `[batch, seq]`."""
    attention_mask: torch.Tensor
    """True on real tokens, bool `[batch, seq]`."""
    media: tuple[MediaValues, ...] = ()
    """The media of all messages, each once."""
    media_of_row: tuple[tuple[int, ...], ...] = ()
    """Per row its messages' positions in `media`, in prompt order; empty means that no row has any."""
    sampled_mask: torch.Tensor | None = None
    """True at position i when token i + 1 was sampled, bool `[batch, seq - 1]`; log-probs elsewhere are 0."""
    allowed_token_ids: tuple[TokenSet | None, ...] = ()
    """Per row the ids that could be sampled (None: all); empty means no row was restricted."""

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 2 or self.attention_mask.shape != self.input_ids.shape:
            raise ValueError(
                f"expected input_ids and attention_mask of one shape [batch, seq], found "
                f"{tuple(self.input_ids.shape)} and {tuple(self.attention_mask.shape)}"
            )
        rows, seq = self.input_ids.shape
        for name in ("media_of_row", "allowed_token_ids"):
            value = getattr(self, name)
            if value and len(value) != rows:
                raise ValueError(f"{name}: expected one entry per row ({rows}), found {len(value)}")
        if self.sampled_mask is not None and self.sampled_mask.shape != (rows, seq - 1):
            raise ValueError(
                f"sampled_mask: expected [{rows}, {seq - 1}], found {tuple(self.sampled_mask.shape)}"
            )
        named = {number for numbers in self.media_of_row for number in numbers}
        if not named <= set(range(len(self.media))):
            raise ValueError(
                f"media_of_row names {max(named) + 1} media sets, but {len(self.media)} are given"
            )

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, start: int, stop: int) -> PolicyBatch:
        """Rows `start` to `stop` with the media they use, each once; the padded length stays."""
        used = self.media_of_row[start:stop]
        kept = sorted({number for numbers in used for number in numbers})
        places = {number: place for place, number in enumerate(kept)}
        return PolicyBatch(
            input_ids=self.input_ids[start:stop],
            attention_mask=self.attention_mask[start:stop],
            media=tuple(self.media[number] for number in kept),
            media_of_row=tuple(tuple(places[number] for number in numbers) for numbers in used),
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
    """Right-pad rows into one batch. Media whose tensors several rows share appear once.

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

    # Tensors are equal as keys only when they are the same object.
    numbers: dict[tuple[torch.Tensor, ...], int] = {}
    media: list[MediaValues] = []
    media_of_row = []
    for row in rows:
        used = []
        for values in row.media:
            number = numbers.setdefault(tuple(values.values()), len(media))
            if number == len(media):
                media.append(values)
            used.append(number)
        media_of_row.append(tuple(used))
    return PolicyBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        media=tuple(media),
        media_of_row=tuple(media_of_row) if media else (),
        sampled_mask=masks if any(row.sampled is not None for row in rows) else None,
        allowed_token_ids=(
            tuple(row.allowed_token_ids for row in rows)
            if any(row.allowed_token_ids is not None for row in rows)
            else ()
        ),
    )
