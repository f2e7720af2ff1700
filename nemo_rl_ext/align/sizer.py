# SPDX-License-Identifier: Apache-2.0
"""How images are sized, as forecasts, advice, fitting and pinning ask it of any family: numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, Self

from nemo_rl_ext.align.grids import Grid, Size


class Sizer(Protocol):
    """The arithmetic of one checkpoint's images, on the engine's side or on the trainer's."""

    limit_name: ClassVar[str]
    """What limits an image; `pin` has an option of this name."""
    shares_context: ClassVar[bool]
    """Whether the images of a request share the context, so that an engine re-sizes them to fit. If not, it refuses a
    request that is too long."""
    reserved_tokens: ClassVar[int]
    """Context tokens that the engine keeps back before its images share the rest."""

    def __hash__(self) -> int: ...

    @property
    def patch_size(self) -> int: ...

    @property
    def merge_size(self) -> int: ...

    @property
    def limit(self) -> int:
        """The value of `limit_name`; 0 for no limit."""
        ...

    @property
    def least_limit(self) -> int:
        """The smallest value that `limit_name` can have."""
        ...

    def with_limit(self, limit: int) -> Self: ...

    def of_row(self, max_num_tiles: int | None) -> Self:
        """Under a row's own limit of tiles; itself where the row has none, or images have no tiles."""
        ...

    def meet(self, other: Self) -> Self:
        """Limits that hold on both sides; where a minimum is above the maximum, the maximum is raised to it."""
        ...

    def static_grid(self, size: Size) -> Grid:
        """The patch grid of an image that is alone in its request."""
        ...

    def joint_grids(self, sizes: Sequence[Size], num_tokens: int) -> tuple[Grid, ...] | None:
        """The grids of a request's images with `num_tokens` of context for them; None where the engine refuses it."""
        ...

    def feasible_grids(self, size: Size, num_tokens: int) -> tuple[Grid, ...]:
        """Every grid with so many context tokens that some limits lead to, sorted."""
        ...

    def num_tokens(self, grid: Grid) -> int:
        """Context tokens of an image on this grid."""
        ...

    def fixed_grid(self, size: Size, num_patches: int) -> Grid | None:
        """The grid nearest to what an image of this size has alone, that stays as it is once the image has its size.

        It costs at most `num_patches` patches, `merge_size**2` of which are a context token. None where there is none.
        """
        ...
