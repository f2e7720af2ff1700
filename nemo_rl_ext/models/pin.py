# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory with another limit of patches per image, which engine and trainer both read.

The engine takes its limits from config.json, the trainer's processor from preprocessor_config.json or
processor_config.json. vLLM refuses the argument per request, and `hf_overrides` reach the engine alone: a directory is
what both see.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_ext.align.families.checkpoint import read_json
from nemo_rl_ext.models.limits import shared_limits

_KEY = "max_num_patches"


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """What was made."""

    out: Path
    before: int
    """The limit of the checkpoint; 0 for none."""
    after: int
    changed: tuple[str, ...]
    """Files of `out` that are not links."""
    num_links: int


def pin_checkpoint(checkpoint: str | Path, out: str | Path, max_num_patches: int) -> Pinned:
    """Make `out`: links to everything in `checkpoint`, and its configuration files with the new limit.

    The checkpoint is only read, and may be read-only, a link, or made of links. `out` appears whole or not at all.

    Raises:
        ValueError: when `out` exists or lies in the checkpoint, for a checkpoint whose images are not limited in
            patches, whose files disagree, or whose minimum is above the limit.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if os.path.lexists(out):
        raise ValueError(f"{out} exists already; pin writes a new directory, so name another one")
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint} is not a directory; a checkpoint directory is expected")
    source = checkpoint.resolve()
    if out.resolve().is_relative_to(source):
        raise ValueError(f"{out} lies in the checkpoint, which is only read; name a directory elsewhere")
    tiler = shared_limits(checkpoint)
    if max_num_patches < tiler.min_num_patches:
        raise ValueError(
            f"expected a limit of at least the checkpoint's min_num_patches = {tiler.min_num_patches}, got "
            f"{max_num_patches}"
        )
    changed = {
        name: text
        for name, change in _CHANGES.items()
        if (source / name).is_file() and (text := _changed(source / name, change, max_num_patches))
    }
    if "config.json" not in changed or len(changed) < 2:
        raise ValueError(
            f"{checkpoint}: expected {_KEY} in config.json (vision_config.args) and in the image processor's file, "
            f"found it in {', '.join(changed) or 'neither'}"
        )
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
        if (found := shared_limits(partial)).max_num_patches != max_num_patches:
            raise ValueError(
                f"{checkpoint}: the copy reads as {found.max_num_patches}, expected {max_num_patches}"
            )
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Pinned(
        out=out,
        before=tiler.max_num_patches,
        after=max_num_patches,
        changed=tuple(changed),
        num_links=len(names),
    )


def _in_config(value: dict[str, Any], limit: int) -> bool:
    args = (value.get("vision_config") or {}).get("args")
    return _set(args, limit)


def _in_processor(value: dict[str, Any], limit: int) -> bool:
    return _set(value.get("image_processor"), limit)


def _set(block: Any, limit: int) -> bool:
    if not isinstance(block, dict) or _KEY not in block:
        return False
    block[_KEY] = limit
    return True


_CHANGES: dict[str, Callable[[dict[str, Any], int], bool]] = {
    "config.json": _in_config,
    "preprocessor_config.json": _set,
    "processor_config.json": _in_processor,
}


def _changed(path: Path, change: Callable[[dict[str, Any], int], bool], limit: int) -> str:
    """The file's text with the new limit; empty where the file does not hold one."""
    value = read_json(path)
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n" if change(value, limit) else ""
