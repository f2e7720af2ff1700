# SPDX-License-Identifier: Apache-2.0
"""What vLLM needs to run in this process, on a CPU, with weights that change: set before and around its start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nemo_rl_ext.grpo.engine.config import EngineConfig

ENVIRONMENT = {
    # The engine core in this process: no child to outlive us, and the model within reach for new weights.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The image processor's torch.compile costs a minute on the first image and saves nothing on a CPU.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""What vLLM reads at import; a value that is already set stays, except where the engine depends on it."""

OLDER_NAMES = {"NemotronH_Omni_Reasoning_V3": "NemotronH_Nano_Omni_Reasoning_V3"}
"""Architectures that vLLM before 0.32 does not list, and the name that it has for the same model."""

_REQUIRED = ("VLLM_ENABLE_V1_MULTIPROCESSING",)


def prepare_environment() -> None:
    """Set `ENVIRONMENT`. Call before vLLM is imported."""
    for name, value in ENVIRONMENT.items():
        if name in _REQUIRED:
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)
    # It would win over kv_cache_memory_bytes, in GiB.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def keep_weights_in_place() -> None:
    """Have layers on a CPU compute with their own weight, which `load_weights` writes.

    vLLM packs it for oneDNN or AMX into a copy or over the original; loading then fails, or misses the copy. Its
    own remedy, `reload_weights`, leaves this model's projector as it was.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        utils.dispatch_cpu_unquantized_gemm = _compute_unpacked


def _compute_unpacked(layer: Any, remove_weight: bool) -> None:
    """In place of `dispatch_cpu_unquantized_gemm`; a convolution or an expert needs no `cpu_linear`."""
    import torch

    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear


def configure(config: EngineConfig, overrides: Mapping[str, Any], hf_config: Any) -> Any:
    """`hf_overrides`: the engine's dtype in every part of the configuration, then what config.json lacks.

    vLLM's `dtype` argument reaches the language model only; tower and pixels follow the checkpoint's own, and
    the two then do not multiply.
    """
    import torch

    dtype = getattr(torch, config.precision)
    for part in (hf_config, *(getattr(hf_config, name, None) for name in ("text_config", "vision_config"))):
        if part is not None:
            part.dtype = dtype
    hf_config.update({**overrides, **config.hf_overrides})
    hf_config.architectures = [_known_name(name, hf_config) for name in hf_config.architectures or ()]
    return hf_config


def _known_name(architecture: str, hf_config: Any) -> str:
    """The name under which this vLLM has an architecture, where it has the same model under an earlier one."""
    from vllm import ModelRegistry

    older = OLDER_NAMES.get(architecture)
    if older is None or architecture in ModelRegistry.get_supported_archs():
        return architecture
    if getattr(hf_config, "num_nextn_predict_layers", 0):
        raise ValueError(
            "this checkpoint predicts several tokens (num_nextn_predict_layers), and this vLLM leaves out the layer "
            "norm that its vision tower then has; use vLLM 0.32 or newer"
        )
    return older
