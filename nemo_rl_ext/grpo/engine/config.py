# SPDX-License-Identifier: Apache-2.0
"""``policy.generation.vllm_cfg``: what the engine is started with. Each key is declared here and nowhere else."""

from typing import Any, Literal

from pydantic import Field

from nemo_rl_ext.config.block import Block


class LimitMMPerPromptConfig(Block):
    """``policy.generation.vllm_cfg.limit_mm_per_prompt``: media items that one request may carry."""

    image: int = Field(default=4, ge=0, description="Still images per request.")
    video: int = Field(default=1, ge=0, description="Videos per request.")
    audio: Literal[0] = Field(default=0, description="Sound cannot be aligned: anything but 0 is refused.")


class VllmConfig(Block):
    """``policy.generation.vllm_cfg``: arguments of the in-process vLLM engine."""

    max_model_len: int | None = Field(
        default=None,
        ge=16,
        description="Context of the engine; its images share max_model_len - 4 tokens. null means "
        "policy.max_total_sequence_length.",
    )
    precision: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Weights and activations of the engine."
    )
    enforce_eager: bool = Field(default=True, description="Do not compile or capture graphs.")
    max_num_seqs: int = Field(default=64, ge=1, description="Sequences that the engine decodes at once.")
    kv_cache_memory_bytes: int = Field(
        default=64 << 20,
        ge=1 << 20,
        description="Bytes of the engine's key/value cache, at least one sequence of max_model_len.",
    )
    limit_mm_per_prompt: LimitMMPerPromptConfig = Field(
        default_factory=LimitMMPerPromptConfig, description="Media items that one request may carry."
    )
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = Field(
        default="processed_logprobs",
        description="Log-probs after ban, allowed tokens and temperature, or before; the trainer's follow.",
    )
    mm_processor_cache_gb: float = Field(
        default=0.0,
        ge=0.0,
        description="GiB of processed media that the engine keeps; media found there leave the shared "
        "budget, so grids depend on history when this is above 0.",
    )
    enable_prefix_caching: bool = Field(
        default=False, description="Reuse cached prompt prefixes; must stay off for hybrid models on a CPU."
    )
    video_pruning_rate: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of video tokens that the engine prunes (EVS). Pruned videos cannot be aligned: "
        "anything above 0 is refused while grpo.media_alignment.enabled.",
    )
    mm_processor_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the engine's media processor, for instance {max_pixels: 65536}. Those whose effect "
        "on the checkpoint's family is not known are refused.",
    )
    hf_overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of the checkpoint's config.json to replace, passed to vLLM as they are.",
    )


class EngineConfig(VllmConfig):
    """`vllm_cfg` and what the engine takes from other blocks; what an engine actor is started with."""

    model: str = Field(description="Checkpoint directory.")
    max_model_len: int = Field(default=512, ge=16, description="As `vllm_cfg`'s, never null.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the checkpoint ships.")
    seed: int = Field(default=0, ge=0, description="Seed of the engine's own generator.")
