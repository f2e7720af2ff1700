# SPDX-License-Identifier: Apache-2.0
"""What the hooks know of NeMo-RL: the functions and names that they wrap, rebind or rely on."""

from __future__ import annotations

from dataclasses import dataclass

KNOWN_COMMIT = "7ea279abf"
"""The commit of NeMo-RL's main branch (2026-08-22) that the tables below were read from."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A function that is wrapped, replaced or relied on, and what about it must hold.

    `parameters` are names that it must have, in this order. Others may stand beside them where they have defaults, or
    anywhere where the hook is `forwarding` whatever it is called with. `mentions` are names and string constants that
    its body uses, `plain_calls` functions that it calls without awaiting them.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    mentions: tuple[str, ...] = ()
    plain_calls: tuple[str, ...] = ()
    forwarding: bool = False
    is_async: bool = False
    used_by: str


TARGETS = (
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="NemoGym.run_rollouts",
        parameters=("self", "nemo_gym_examples", "timer_prefix", "deduplicate_multimodal_data"),
        mentions=(
            "rch",
            "run_examples",
            "examples",
            "_postprocess_nemo_gym_to_nemo_rl_result",
            "include_initial_multimodal_data",
            "encode_images_in_examples",
        ),
        forwarding=True,
        is_async=True,
        used_by="actor",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="NemoGym._postprocess_nemo_gym_to_nemo_rl_result",
        parameters=(
            "self",
            "nemo_gym_row",
            "nemo_gym_result",
            "tokenizer",
            "include_initial_multimodal_data",
        ),
        mentions=(
            "_processor",
            "_is_trainable_output_item",
            "prompt_token_ids",
            "generation_token_ids",
            "agent_input",
            "seed_obs",
            "input_message_log",
            "full_result",
            "_initial_multimodal_data_omitted",
        ),
        forwarding=True,
        used_by="actor",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="NemoGym.__init__",
        parameters=("self", "cfg"),
        mentions=("tokenizer_config", "_processor", "uses_image_placeholder", "_pad_dynamic_image_shapes"),
        used_by="actor",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="spinup_nemo_gym_actor",
        parameters=(),
        mentions=("NemoGym", "initial_global_config_dict", "tokenizer_config"),
        forwarding=True,
        used_by="driver",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="setup_nemo_gym_config",
        parameters=("config", "tokenizer"),
        mentions=("tokenizer_config", "nemo_gym"),
        forwarding=True,
        used_by="driver",
    ),
    Target(
        module="nemo_rl.algorithms.utils",
        name="get_tokenizer",
        parameters=("tokenizer_config", "get_processor"),
        mentions=("chat_template",),
        forwarding=True,
        used_by="driver",
    ),
    Target(
        module="nemo_rl.data.processors",
        name="nemo_gym_data_processor",
        parameters=("datum_dict", "task_data_spec", "tokenizer", "max_seq_length", "idx"),
        mentions=("extra_env_info", "nemo_gym_example_to_video_datum_spec"),
        used_by="data",
    ),
    Target(
        module="nemo_rl.experience.rollouts",
        name="_reattach_static_multimodal_payloads_to_result",
        parameters=("result", "source_message_log"),
        mentions=("input_message_log", "message_log", "attach_static_multimodal_payload"),
        forwarding=True,
        plain_calls=("attach_static_multimodal_payload",),
        used_by="reattach",
    ),
    Target(
        module="nemo_rl.experience.rollouts",
        name="attach_static_multimodal_payload",
        parameters=("target_message_log", "source_message_log"),
        mentions=("user", "PackedTensor"),
        forwarding=True,
        used_by="reattach",
    ),
    Target(
        module="nemo_rl.experience.rollouts",
        name="_postprocess_single_nemo_gym_group",
        parameters=("nemo_gym_rows", "results", "mask_env_flagged_samples"),
        mentions=("rollout_metrics", "final_batch", "loss_multiplier", "mask_sample"),
        forwarding=True,
        plain_calls=("_extract_mask_sample_flags",),
        used_by="metrics",
    ),
    Target(
        module="nemo_rl.experience.rollouts",
        name="run_async_nemo_gym_rollout",
        parameters=(),
        mentions=("original_message_logs", "mask_env_flagged_samples"),
        plain_calls=("_reattach_static_multimodal_payloads_to_result", "_postprocess_single_nemo_gym_group"),
        forwarding=True,
        is_async=True,
        used_by="reattach",
    ),
    Target(
        module="nemo_rl.experience.rollouts",
        name="_extract_mask_sample_flags",
        parameters=("results",),
        mentions=("full_result", "instance_config", "mask_sample"),
        forwarding=True,
        used_by="masking",
    ),
    Target(
        module="nemo_rl.algorithms.grpo",
        name="_apply_mask_sample_filter",
        parameters=("repeated_batch",),
        mentions=("mask_sample", "loss_multiplier"),
        forwarding=True,
        used_by="masking",
    ),
    Target(
        module="nemo_rl.experience.rollout_manager",
        name="AsyncNemoGymRolloutImpl.run_rollout",
        parameters=("self", "input_sample"),
        mentions=("attach_static_multimodal_payload", "prompt_message_log", "completions", "message_log"),
        is_async=True,
        plain_calls=("attach_static_multimodal_payload",),
        used_by="reattach",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym_video",
        name="_inject_vllm_mm_processor_kwargs",
        parameters=("nemo_gym_example", "mm_processor_kwargs"),
        mentions=("metadata", "extra_body"),
        used_by="data",
    ),
    Target(
        module="nemo_rl.data.multimodal_utils",
        name="attach_image_model_inputs_to_message",
        parameters=("message", "images", "processor", "pad_dynamic_image_shapes"),
        mentions=("extract_multimodal_model_inputs", "image_token"),
        used_by="aligner",
    ),
    Target(
        module="nemo_rl.models.generation.vllm.utils",
        name="format_prompt_for_vllm_generation",
        parameters=("data", "sample_idx"),
        mentions=("input_ids", "input_lengths", "multi_modal_data"),
        used_by="comparison",
    ),
    Target(
        module="nemo_rl.models.generation.vllm.utils",
        name="resolve_generation_worker_cls",
        parameters=("default_cls", "config"),
        used_by="comparison",
    ),
)

NAMES = {
    "nemo_rl.data.multimodal_utils": (
        "_PLACEHOLDER_STYLE_PROCESSOR_NAMES",
        "VIDEO_CONTENT_TYPES",
        "image_to_data_url",
        "resolve_to_image",
    ),
    "nemo_rl.environments.nemotron_utils": ("NEMOTRON_VIDEO_PROCESSOR_NAMES",),
    "nemo_rl.environments.nemo_gym_video": ("NEMOTRON_VIDEO_PROCESSOR_NAMES",),
    "nemo_rl.data.processors": ("PROCESSOR_REGISTRY",),
    "nemo_rl.data.datasets.response_datasets": ("DATASET_REGISTRY",),
    "nemo_rl.data.datasets.response_datasets.nemogym_dataset": ("NemoGymDataset",),
    "nemo_rl.experience.rollout_manager": ("attach_static_multimodal_payload",),
    "nemo_rl.experience.failures": ("RolloutDataFailure",),
}
"""Names of modules that are extended, rebound or imported; defined or imported there at module level."""

ATTACHING = (
    ("nemo_rl.environments.nemo_gym", "_attach_multimodal_data_to_user_message"),
    ("nemo_rl.data.multimodal_utils", "attach_image_model_inputs_to_message"),
)
"""The functions that give a turn its images, where NeMo-RL would look at the turn's placeholder runs itself."""
