# SPDX-License-Identifier: Apache-2.0
"""The command ``nemo-rl-ext distill``."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

Paths = list[Path] | None


def distill(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Any other key of the configuration, as loss.temperature=2."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file, such as configs/distill.yaml.")] = None,
    student: Annotated[Path | None, typer.Option(help="Checkpoint directory of the model to train.")] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="Checkpoint directory of the model to imitate.")
    ] = None,
    sft: Annotated[
        bool | None, typer.Option("--sft", help="Train on prompt/response pairs, loss on the response only.")
    ] = None,
    sft_dataset_root: Annotated[
        Path | None, typer.Option(help="Directory of training.jsonl (and validation.jsonl for --eval-iters).")
    ] = None,
    data_paths: Annotated[
        Paths, typer.Option(help="JSON Lines of {'text'}, loss on every token; repeatable.")
    ] = None,
    use_mock_data: Annotated[bool | None, typer.Option("--use-mock-data", help="Random tokens.")] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option("--chat-template", help="Render pairs with the student's chat template, not verbatim."),
    ] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens of the longest row.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Metrics, configuration and checkpoints.")] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume", help="Continue from the newest checkpoint.")
    ] = None,
    train_iters: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Rows per step over all ranks.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Rows per forward pass.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    eval_iters: Annotated[int | None, typer.Option(help="Global batches per evaluation; 0: none.")] = None,
    eval_interval: Annotated[int | None, typer.Option(help="Steps between evaluations.")] = None,
    cp_size: Annotated[int | None, typer.Option(help="Ranks that split each row's sequence.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the row order and of dropout.")] = None,
) -> None:
    """Distil a teacher into a student on prompt/response pairs, with the loss on the response only.

    Exactly one data source: --sft, --data-paths or --use-mock-data.

    VERBATIM by default: input and output are tokenised as they stand and apart from each other: no chat
    template, no BOS, and EOS is appended once after the output. --chat-template is the explicit alternative.
    A prompt that does not fit is cut from the left; a response is never cut.

    Student and teacher must map every token id to the same token. Several processes: start it with torchrun.
    """
    from nemo_rl_ext.distill.config import load_config
    from nemo_rl_ext.distill.loop import run

    flags = {
        "student": student,
        "teacher": teacher,
        "output_dir": output_dir,
        "resume": resume,
        "data.sft": sft,
        "data.sft_dataset_root": sft_dataset_root,
        "data.data_paths": data_paths or None,
        "data.use_mock_data": use_mock_data,
        "data.chat_template": chat_template,
        "data.seq_length": seq_length,
        "train.iters": train_iters,
        "train.global_batch_size": global_batch_size,
        "train.micro_batch_size": micro_batch_size,
        "train.lr": lr,
        "train.cp_size": cp_size,
        "train.precision": precision,
        "train.seed": seed,
        "eval.iters": eval_iters,
        "eval.interval": eval_interval,
    }
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        # One voice: the other ranks meet the same faults and would repeat them.
        logging.getLogger("nemo_rl_ext").setLevel(logging.ERROR)
    try:
        settings = load_config(config, overrides or (), {k: v for k, v in flags.items() if v is not None})
        run(settings)
    except ValueError:
        if rank:
            raise typer.Exit(2) from None
        raise
