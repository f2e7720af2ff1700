# SPDX-License-Identifier: Apache-2.0
"""Limits of size that the media of one request share, as ranges: what their runs together leave possible."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Limits:
    """A lower limit in [`min_low`, `min_high`] and an upper one in [`max_low`, `max_high`], in a family's own unit.

    A lower limit above the upper one is taken for impossible.
    """

    min_low: int = 0
    min_high: int = UNLIMITED
    max_low: int = 0
    max_high: int = UNLIMITED

    def meet(self, other: Limits) -> Limits | None:
        """The limits that are in both ranges, or None where there are none."""
        both = Limits(
            max(self.min_low, other.min_low),
            min(self.min_high, other.min_high),
            max(self.max_low, other.max_low),
            min(self.max_high, other.max_high),
        )
        possible = both.min_low <= both.min_high and both.max_low <= both.max_high
        return both if possible and both.min_low <= both.max_high else None


ANY = Limits()
"""Media that share no limits, or limits that nothing is known of."""
