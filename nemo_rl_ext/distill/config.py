# SPDX-License-Identifier: Apache-2.0
"""Configuration of a distillation run: a YAML file, under ``key=value`` overrides, under command-line flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import Field, ValidationError, model_validator

from nemo_rl_ext.config.block import Block, ConfigPath
from nemo_rl_ext.config.faults import explain_fault
from nemo_rl_ext.config.source import ConfigError, ConfigSource, Layer, load_sources, plain

__all__ = ["ConfigError", "DistillConfig", "LossConfig", "load_config"]


SOURCES = {"sft": "--sft", "data_paths": "--data-paths", "use_mock_data": "--use-mock-data"}


class DataConfig(Block):
    """``data``: where rows come from and how they become tokens. Exactly one source is chosen."""

    sft: bool = Field(
        default=False,
        description="Train on prompt/response pairs: training.jsonl (and validation.jsonl) under "
        "sft_dataset_root, one {'input', 'output'} per line, loss on the output only.",
    )
    sft_dataset_root: ConfigPath | None = Field(default=None, description="Directory of training.jsonl.")
    data_paths: list[ConfigPath] = Field(
        default=[], description="JSON Lines of {'text'}: plain documents, loss on every token."
    )
    use_mock_data: bool = Field(default=False, description="Random tokens, to try the machinery.")
    chat_template: bool = Field(
        default=False,
        description="Render input and output with the student's chat template. By default both are "
        "tokenised verbatim: as they stand, apart from each other, no template, no BOS, EOS appended once "
        "after the output.",
    )
    seq_length: int = Field(
        default=2048, ge=2, description="Tokens of the longest row, response and EOS included."
    )
    on_long_prompt: Literal["truncate", "error"] = Field(
        default="truncate",
        description="A prompt that does not fit beside its response: 'truncate' cuts it from the left, whole "
        "placeholder runs at a time, and names it in the log; 'error' refuses it.",
    )
    on_long_response: Literal["error", "skip"] = Field(
        default="error",
        description="A response that does not fit seq_length: 'error' refuses the data set, 'skip' leaves "
        "the pair out and names it in the log. A response is never cut.",
    )
    max_record_bytes: int = Field(default=16 << 20, ge=1, description="Longest line of a JSON Lines file.")
    media_roots: list[ConfigPath] = Field(
        default=[], description="Directories that media may lie in; empty: the data file's own directory."
    )
    max_pixels: int = Field(default=89_478_485, ge=1, description="Largest width x height of an image.")
    video_num_frames: int = Field(default=8, ge=1, description="Frames sampled from a clip.")
    video_backend: Literal["opencv", "torchcodec"] = Field(default="opencv", description="Decoder of clips.")
    max_media_bytes: int = Field(default=256 << 20, ge=1, description="Largest encoded media file, in bytes.")

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        chosen = [flag for name, flag in SOURCES.items() if getattr(self, name)]
        if len(chosen) != 1:
            found = " and ".join(chosen) if chosen else "none of them"
            raise ValueError(
                f"choose exactly one data source of {', '.join(SOURCES.values())}; found {found}"
            )
        if self.sft and self.sft_dataset_root is None:
            raise ValueError("--sft needs --sft-dataset-root DIR, the directory of training.jsonl")
        if not self.sft and self.sft_dataset_root is not None:
            raise ValueError(f"--sft-dataset-root belongs to --sft, but the data source is {chosen[0]}")
        if not self.sft and self.chat_template:
            raise ValueError(f"--chat-template belongs to --sft, but the data source is {chosen[0]}")
        return self


class LossConfig(Block):
    """``loss``: weights and shape of ``kd*KL + ce*CE + hidden*MSE``, each per response token."""

    kd_weight: float = Field(default=1.0, ge=0, description="Weight of the KL between teacher and student.")
    ce_weight: float = Field(
        default=0.0, ge=0, description="Weight of the cross-entropy against the response."
    )
    hidden_weight: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the mean squared error between the last hidden states; needs equal "
        "hidden sizes.",
    )
    direction: Literal["forward", "reverse"] = Field(
        default="forward",
        description="'forward' is KL(teacher || student), mean-seeking; 'reverse' is KL(student || teacher), "
        "mode-seeking.",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Softens both distributions; the KL is multiplied by its square (Hinton et al., 2015).",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Compare only the teacher's k most likely tokens; null: the whole vocabulary.",
    )
    top_k_tail: Literal["bucket", "renormalize"] = Field(
        default="bucket",
        description="'bucket': everything outside the top k is one more outcome, so student mass there still "
        "costs. 'renormalize': both distributions are restricted to the k tokens; mass outside is free.",
    )
    chunk_tokens: int = Field(
        default=1024,
        ge=1,
        description="Tokens whose fp32 vocabulary-wide intermediates exist at once; recomputed in the "
        "backward.",
    )

    @model_validator(mode="after")
    def _something_to_train_on(self) -> LossConfig:
        if self.kd_weight == self.ce_weight == self.hidden_weight == 0:
            raise ValueError("loss: kd_weight, ce_weight and hidden_weight are all 0; nothing to train on")
        return self


class TrainConfig(Block):
    """``train``: the optimisation itself."""

    iters: int = Field(default=200, ge=1, description="Optimizer steps.")
    global_batch_size: int = Field(default=8, ge=1, description="Rows per step, over all ranks.")
    micro_batch_size: int = Field(default=1, ge=1, description="Rows per forward pass on one rank.")
    lr: float = Field(default=1e-4, gt=0, description="Peak learning rate of AdamW.")
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="Decay after the warm-up."
    )
    lr_warmup_iters: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    weight_decay: float = Field(default=0.0, ge=0, description="Of matrices; vectors are not decayed.")
    clip_grad: float = Field(
        default=1.0, ge=0, description="Largest global gradient norm; 0 leaves it alone."
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="'bf16' computes in bfloat16 (autocast) over fp32 weights and loads the teacher in "
        "bfloat16.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward.")
    seed: int = Field(default=0, ge=0, description="Of the row order and of dropout.")
    cp_size: int = Field(default=1, ge=1, description="Ranks that share each row and split its sequence.")
    cp_forward: Literal["auto", "sharded", "replicated"] = Field(
        default="auto",
        description="'sharded' splits the forward pass (causal attention models), 'replicated' splits the "
        "loss alone; 'auto' compares both once before training and takes 'sharded' where they agree.",
    )
    timeout_s: float = Field(default=1800.0, gt=0, description="Longest wait in one collective.")


class EvalConfig(Block):
    """``eval``: held-out loss on validation.jsonl."""

    iters: int = Field(
        default=0, ge=0, description="Global batches per evaluation; 0: none, no validation.jsonl."
    )
    interval: int = Field(default=50, ge=1, description="Steps between evaluations.")


class DistillConfig(Block):
    """The whole run."""

    student: ConfigPath = Field(description="Checkpoint directory of the model that is trained.")
    teacher: ConfigPath = Field(description="Checkpoint directory of the model that is imitated.")
    output_dir: ConfigPath = Field(
        default=Path("runs/distill"), description="Metrics, configuration and checkpoints of the run."
    )
    resume: bool = Field(default=False, description="Continue from the newest checkpoint in output_dir.")
    save_interval: int = Field(
        default=100, ge=1, description="Steps between checkpoints; the last is always kept."
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints that are kept.")
    log_interval: int = Field(default=10, ge=1, description="Steps between progress lines.")
    tensorboard: bool = Field(
        default=True, description="Write TensorBoard files where tensorboard is installed."
    )
    trust_remote_code: bool = Field(default=False, description="Run a checkpoint's own Python code.")
    data: DataConfig
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> DistillConfig:
    """Merge a YAML file, ``key=value`` overrides and flags (``{"data.sft": True}``), the last one strongest.

    Raises:
        ConfigError: one line per fault, with its file and line, override or flag.
    """
    source = load_sources(path, overrides) if path else _without_file(overrides)
    values = source.values
    layer: Layer = {}
    for dotted, value in (flags or {}).items():
        *blocks, name = dotted.split(".")
        block = values
        for part in blocks:
            block = block.setdefault(part, {})
            if not isinstance(block, dict):
                raise ConfigError(f"{source.origin(tuple(blocks))}: {part}: expected a block of keys")
        block[name] = value
        layer[tuple(dotted.split("."))] = f"option --{name.replace('_', '-')}"
    values.setdefault("data", {})
    source = ConfigSource(values=values, layers=(*source.layers, layer))
    try:
        return DistillConfig.model_validate(values)
    except ValidationError as error:
        faults = [explain_fault(fault, source, DistillConfig) for fault in error.errors()]
        raise ConfigError("\n".join(faults)) from None


def _without_file(overrides: Sequence[str]) -> ConfigSource:
    labels: dict[tuple[str | int, ...], str] = {(): "command line"}
    for text in overrides:
        name, equals, _ = text.partition("=")
        if not equals or not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(
                f"override '{text}': expected key=value with a dotted key such as train.lr=1e-4"
            )
        labels[tuple(name.split("."))] = f"override '{text}'"
    return ConfigSource(values=plain(OmegaConf.from_dotlist(list(overrides))), layers=(labels,))
