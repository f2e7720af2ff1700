# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of other model families than the demo's own: 1 to 2 MB, made in seconds, nothing downloaded.

Each loads in transformers and in vLLM as it stands. One byte is one token, behind the family's special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
INTERNVL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<video>",
)
WEIGHT_STD = 0.08
"""Large enough that pixels reach the logits."""


def _template(image: str, video: str) -> str:
    """Every message renders on its own, so that a later turn can be appended to token ids."""
    return (
        "{%- for message in messages -%}"
        "{{- '<|im_start|>' + message['role'] + '\n' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}"
        "{%- elif message['content'] -%}{%- for part in message['content'] -%}"
        "{%- if part['type'] in ['image', 'image_url', 'input_image'] -%}{{- '" + image + "' -}}"
        "{%- elif part['type'] in ['video', 'video_url', 'input_video'] -%}{{- '" + video + "' -}}"
        "{%- elif part['type'] in ['text', 'input_text', 'output_text'] -%}{{- part['text'] -}}"
        "{%- else -%}{{- raise_exception('unknown content part type ' + part['type']) -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}"
        "{{- '<|im_end|>\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )


def _tokenizer(
    special: Sequence[str], template: str, named: dict[str, str] | None = None
) -> tuple[Any, dict[str, int]]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(special)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        model_max_length=1_000_000,
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": named} if named else {}),
    )
    fast.chat_template = template
    return fast, vocabulary


def _save(out: Path, model: Any, processor: Any) -> Path:
    import torch

    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=WEIGHT_STD, generator=generator)
    model.save_pretrained(str(out))
    processor.save_pretrained(str(out))
    return out


def _text(vocabulary_size: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary_size,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16384,
        "pad_token_id": 0,
        "eos_token_id": 2,
        **more,
    }


def _media_ids(vocabulary: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": vocabulary["<|image_pad|>"],
        "video_token_id": vocabulary["<|video_pad|>"],
        "vision_start_token_id": vocabulary["<|vision_start|>"],
        "vision_end_token_id": vocabulary["<|vision_end|>"],
    }


_QWEN_TEMPLATE = _template(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
)
_VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}


def qwen2_5_vl(out: Path) -> Path:
    """Released patch sizes and means; `tokens_per_second` is 4."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer, vocabulary = _tokenizer(QWEN_TOKENS, _QWEN_TEMPLATE)
    rope = {"rope_type": "default", "type": "mrope", "mrope_section": [4, 6, 6], "rope_theta": 1e6}
    config = Qwen2_5_VLConfig(
        text_config=_text(len(vocabulary), rope_parameters=rope, bos_token_id=0),
        vision_config={**_VISION, "fullatt_block_indexes": [1]},
        **_media_ids(vocabulary),
    )
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size)
    )
    return _save(out, Qwen2_5_VLForConditionalGeneration(config), processor)


def _qwen3_processor(tokenizer: Any) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    image = Qwen2VLImageProcessor(
        size={"shortest_edge": 65536, "longest_edge": 16777216}, patch_size=16, **half
    )
    video = Qwen3VLVideoProcessor(size={"shortest_edge": 4096, "longest_edge": 25165824}, **half)
    return Qwen3VLProcessor(image, tokenizer, video)


def qwen3_vl(out: Path) -> Path:
    """Released patch sizes, limits and means."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer, vocabulary = _tokenizer(QWEN_TOKENS, _QWEN_TEMPLATE)
    rope = {
        "rope_type": "default",
        "mrope_section": [6, 5, 5],
        "rope_theta": 5e6,
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config=_text(len(vocabulary), head_dim=32, rope_parameters=rope),
        vision_config={**_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        **_media_ids(vocabulary),
    )
    return _save(out, Qwen3VLForConditionalGeneration(config), _qwen3_processor(tokenizer))


def qwen3_5(out: Path) -> Path:
    """One layer of linear attention, which vLLM runs in bfloat16 alone on a CPU, and one of full attention."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    tokenizer, vocabulary = _tokenizer(QWEN_TOKENS, _QWEN_TEMPLATE)
    rope = {
        "rope_type": "default",
        "mrope_section": [4, 2, 2],
        "rope_theta": 1e7,
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
    config = Qwen3_5Config(
        text_config=_text(
            len(vocabulary),
            head_dim=64,
            layer_types=["linear_attention", "full_attention"],
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            rope_parameters=rope,
        ),
        vision_config={**_VISION, "num_position_embeddings": 64},
        **_media_ids(vocabulary),
    )
    return _save(out, Qwen3_5ForConditionalGeneration(config), _qwen3_processor(tokenizer))


def internvl(out: Path) -> Path:
    """InternVL as transformers has it: tiles of 56 pixels, 4 tokens each."""
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLProcessor,
        InternVLVideoProcessor,
        Qwen2Config,
    )

    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer, vocabulary = _tokenizer(INTERNVL_TOKENS, _template("<IMG_CONTEXT>\n", "<video>\n"), named)
    tile = 56
    config = InternVLConfig(
        vision_config={
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "image_size": [tile, tile],
            "patch_size": [14, 14],
        },
        text_config=Qwen2Config(**_text(len(vocabulary), bos_token_id=0, tie_word_embeddings=False)),
        image_token_id=vocabulary["<IMG_CONTEXT>"],
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    look = {
        "size": {"height": tile, "width": tile},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    image = GotOcr2ImageProcessor(crop_to_patches=True, min_patches=1, max_patches=12, **look)
    processor = InternVLProcessor(image, tokenizer, InternVLVideoProcessor(**look), image_seq_length=4)
    return _save(out, InternVLForConditionalGeneration(config), processor)


def internvl_chat(out: Path) -> Path:
    """Configuration and tokenizer of an `InternVLChatModel`, whose model and processor are code of its own.

    vLLM has its own code for both; no weights are written.
    """
    tokenizer, _ = _tokenizer(INTERNVL_TOKENS, _template("<IMG_CONTEXT>\n", "<video>\n"))
    tokenizer.save_pretrained(str(out))
    config = {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "force_image_size": 56,
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 12,
        "vision_config": {"image_size": 56, "patch_size": 14},
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return out


TINY: dict[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_5": qwen3_5,
    "internvl": internvl,
    "internvl_chat": internvl_chat,
}


ENGINE_LIMITS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"size": {"shortest_edge": 3136, "longest_edge": 25088}},
    "qwen3_vl": {"size": {"shortest_edge": 4096, "longest_edge": 32768}},
    "internvl": {"max_patches": 3},
}
"""`mm_processor_kwargs` under which an engine re-sizes many of the demo's pictures, per family of the demo."""


def demo_overrides(name: str, out: Path) -> list[str]:
    """What the demo's configuration takes to run on the tiny checkpoint of a family in a directory."""
    if name not in ENGINE_LIMITS:
        raise ValueError(
            f"the demo runs on no tiny checkpoint of {name!r}; it does on {', '.join(ENGINE_LIMITS)}"
        )
    limits = json.dumps(ENGINE_LIMITS[name], separators=(",", ":"))
    return [
        f"policy.model_name={out}",
        "policy.build_tiny_checkpoint=false",
        f"policy.generation.vllm_cfg.mm_processor_kwargs={limits}",
    ]


def build_tiny_family(name: str, out: Path) -> Path:
    """Write the tiny checkpoint of a family to a directory. Raises `ValueError` for a name that is not one."""
    if name not in TINY:
        raise ValueError(f"there is no tiny checkpoint of {name!r}; there are {', '.join(TINY)}")
    out.mkdir(parents=True, exist_ok=True)
    return TINY[name](out)


if __name__ == "__main__":
    import sys

    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m nemo_rl_ext.models.tiny_families FAMILY DIRECTORY")
    name, out = sys.argv[1], Path(sys.argv[2])
    overrides = demo_overrides(name, out)
    build_tiny_family(name, out)
    print(*overrides, sep="\n")
