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
        int, typer.Option(min=1, help="Most patches per image, for engine and trainer; `check` says which.")
    ],
) -> None:
    """Make a checkpoint directory that limits images to fewer patches, so that the engine never re-sizes them."""
    from nemo_rl_ext.models.pin import pin_checkpoint

    made = pin_checkpoint(checkpoint, out, max_num_patches)
    typer.echo(
        f"{made.out}: max_num_patches {made.before or 'unlimited'} -> {made.after} in {', '.join(made.changed)}; "
        f"{made.num_links} links to {checkpoint}, which must stay where it is"
    )
    typer.echo("in the recipe:")
    typer.echo(f"  policy.model_name: {made.out}")
    typer.echo("  policy.tokenizer.name: the same directory, where the recipe names one (NeMo-RL)")
    typer.echo(
        "  policy.generation.vllm_cfg.limit_mm_per_prompt.image: at most "
        f"(max_model_len - 4 - text) * 4 / {made.after}, where text is the longest prompt with its earlier answers"
    )
