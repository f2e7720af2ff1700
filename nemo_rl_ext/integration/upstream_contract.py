# SPDX-License-Identifier: Apache-2.0
"""What the hooks know of NeMo-RL: the functions and names that they wrap, rebind or rely on."""

from __future__ import annotations

from dataclasses import dataclass

KNOWN_COMMIT = "7ea279abf"
"""The commit of NeMo-RL's main branch (2026-08-22) that the tables below were read from."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A function that is wrapped, replaced or relied on, and what about it must hold.

    `parameters` are its parameter names in order; `mentions` names and string constants that its body uses.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    mentions: tuple[str, ...] = ()
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
        parameters=(
            "env_configs",
            "base_urls",
            "model_name",
            "tokenizer",
            "enable_router_replay",
            "routed_experts_dtype",
            "use_fastokens",
        ),
        mentions=("NemoGym", "initial_global_config_dict", "tokenizer_config"),
        used_by="driver",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="setup_nemo_gym_config",
        parameters=("config", "tokenizer"),
        mentions=("tokenizer_config", "nemo_gym"),
        used_by="driver",
    ),
    Target(
        module="nemo_rl.algorithms.utils",
        name="get_tokenizer",
        parameters=("tokenizer_config", "get_processor"),
        mentions=("chat_template",),
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
        used_by="reattach",
    ),
    Target(
        module="nemo_rl.experience.rollouts",
        name="attach_static_multimodal_payload",
        parameters=("target_message_log", "source_message_log"),
        mentions=("user", "PackedTensor"),
        used_by="reattach",
    ),
    Target(
        module="nemo_rl.experience.rollouts",
        name="_postprocess_single_nemo_gym_group",
        parameters=(
            "nemo_gym_rows",
            "results",
            "timer",
            "timer_prefix",
            "policy_generation",
            "input_batch",
            "tokenizer",
            "log_full_result_tables",
            "effort_config",
            "reward_penalty_config",
            "thinking_tags",
            "mask_env_flagged_samples",
        ),
        mentions=("rollout_metrics", "final_batch", "loss_multiplier", "mask_sample"),
        used_by="metrics",
    ),
    Target(
        module="nemo_rl.experience.rollout_manager",
        name="AsyncNemoGymRolloutImpl.run_rollout",
        parameters=("self", "input_sample"),
        mentions=("attach_static_multimodal_payload", "prompt_message_log", "completions", "message_log"),
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

IN_TREE_MARKERS = ("ROLLOUT_MATCHED_MEDIA_KEY", "_rollout_matched_media")
"""Names that NeMo-RL would use if it matched media to rollouts itself; found in either file, this package stands
aside."""
