# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from safetensors.torch import load_file
from transformers import NemotronH_Omni_Reasoning_V3

from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint
from nemo_rl_ext.models.weights import to_engine_names


@pytest.mark.parametrize("pattern", ["*-*-", "M*-", "E*-"])
def test_round_trip_through_the_released_names(pattern, tmp_path):
    """transformers' own conversion is the inverse: it finds every parameter, with its value."""
    path = build_tiny_checkpoint(tmp_path / "model", pattern=pattern, seed=3)
    model, loading = NemotronH_Omni_Reasoning_V3.from_pretrained(
        path, dtype="float32", output_loading_info=True
    )
    assert not any(loading.values()), loading
    saved = load_file(path / "model.safetensors")
    renamed = to_engine_names(model.state_dict())
    assert renamed.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(renamed[name], value), name


def test_vision_qkv_is_fused_in_order():
    prefix = "vision_model.encoder.layer.1.attention."
    parts = {f"{prefix}{part}_proj.bias": torch.full((2,), float(i)) for i, part in enumerate("qkv")}
    ((name, value),) = to_engine_names(dict(reversed(parts.items()))).items()
    assert name == "vision_model.radio_model.model.blocks.1.attn.qkv.bias"
    assert value.tolist() == [0, 0, 1, 1, 2, 2]


def test_language_attention_keeps_its_projections_apart():
    name = "language_model.model.layers.0.mixer.q_proj.weight"
    assert list(to_engine_names({name: torch.zeros(1)})) == [
        "language_model.backbone.layers.0.mixer.q_proj.weight"
    ]


def test_missing_projection_is_refused():
    prefix = "vision_model.encoder.layer.0.attention."
    with pytest.raises(ValueError, match=r"no k, v projection"):
        to_engine_names({f"{prefix}q_proj.weight": torch.zeros(1)})


def test_parameter_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"'model\.embed_tokens\.weight' has no name"):
        to_engine_names({"model.embed_tokens.weight": torch.zeros(1)})


def test_trained_layer_scale_is_refused():
    name = "vision_model.encoder.layer.0.layer_scale1.lambda1"
    assert to_engine_names({name: torch.ones(2)}) == {}
    with pytest.raises(ValueError, match=r"layer_scale1\.lambda1' is not the identity"):
        to_engine_names({name: torch.tensor([1.0, 1.1])})
