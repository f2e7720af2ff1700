# SPDX-License-Identifier: Apache-2.0
"""Parameter names: transformers' `nemotron_h_omni` to the released checkpoints, which is what vLLM loads.

The inverse is transformers' own conversion mapping (`transformers/conversion_mapping.py`), which runs in
`from_pretrained`; the tests use it for the round trip.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_RADIO = "vision_model.radio_model."
_PATCHES = _RADIO + "model.patch_generator."

# Prefixes, tried in order: the first match wins.
_PREFIXES = (
    ("language_model.model.", "language_model.backbone."),
    ("language_model.lm_head.", "language_model.lm_head."),
    ("multi_modal_projector.layer_norm.", "mlp1.0."),
    ("multi_modal_projector.linear_1.", "mlp1.1."),
    ("multi_modal_projector.linear_2.", "mlp1.3."),
    ("vision_model.embeddings.patch_projection.", _PATCHES + "embedder."),
    ("vision_model.embeddings.video_patch_projection.", _PATCHES + "video_embedder."),
    ("vision_model.embeddings.position_embedding", _PATCHES + "pos_embed"),
    ("vision_model.embeddings.cls_register_token", _PATCHES + "cls_token.token"),
    ("vision_model.encoder.layer.", _RADIO + "model.blocks."),
    ("vision_model.input_conditioner.", _RADIO + "input_conditioner."),
    ("vision_model.summary_idxs", _RADIO + "summary_idxs"),
    ("vision_final_layernorm.", "vision_projector.vision_final_layernorm."),
)
_QKV = re.compile(r"\.attention\.(?P<part>[qkv])_proj\.")
_EXPERTS = re.compile(r"\.mixer\.experts\.(?P<part>up|down)_proj$")
LAYER_SCALE = re.compile(r"^vision_model\.encoder\.layer\.\d+\.layer_scale\d\.")


def _released_name(name: str) -> str:
    for old, new in _PREFIXES:
        if name.startswith(old):
            return (new + name[len(old) :]).replace(".attention.o_proj.", ".attn.proj.")
    raise ValueError(
        f"parameter {name!r} has no name in released Nemotron VL checkpoints; expected one that starts with "
        f"{', '.join(sorted({old.split('.')[0] for old, _ in _PREFIXES}))}"
    )


def to_engine_names(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename a transformers state dict to released names: vision q, k and v fused, experts one by one.

    Tensors are the given ones or views of them, except the fused ones. RADIO has no layer scale:
    released checkpoints hold none and vLLM loads none, so transformers' identity ones are left out.

    Raises ValueError for a parameter of another model, a missing q, k or v, or a layer scale that is not
    the identity (the engine would compute something else).
    """
    import torch

    renamed: dict[str, torch.Tensor] = {}
    fused: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state_dict.items():
        if LAYER_SCALE.match(name):
            if not bool((tensor == 1).all()):
                raise ValueError(
                    f"{name!r} is not the identity, and vLLM's RADIO tower loads no layer scale: the engine "
                    "would not compute what the policy does. Keep layer scales frozen."
                )
        elif match := _EXPERTS.search(name):
            for index, expert in enumerate(tensor.unbind(0)):
                single = f".mixer.experts.{index}.{match['part']}_proj.weight"
                renamed[_released_name(_EXPERTS.sub(single, name))] = expert
        elif name.startswith("vision_model.") and (match := _QKV.search(name)):
            target = _released_name(_QKV.sub(".attn.qkv.", name))
            fused.setdefault(target, {})[match["part"]] = tensor
        else:
            renamed[_released_name(name)] = tensor
    for target, parts in fused.items():
        missing = [part for part in "qkv" if part not in parts]
        if missing:
            raise ValueError(f"cannot fuse {target!r}: no {', '.join(missing)} projection in the state dict")
        renamed[target] = torch.cat([parts["q"], parts["k"], parts["v"]], dim=0)
    return renamed
