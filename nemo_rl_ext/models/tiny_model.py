# SPDX-License-Identifier: Apache-2.0
"""Files of the tiny checkpoint: random weights, and one configuration that both of its readers understand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_ext.models.tokenizer import (
    AUDIO_ID,
    BOS_ID,
    EOS_ID,
    IMAGE_ID,
    PAD_ID,
    VOCAB_SIZE,
    save_byte_tokenizer,
)
from nemo_rl_ext.models.weights import to_engine_names

_NORM_MEAN = (0.48145466, 0.4578275, 0.40821073)
_NORM_STD = (0.26862954, 0.26130258, 0.27577711)
_VISION_WIDTH = 32


def write_tiny_model(
    path: Path, *, seed: int, dtype: str, pattern: str, min_num_patches: int, max_num_patches: int
) -> None:
    """Write weights, tokenizer and configuration files into the directory `path`."""
    import torch
    from safetensors.torch import save_file
    from transformers import NemotronH_Omni_Reasoning_V3, NemotronH_Omni_Reasoning_V3_Config

    patches = {"min_num_patches": min_num_patches, "max_num_patches": max_num_patches}
    config = _config(dtype, pattern, patches)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NemotronH_Omni_Reasoning_V3(NemotronH_Omni_Reasoning_V3_Config.from_dict(config))
        model.to(getattr(torch, dtype))
    weights = {name: value.contiguous() for name, value in to_engine_names(model.state_dict()).items()}
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    save_byte_tokenizer(path)
    special = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    media = {
        "processor_class": "NemotronH_Omni_Reasoning_V3Processor",
        "patch_size": 16,
        "downsample_ratio": 0.5,
        "norm_mean": list(_NORM_MEAN),
        "norm_std": list(_NORM_STD),
    }
    files = {
        "config.json": config,
        "generation_config.json": special,
        "preprocessor_config.json": {
            "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor",
            # AutoProcessor wants a sound extractor even for a model without a sound tower. Parakeet's own
            # needs librosa; this one needs nothing and is never called.
            "feature_extractor_type": "Wav2Vec2FeatureExtractor",
            **patches,
            "max_model_len": 16384,
            **media,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "NemotronH_Omni_Reasoning_V3VideoProcessor",
            "video_target_num_patches": 64,
            "video_maintain_aspect_ratio": True,
            **media,
        },
    }
    for name, value in files.items():
        (path / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _config(dtype: str, pattern: str, patches: Mapping[str, int]) -> dict[str, Any]:
    """One `config.json` for both: vLLM reads `vision_config.args`, transformers what stands beside it."""
    vision_shape = {"hidden_size": _VISION_WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return {
        "architectures": ["NemotronH_Omni_Reasoning_V3"],
        "model_type": "nemotron_h_omni",
        "dtype": dtype,
        "force_image_size": 64,
        "patch_size": 16,
        "downsample_ratio": 0.5,
        "template": "tiny",
        "ps_version": "v2",
        "image_tag_type": "internvl",
        "use_thumbnail": False,
        "norm_mean": list(_NORM_MEAN),
        "norm_std": list(_NORM_STD),
        "projector_hidden_size": 64,
        "vit_hidden_size": _VISION_WIDTH,
        # transformers renames the key above as it reads it, and vLLM reads the old name: the new one answers to both.
        "attribute_map": {"vit_hidden_size": "vision_hidden_size"},
        "video_pruning_rate": 0.0,
        "video_temporal_patch_size": 2,
        "img_context_token_id": IMAGE_ID,
        "video_context_token_id": IMAGE_ID,
        "sound_context_token_id": AUDIO_ID,
        **special,
        "vision_config": {
            "model_type": "radio",
            "dtype": dtype,
            **vision_shape,
            "mlp_ratio": 4.0,
            "patch_size": 16,
            "image_size": 224,
            "max_img_size": 512,
            "num_cls_tokens": 3,
            "num_registers": 7,
            "initializer_range": 0.2,
            "video_temporal_patch_size": 2,
            "separate_video_embedder": True,
            "preferred_resolution": [224, 224],
            "video_target_num_patches": 64,
            "video_maintain_aspect_ratio": True,
            # vLLM takes the shape from a table by model name; a size given beside the name wins.
            "args": {
                "model": "vit_small_patch16_224",
                **vision_shape,
                "intermediate_size": 4 * _VISION_WIDTH,
                "register_multiple": 10,
                "cls_token_per_teacher": True,
                "cpe_max_size": 512,
                "teachers": [{"name": "a"}, {"name": "b"}, {"name": "c", "use_summary": False}],
                **patches,
            },
        },
        "text_config": {
            "model_type": "nemotron_h",
            "architectures": ["NemotronHForCausalLM"],
            # vLLM serves float32 weights in bfloat16, and builds the vision tower in the dtype that stands here.
            "dtype": "bfloat16",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "hybrid_override_pattern": pattern,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "intermediate_size": 128,
            "max_position_embeddings": 8192,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 16,
            "expand": 2,
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
            "num_experts_per_tok": 2,
            "rescale_prenorm_residual": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.08,
            **special,
        },
    }
