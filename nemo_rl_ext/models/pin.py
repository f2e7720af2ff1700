# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory with another limit of its images, which engine and trainer both read.

Where they read different files, both are changed. What a request or an engine is given beside the checkpoint
(`mm_processor_kwargs`, `hf_overrides`) reaches the engine alone, or is refused by it: a directory is what both see.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_ext.align.families.checkpoint import read_json
from nemo_rl_ext.align.families.registry import limit_places
from nemo_rl_ext.models.limits import shared_limits


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """What was made."""

    out: Path
    limit_name: str
    """The key of the limit."""
    before: int
    """The limit of the checkpoint; 0 for none."""
    after: int
    changed: tuple[str, ...]
    """Files of `out` that are not links."""
    num_links: int


def pin_checkpoint(
    checkpoint: str | Path, out: str | Path, limit: int, *, limit_name: str | None = None
) -> Pinned:
    """Make `out`: links to everything in `checkpoint`, and its configuration files with the new limit.

    The checkpoint is only read, and may be read-only, a link, or made of links. `out` appears whole or not at all.

    Raises:
        ValueError: when `out` exists or lies in the checkpoint, for a checkpoint whose images have no limit, or not
            `limit_name`, whose files disagree, or whose minimum is above the limit.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if os.path.lexists(out):
        raise ValueError(f"{out} exists already; pin writes a new directory, so name another one")
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint} is not a directory; a checkpoint directory is expected")
    source = checkpoint.resolve()
    if out.resolve().is_relative_to(source):
        raise ValueError(f"{out} lies in the checkpoint, which is only read; name a directory elsewhere")
    sizer = shared_limits(checkpoint)
    if limit_name not in (None, sizer.limit_name):
        raise ValueError(f"{checkpoint}: its images are limited by {sizer.limit_name}, not by {limit_name}")
    if limit < sizer.least_limit:
        raise ValueError(
            f"expected a limit of at least {sizer.least_limit}, the checkpoint's minimum of an image, got {limit}"
        )
    changed: dict[str, str] = {}
    for side in limit_places(checkpoint):
        found = {
            name: text
            for name, places in side.items()
            if (source / name).is_file() and (text := _changed(source / name, places, limit))
        }
        if not found:
            raise ValueError(
                f"{checkpoint}: expected {sizer.limit_name} in {' or '.join(side)}, found none; "
                f"{', '.join(changed) or 'no other file'} alone does not limit engine and trainer"
            )
        changed |= found
    names = sorted(entry.name for entry in source.iterdir() if entry.name not in changed)
    if dangling := [name for name in names if not (source / name).exists()]:
        raise ValueError(
            f"{checkpoint}: {', '.join(dangling)} is a link to nothing; restore the checkpoint first"
        )
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        for name in names:
            (partial / name).symlink_to((source / name).resolve())
        for name, text in changed.items():
            (partial / name).write_text(text, encoding="utf-8")
        if (read := shared_limits(partial)) != sizer.with_limit(limit):
            raise ValueError(f"{checkpoint}: the copy reads as {read}, expected {sizer.with_limit(limit)}")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Pinned(
        out=out,
        limit_name=sizer.limit_name,
        before=sizer.limit,
        after=limit,
        changed=tuple(changed),
        num_links=len(names),
    )


def _changed(path: Path, places: Sequence[Sequence[str]], limit: int) -> str:
    """The file's text with the new limit in every place that holds one; empty where none does."""
    value = read_json(path)
    if not sum([_set(value, place, limit) for place in places]):
        return ""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _set(value: Any, place: Sequence[str], limit: int) -> bool:
    *outer, key = place
    for name in outer:
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get(key) is None:
        return False
    value[key] = limit
    return True
