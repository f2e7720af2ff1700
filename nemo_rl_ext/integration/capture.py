# SPDX-License-Identifier: Apache-2.0
"""Asking NeMo-RL's vLLM workers for media receipts, through the plugin key that a recipe already has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import nemo_rl_ext.receipts
from nemo_rl_ext.integration.settings import pick

logger = logging.getLogger(__name__)

PLUGIN = Path(nemo_rl_ext.receipts.__file__).with_name("vllm_plugin.py")
"""Imported from its path by the worker, which is how vLLM loads a parser plugin."""

_PLUGIN_KEYS = ("reasoning_parser_plugin", "tool_parser_plugin")


def request_receipts(config: Any) -> bool:
    """Name the plugin in `policy.generation.vllm_cfg`; returns whether a place was free.

    The worker imports both plugins right before it builds its OpenAI-compatible server. A recipe that uses both
    keys itself keeps them, and the placeholder runs alone are evidence.
    """
    vllm = pick(config, "policy.generation.vllm_cfg")
    for key in _PLUGIN_KEYS:
        if vllm.get(key) in (None, "", str(PLUGIN)):
            vllm[key] = str(PLUGIN)
            logger.info("the vLLM workers give media receipts (policy.generation.vllm_cfg.%s)", key)
            return True
    logger.warning(
        "evidence: receipt was asked for, but policy.generation.vllm_cfg.%s are both taken: the placeholder runs alone "
        "are evidence",
        " and ".join(_PLUGIN_KEYS),
    )
    return False


class ReceiptHandOver:
    """The job's store of receipts, made in the driver, where it must be held for as long as the job runs."""

    actor: Any = None

    @classmethod
    def start(cls) -> None:
        """Make the store, once; without Ray there is nobody to hand receipts over to."""
        from nemo_rl_ext.receipts.store import actor_handle

        if cls.actor is None:
            cls.actor = actor_handle(create=True)
