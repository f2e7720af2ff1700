# SPDX-License-Identifier: Apache-2.0
"""What alignment asks of a model family, and the tensors that a family makes for one turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nemo_rl_ext.align.grids import Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.runs import Grammar


@dataclass(frozen=True, kw_only=True)
class MediaTensors:
    """The media of one turn in a model's layout.

    `grids` holds one patch grid per image and per video tubelet, in prompt order; `values` the model's inputs.
    """

    grids: tuple[Grid, ...]
    values: dict[str, torch.Tensor]

    def num_features(self, merge_size: int) -> int:
        """Features that the vision tower projects these tensors to: what the forward counts against the ids."""
        return sum(grid.num_tokens(merge_size) for grid in self.grids)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.values.values())


class MediaFamily(Protocol):
    """One model family. Everything but `render`, `pack` and `neutral` works on numbers alone."""

    @property
    def grammar(self) -> Grammar: ...
    @property
    def merge_size(self) -> int: ...

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Token ids as text, special tokens kept; None where the family has no tokenizer at hand."""
        ...

    def frames_per_tubelet(self) -> int:
        """Video frames that share one run."""
        ...

    def num_runs(self, item: MediaItem) -> int:
        """Runs that the engine writes for an item: 1 for an image, one per tubelet for a video."""
        ...

    def num_tokens(self, grid: Grid) -> int:
        """Context tokens of a run on this grid."""
        ...

    def static_grids(self, items: Sequence[MediaItem]) -> tuple[Grid, ...]:
        """The grid that the training side's processor gives each item on its own."""
        ...

    def feasible_grids(self, item: MediaItem, num_tokens: int) -> tuple[Grid, ...]:
        """Every grid that the engine can reach for an item with runs of `num_tokens`."""
        ...

    def joint_grids(self, sizes: Sequence[Size], max_model_len: int) -> tuple[Grid, ...] | None:
        """The engine's grids for all images of one request that share its context length."""
        ...

    def render(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        """Decode an item and put it on a grid, in the layout's own shape for one item."""
        ...

    def pack(
        self, items: Sequence[MediaItem], grids: Sequence[Grid], rendered: Sequence[torch.Tensor]
    ) -> MediaTensors:
        """Join rendered items into the tensors of one turn."""
        ...

    def neutral(self, run_lengths: Sequence[int]) -> MediaTensors:
        """Media without content that project to exactly one feature per context token."""
        ...
