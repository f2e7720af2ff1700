# SPDX-License-Identifier: Apache-2.0
"""The `size` command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nemo_rl_ext.rollout.sizing import Costs, Needs, Workload


def size(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory to measure with, on this machine.")
    ] = None,
    prompts: Annotated[str, typer.Option(help="Prompts per step, several by commas.")] = "64,256,1024",
    gpus: Annotated[str, typer.Option(help="GPUs, several by commas.")] = "8,64,512",
    generations: Annotated[int, typer.Option(min=2, help="Generations per prompt.")] = 16,
    images: Annotated[int, typer.Option(min=1, help="Images per rollout.")] = 16,
    own_images: Annotated[int, typer.Option(min=0, help="Of these, ones that differ by generation.")] = 0,
    image_size: Annotated[str, typer.Option(help="Width x height of an image, in pixels.")] = "2400x1080",
    repaired: Annotated[float, typer.Option(min=0, max=1, help="Share of images to repair.")] = 1.0,
    step_s: Annotated[float, typer.Option(min=1, help="Seconds of a step.")] = 377.0,
    max_age: Annotated[int, typer.Option(min=0, help="Steps that rollouts wait at most.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    gpus_per_replica: Annotated[int, typer.Option(min=1, help="GPUs that one policy replica spans.")] = 8,
    costs: Annotated[
        Path | None, typer.Option(help="JSON of an earlier measurement, in place of a checkpoint.")
    ] = None,
    save_costs: Annotated[Path | None, typer.Option(help="Write the measurement here.")] = None,
) -> None:
    """Cores, memory and network that alignment takes per step, from costs measured here or given.

    Measuring starts a Ray of its own and takes about half a minute.
    """
    import json

    from nemo_rl_ext.rollout.sizing import Workload, needs

    pixels = _pixels(image_size)
    if (checkpoint is None) == (costs is None):
        raise ValueError("expected a checkpoint to measure with, or --costs with an earlier measurement")
    if costs is not None:
        measured = _read(costs)
    else:
        from nemo_rl_ext.disk import require_home

        require_home()
        from nemo_rl_ext.rollout.calibration import calibrate

        assert checkpoint is not None
        measured = calibrate(checkpoint, pixels)
    if save_costs is not None:
        save_costs.write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")
    typer.echo("measured: " + ", ".join(f"{name} {value:.4g}" for name, value in asdict(measured).items()))
    rows = [
        (work, needs(work, measured))
        for work in (
            Workload(
                prompts=number,
                gpus=count,
                generations=generations,
                images=images,
                own_images=own_images,
                repaired=repaired,
                step_s=step_s,
                max_age=max_age,
                gpus_per_node=gpus_per_node,
                gpus_per_replica=gpus_per_replica,
            )
            for number in _numbers(prompts, "--prompts")
            for count in _numbers(gpus, "--gpus")
        )
    ]
    typer.echo(_table(rows))


COLUMNS = (
    "prompts",
    "GPUs",
    "aligner CPU s",
    "each alone",
    "aligners",
    "their GiB",
    "broker CPU s",
    "collector CPU s",
    "its GiB",
    "store GiB",
    "per node",
    "network GiB",
    "MiB/s per node",
)


def _numbers(text: str, option: str) -> list[int]:
    """Whole numbers above 0, by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option}: expected whole numbers above 0 by commas, such as 64,256; got {text!r}")
    return [int(part) for part in parts]


def _pixels(text: str) -> tuple[int, int]:
    """(height, width) of a size that is written as width x height."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"--image-size: expected WIDTHxHEIGHT in pixels, such as 2400x1080; got {text!r}")
    return int(found.group(2)), int(found.group(1))


def _read(path: Path) -> Costs:
    """An earlier measurement."""
    import json

    import pydantic

    from nemo_rl_ext.rollout.sizing import Costs

    try:
        return pydantic.TypeAdapter(Costs).validate_python(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected what --save-costs writes: {error}") from None


def _table(rows: Sequence[tuple[Workload, Needs]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for work, need in rows:
        cells = (
            f"{work.prompts:,}",
            f"{work.gpus:,}",
            f"{need.aligner_cpu_s:,.0f}",
            f"{need.alone_cpu_s:,.0f}",
            f"{need.aligners:,}",
            f"{need.aligner_gib:,.1f}",
            f"{need.broker_cpu_s:,.1f}",
            f"{need.collect_cpu_s:,.1f}",
            f"{need.collect_gib:,.2f}",
            f"{need.store_gib:,.1f}",
            f"{need.store_gib_per_node:,.1f}",
            f"{need.network_gib:,.0f}",
            f"{need.network_gib_s_per_node * 1024:,.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
