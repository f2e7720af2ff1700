# SPDX-License-Identifier: Apache-2.0
"""The `pin` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pin(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory; it is only read.")],
    out: Annotated[
        Path, typer.Argument(help="Directory to make, of links and changed files. Must not exist.")
    ],
    max_num_patches: Annotated[
        int | None, typer.Option(min=1, help="Most patches per image, for engine and trainer.")
    ] = None,
    max_pixels: Annotated[
        int | None, typer.Option(min=1, help="Most pixels per image, for checkpoints that limit these.")
    ] = None,
    max_tiles: Annotated[
        int | None,
        typer.Option(min=1, help="Most tiles per image, for checkpoints that cut images into tiles."),
    ] = None,
) -> None:
    """Make a checkpoint directory with another limit of its images; `check` says which kind of limit, and which."""
    from nemo_rl_ext.models.pin import pin_checkpoint

    given = {"max_num_patches": max_num_patches, "max_pixels": max_pixels, "max_tiles": max_tiles}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    if len(limits) != 1:
        raise ValueError("expected one of --max-num-patches, --max-pixels and --max-tiles")
    ((name, limit),) = limits.items()
    made = pin_checkpoint(checkpoint, out, limit, limit_name=name)
    typer.echo(
        f"{made.out}: {made.limit_name} {made.before or 'unlimited'} -> {made.after} in {', '.join(made.changed)}; "
        f"{made.num_links} links to {checkpoint}, which must stay where it is"
    )
    typer.echo("in the recipe:")
    typer.echo(f"  policy.model_name: {made.out}")
    typer.echo("  policy.tokenizer.name: the same directory, where the recipe names one (NeMo-RL)")
    if made.limit_name == "max_num_patches":
        typer.echo(
            "  policy.generation.vllm_cfg.limit_mm_per_prompt.image: at most "
            f"(max_model_len - 4 - text) * 4 / {made.after}, where text is the longest prompt with its earlier answers"
        )
    else:
        typer.echo("  no mm_processor_kwargs for the engine, and none in its requests")
