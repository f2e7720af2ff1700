# SPDX-License-Identifier: Apache-2.0
"""Runs in NeMo-RL's vLLM worker: returns the patch grids of a request beside its token ids.

Loaded by its path as a parser plugin (`ReasoningParserManager.import_reasoning_parser`), which registers no parser.
Each chat response message gets `media_grids`, one [height, width] in patches per image of the request in prompt
order, from the sizes that the engine's own processor chose. A vLLM that is not laid out as expected is left alone,
and says so; alignment then falls back to the placeholder runs.
"""

import functools
import inspect
import logging
from collections import OrderedDict

logger = logging.getLogger("nemo_rl_ext.integration.vllm_plugin")

_MARK = "_nemo_rl_ext_original"
_MAX_PENDING = 8192

# By id of the request object, which lives as long as its response is being made. A request that fails never takes
# its entry, so the oldest are dropped.
_pending: OrderedDict = OrderedDict()


def grids_of(engine_input, patch_size):
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


def install():
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
    wanted = ((OnlineRenderer, "preprocess_chat"), (OpenAIServingChat, "chat_completion_full_generator"))
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


def _recording(original):
    async def preprocess_chat(self, request, *args, **kwargs):
        # A request that failed may have had this id.
        _pending.pop(id(request), None)
        rendered = await original(self, request, *args, **kwargs)
        try:
            grids = grids_of(rendered[1][0], self.model_config.hf_config.patch_size)
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            logger.warning("the grids of a request were not recorded: %s", error)
            grids = None
        if grids:
            _pending[id(request)] = grids
            while len(_pending) > _MAX_PENDING:
                _pending.popitem(last=False)
        return rendered

    return preprocess_chat


def _returning(original):
    async def chat_completion_full_generator(self, request, *args, **kwargs):
        response = await original(self, request, *args, **kwargs)
        grids = _pending.pop(id(request), None)
        if grids is not None:
            for choice in getattr(response, "choices", ()):
                choice.message.media_grids = grids
        return response

    return chat_completion_full_generator


install()
