# SPDX-License-Identifier: Apache-2.0
"""The boundary of a model family: what alignment asks of one, and nothing that only one of them knows."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from nemo_rl_ext.align.grids import Array, Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.limits import Limits
from nemo_rl_ext.align.runs import Grammar, PlaceholderRuns
from nemo_rl_ext.align.sizer import Sizer
from nemo_rl_ext.align.verdict import Fault, MediaKind


class Layout(enum.Enum):
    """How the training side wants its media, for families that know more than one way."""

    REMOTE = "remote"
    """As NeMo-RL feeds the released checkpoints' own processors."""
    NATIVE = "native"
    """As transformers' model of the family takes them."""


class Geometry(NamedTuple):
    """What the engine chose for one item: the patch grid of one frame, and how many tubelets there are of it."""

    grid: Grid
    tubelets: int = 1

    def __str__(self) -> str:
        return f"{self.tubelets}x{self.grid}" if self.tubelets > 1 else str(self.grid)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the ids of a rollout show of one item.

    `lengths` are its runs in context tokens, `grammar` the position of their grammar in the family's, and `labels`
    what the family read in the text before each run, where there was anything to read.
    """

    lengths: tuple[int, ...]
    grammar: int = 0
    labels: tuple[Hashable, ...] = ()


class Written(NamedTuple):
    """What an engine writes around the context tokens of one item."""

    texts: tuple[str, ...]
    """Text before its runs, each part tokenized on its own."""
    num_delimiters: int
    """Tokens that open and close its runs."""


class PackedItem(NamedTuple):
    """One item as its tensors describe it: nothing of where it came from."""

    kind: MediaKind
    grid: Grid
    size: Size
    """(height, width) in pixels as processed."""
    num_frames: int = 1


@dataclass(frozen=True, kw_only=True)
class MediaTensors:
    """The media of one turn in a model's layout.

    `grids` holds one patch grid per image and per video tubelet, in prompt order; `values` the model's inputs.
    """

    grids: tuple[Grid, ...]
    values: dict[str, torch.Tensor]

    def num_features(self, merge_size: int) -> int:
        """Features of these grids, merged `merge_size` x `merge_size`."""
        return sum(grid.num_tokens(merge_size) for grid in self.grids)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.values.values())


class MediaFamily(Protocol):
    """One model family. Everything but `render`, `pack`, `neutral` and `sequence` works on numbers alone."""

    @property
    def grammars(self) -> tuple[Grammar, ...]:
        """How runs are delimited, one grammar per context token."""
        ...

    @property
    def sizer(self) -> Sizer:
        """The arithmetic of its images."""
        ...

    def served_with(self, arguments: Mapping[str, Any]) -> MediaFamily:
        """The family as an engine has it that is given these `mm_processor_kwargs`.

        Raises `ValueError` for an argument whose effect is not known.
        """
        ...

    def placeholders(self) -> tuple[str, ...]:
        """What a chat template writes in the place of an item, delimiters included, the longest form first."""
        ...

    def marker(self, kind: MediaKind) -> str:
        """The token that stands once for an item in the unexpanded prompt that an engine takes."""
        ...

    def written(self, item: MediaItem) -> Written:
        """What the engine puts into the prompt for an item beside its context tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Token ids as text, special tokens kept; None where the family has no tokenizer at hand."""
        ...

    def frames_per_tubelet(self) -> int:
        """Video frames that share the features of one grid; 1 for a family or checkpoint without video."""
        ...

    def num_tubelets(self, item: MediaItem) -> int:
        """Grids of an item: 1 of an image, one per tubelet of a video's frames."""
        ...

    def split(
        self, runs: PlaceholderRuns, texts: Sequence[str] | None, items: Sequence[MediaItem]
    ) -> list[Seen] | Fault:
        """Hand the runs of a turn out to its items, or say why they cannot be. `texts` stand before each run."""
        ...

    def static(self, items: Sequence[MediaItem]) -> tuple[Geometry, ...]:
        """The geometry that the training side's processor gives each item, no rollout known."""
        ...

    def run_lengths(self, geometry: Geometry, kind: MediaKind) -> tuple[int, ...]:
        """Context tokens of each run that the engine writes for an item of this geometry."""
        ...

    def frames(self, item: MediaItem, seen: Seen, hint: Sequence[int]) -> tuple[int, ...] | Fault | None:
        """The frames of a video that the ids name, or why they are not frames of it; None where they name none.

        `hint` are the frames that other evidence names, for ids that leave several open.
        """
        ...

    def candidates(self, item: MediaItem, seen: Seen) -> tuple[Geometry, ...] | Fault:
        """Every geometry that the engine can reach for an item with these runs, sorted; exactly one is a proof.

        A video carries the frames that `frames` found. A fault where runs of this form are never an item's.
        """
        ...

    def limits(self, item: MediaItem, seen: Seen) -> tuple[Limits, ...]:
        """The limits of size, shared by all media of its kind in a request, under which an item has these runs.

        `(ANY,)` for a family whose media share none; () where the item can never have such runs.
        """
        ...

    def most_tokens(self, item: MediaItem) -> int | None:
        """The most context tokens that a run of the item can have; None where any number is possible."""
        ...

    def captured(self, item: MediaItem, values: Mapping[str, Any]) -> Geometry | None:
        """The geometry in the small tensors that the engine's processor made for an item; None where it is not."""
        ...

    def shared_outcomes(self, sizes: Sequence[Size], max_tokens: int) -> Array | None:
        """Every choice of grids for images of one request that some budget up to `max_tokens` leads to.

        int64 [outcomes, images, 2] (height, width). None for a family whose images share no budget.
        """
        ...

    def render(self, item: MediaItem, grid: Grid) -> torch.Tensor:
        """Decode an item and put it on a grid, in the layout's own shape for one item."""
        ...

    def pack(
        self, items: Sequence[MediaItem], grids: Sequence[Grid], rendered: Sequence[torch.Tensor]
    ) -> MediaTensors:
        """Join rendered items into the tensors of one turn."""
        ...

    def items_in(self, values: Mapping[str, torch.Tensor]) -> tuple[PackedItem, ...]:
        """What tensors of this layout say of the items they hold, in prompt order.

        () where they hold none, or do not say what grids their items have.
        """
        ...

    def keys(self) -> Mapping[str, bool]:
        """The keys of `MediaTensors.values`; true for those that are padded to one shape where rows are joined."""
        ...

    def join(self, rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The values of several turns or rows as one, in order."""
        ...

    def num_features(self, tensors: MediaTensors) -> int:
        """Features that the vision tower projects these tensors to: what the forward counts against the ids."""
        ...

    def neutral(self, run_lengths: Sequence[int], grammars: Sequence[int] = ()) -> MediaTensors:
        """Media without content that project to exactly one feature per context token of runs of these grammars.

        Without `grammars` all runs are of the first.
        """
        ...

    def sequence(
        self, token_ids: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the forward takes per token of one sequence [tokens] beside its ids and media `values`.

        Positions and token types that a model derives from its media, and under `input_ids` the ids that its forward
        counts, where these are not the ids that are trained on. Empty for most families.
        """
        ...


def refuse_arguments(arguments: Mapping[str, Any], *, known: Sequence[str]) -> None:
    """Raise `ValueError` for the first of an engine's `mm_processor_kwargs` that is not among the known ones."""
    for name in arguments:
        if name not in known:
            raise ValueError(
                f"mm_processor_kwargs.{name}: what it does to the media of this family is not known; "
                + (
                    f"known are {', '.join(known)}"
                    if known
                    else "the family takes its limits from the checkpoint"
                )
            )


def join_rows(
    rows: Sequence[Mapping[str, torch.Tensor]], keys: Mapping[str, bool]
) -> dict[str, torch.Tensor]:
    """Concatenate each key's tensors along their first axis, zero-padded to one shape where `keys` says so."""
    joined: dict[str, torch.Tensor] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        parts = [row[key] for row in rows if key in row]
        if keys.get(key) and len({part.shape[1:] for part in parts}) > 1:
            largest = [max(part.shape[axis] for part in parts) for axis in range(1, parts[0].ndim)]
            parts = [_padded(part, largest) for part in parts]
        joined[key] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return joined


def _padded(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    out = part.new_zeros(len(part), *shape)
    out[(slice(None), *(slice(side) for side in part.shape[1:]))] = part
    return out
