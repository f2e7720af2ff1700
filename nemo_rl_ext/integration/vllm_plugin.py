# SPDX-License-Identifier: Apache-2.0
"""Runs in NeMo-RL's vLLM worker: returns the patch grids of a request beside its token ids.

Loaded by its path as a parser plugin (`ReasoningParserManager.import_reasoning_parser`), which registers no parser.
Each chat response message gets `media_grids`, one [height, width] in patches per image of the request in prompt
order, from the sizes that the engine's own processor chose. A vLLM that is not laid out as expected is left alone,
and says so; alignment then falls back to the placeholder runs.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger("nemo_rl_ext.integration.vllm_plugin")

_MARK = "_nemo_rl_ext_original"
_GRIDS = "_nemo_rl_ext_media_grids"
"""Attribute of a chat request that holds the grids of its images, for as long as its response is being made."""


def grids_of(engine_input: Any, patch_size: int) -> list[list[int]] | None:
    """[height, width] in patches of every image of an engine input; None where the processor did not say."""
    processed = engine_input.get("mm_kwargs") if hasattr(engine_input, "get") else None
    items = processed.get("image", ()) if processed else ()
    grids = []
    for item in items:
        size = item.get("imgs_sizes") if item is not None else None
        if size is None:
            return None
        height, width = (int(side) for side in size.data)
        grids.append([height // patch_size, width // patch_size])
    return grids


def install() -> bool:
    """Wrap the renderer and the chat server of vLLM, once per process; returns whether both are in place."""
    # The worker's process shows vLLM's own loggers only.
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.renderers.online_renderer import OnlineRenderer
    except ImportError as error:
        logger.warning("patch grids are not recorded: this vLLM has no %s", error.name)
        return False
    wanted: tuple[tuple[Any, str], ...] = (
        (OnlineRenderer, "preprocess_chat"),
        (OpenAIServingChat, "chat_completion_full_generator"),
    )
    for owner, name in wanted:
        if not inspect.iscoroutinefunction(inspect.unwrap(getattr(owner, name, None) or print)):
            logger.warning("patch grids are not recorded: %s.%s is not a coroutine", owner.__name__, name)
            return False
    for (owner, name), make in zip(wanted, (_recording, _returning), strict=True):
        current = getattr(owner, name)
        if not hasattr(current, _MARK):
            replacement = functools.wraps(current)(make(current))
            setattr(replacement, _MARK, current)
            setattr(owner, name, replacement)
    logger.info("patch grids are returned as `media_grids` beside the token ids")
    return True


def _recording(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def preprocess_chat(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        rendered = await original(self, request, *args, **kwargs)
        try:
            grids = grids_of(rendered[1][0], self.model_config.hf_config.patch_size)
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            logger.warning("the grids of a request were not recorded: %s", error)
            grids = None
        if grids:
            # Past pydantic, which would make a field of it.
            request.__dict__[_GRIDS] = grids
        return rendered

    return preprocess_chat


def _returning(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def chat_completion_full_generator(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        response = await original(self, request, *args, **kwargs)
        grids = request.__dict__.pop(_GRIDS, None)
        if grids is not None:
            for choice in getattr(response, "choices", ()):
                choice.message.media_grids = grids
        return response

    return chat_completion_full_generator


install()
