# SPDX-License-Identifier: Apache-2.0
"""Numbers with their nouns, for messages."""

from __future__ import annotations


def counted(count: int, name: str) -> str:
    """`1 row`, `2 rows`, `2 placeholder runs`."""
    return f"{count} {name}{'' if count == 1 else 's'}"
