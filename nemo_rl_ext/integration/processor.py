# SPDX-License-Identifier: Apache-2.0
"""Loading a processor the way NeMo-RL does, with its chat template following a tokenizer override."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from nemo_rl_ext.integration.processor_allowlists import extend_processor_names

logger = logging.getLogger(__name__)


def load_processor(tokenizer_config: Mapping[str, Any]) -> Any:
    """The processor of a `policy.tokenizer` block, through NeMo-RL's `get_tokenizer`."""
    from nemo_rl.algorithms import utils

    extend_processor_names()
    load = getattr(utils.get_tokenizer, "__wrapped__", utils.get_tokenizer)
    return sync_chat_template(load(dict(tokenizer_config), get_processor=True), tokenizer_config)


def sync_chat_template(processor: Any, tokenizer_config: Mapping[str, Any]) -> Any:
    """Give a processor its tokenizer's chat template where a recipe overrides it; returns the processor.

    NeMo-RL's `get_tokenizer` copies the template only into a processor that has none, so an override leaves the
    processor rendering with the checkpoint's own.
    """
    tokenizer = getattr(processor, "tokenizer", None)
    template = getattr(tokenizer, "chat_template", None)
    overridden = str(tokenizer_config.get("chat_template", "default")).lower() != "default"
    if tokenizer is not None and overridden and getattr(processor, "chat_template", None) != template:
        processor.chat_template = template
        logger.info(
            "the chat template of %s follows policy.tokenizer.chat_template", type(processor).__name__
        )
    return processor
