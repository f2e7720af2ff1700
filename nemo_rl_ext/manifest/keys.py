# SPDX-License-Identifier: Apache-2.0
"""The keys that a manifest's models know, and which of them a misspelled one means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import BaseModel


def known_keys(model: type[BaseModel]) -> set[str]:
    """Every name that a manifest may write a model's fields under."""
    keys: set[str] = set()
    for name, info in model.model_fields.items():
        alias = info.validation_alias
        keys |= {choice for choice in getattr(alias, "choices", ()) if isinstance(choice, str)}
        keys.add(alias if isinstance(alias, str) else name)
    return keys


def closest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that a misspelled one most likely stands for; None where none is near."""
    candidates = sorted(known)
    if len(key) < 4 or key in candidates:
        return None
    return next(iter(difflib.get_close_matches(key, candidates, n=1, cutoff=0.8)), None)
