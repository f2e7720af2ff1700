# SPDX-License-Identifier: Apache-2.0
"""The `report` and `inspect` commands."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Literal

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(help="Directory that a run wrote (logger.log_dir).")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[RUN_DIR_B]", help="A second run, to show both side by side.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write the page; RUN_DIR/report.html by default, of two runs RUN_DIR/compare-NAME.html.",
        ),
    ] = None,
) -> None:
    """Write a run's report: one HTML file that shows which rows were repaired or masked, and why.

    With two runs: their rewards, log-prob gaps, repairs, cost and settings side by side.
    """
    if other is not None:
        from nemo_rl_ext.report.comparison import write_comparison

        typer.echo(write_comparison(run_dir, other, output))
        return
    from nemo_rl_ext.report.page import write_report

    typer.echo(write_report(run_dir, output))


def inspect(
    rollouts: Annotated[
        list[Path],
        typer.Argument(help="JSONL files of rollouts with token ids, as NeMo-Gym's collection stores them."),
    ],
    model: Annotated[Path, typer.Option(help="Checkpoint directory: tokenizer and image processor.")],
    max_model_len: Annotated[
        int | None,
        typer.Option(min=8, help="Context length of the engine: settles ties between two possible grids."),
    ] = None,
    media_root: Annotated[
        list[Path] | None,
        typer.Option(help="Directory that media may lie in; repeatable. The rollouts' own by default."),
    ] = None,
    base_dir: Annotated[
        Path | None,
        typer.Option(help="What relative media paths start from; the rollouts' own directory by default."),
    ] = None,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Fetch http(s) media.")] = False,
    num_frames: Annotated[int, typer.Option(min=1, help="Frames per clip where a row does not say.")] = 8,
    video_backend: Annotated[
        Literal["opencv", "torchcodec"], typer.Option(help="What decodes clips.")
    ] = "opencv",
    decode: Annotated[
        bool, typer.Option("--decode", help="Decode media whole, not their headers only.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for rows that would be repaired too.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per row on stdout, sums last.")
    ] = False,
    written: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write every row and the sums to this file as JSON lines."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Rows to print that did not match.")] = 20,
) -> None:
    """Check stored rollouts against their media: what matches, would be repaired, or would be masked.

    Exits with 1 when a row would be masked or cannot be read, or when there is no row at all.
    """
    from nemo_rl_ext.media.policy import MediaPolicy
    from nemo_rl_ext.report.inspect_output import JsonOutput, TableOutput
    from nemo_rl_ext.report.inspection import InspectConfig, Inspector, Totals

    totals = Totals()
    with contextlib.ExitStack() as stack:
        outputs: list[JsonOutput | TableOutput] = [JsonOutput() if as_json else TableOutput(show=show)]
        if written is not None:
            outputs.append(JsonOutput(stack.enter_context(written.open("w", encoding="utf-8"))))
        for output in outputs:
            stack.enter_context(output)
        for path in rollouts:
            start = base_dir or path.parent
            config = InspectConfig(
                model_dir=model,
                policy=MediaPolicy(roots=tuple(media_root or (start,)), allow_remote=allow_remote),
                base_dir=start,
                max_model_len=max_model_len,
                num_frames=num_frames,
                video_backend=video_backend,
                decode=decode,
            )
            for result in Inspector(config).rows(path):
                totals.add(result)
                for output in outputs:
                    output.row(path, result)
        for output in outputs:
            output.totals(totals)
    if totals.failed(strict=strict):
        raise typer.Exit(1)
