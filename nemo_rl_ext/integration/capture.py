# SPDX-License-Identifier: Apache-2.0
"""Asking NeMo-RL's vLLM workers to record patch grids, through the plugin key that a recipe already has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nemo_rl_ext.integration.settings import pick

logger = logging.getLogger(__name__)

PLUGIN = Path(__file__).with_name("vllm_plugin.py")
"""Imported from its path by the worker, which is how vLLM loads a parser plugin."""

_PLUGIN_KEYS = ("reasoning_parser_plugin", "tool_parser_plugin")


def request_capture(config: Any) -> bool:
    """Name the plugin in `policy.generation.vllm_cfg`; returns whether a place was free.

    The worker imports both plugins right before it builds its OpenAI-compatible server. A recipe that uses both
    keys itself keeps them, and grids come from the placeholder runs.
    """
    vllm = pick(config, "policy.generation.vllm_cfg")
    for key in _PLUGIN_KEYS:
        if vllm.get(key) in (None, "", str(PLUGIN)):
            vllm[key] = str(PLUGIN)
            logger.info("patch grids are recorded by the vLLM workers (policy.generation.vllm_cfg.%s)", key)
            return True
    logger.warning(
        "evidence: receipt was asked for, but policy.generation.vllm_cfg.%s are both taken: patch grids come "
        "from the placeholder runs",
        " and ".join(_PLUGIN_KEYS),
    )
    return False
