# SPDX-License-Identifier: Apache-2.0
"""Receipts in the answers of vLLM's HTTP servers, and on their way to a `ReceiptStore` where the job has one.

`/v1/chat/completions` and `/inference/v1/generate` get a field `media_receipt` beside the token ids, in a stream on the
first chunk. Clients that drop unknown fields find the same receipt in the store, under the ids that they do keep.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from nemo_rl_ext.receipts import recorder
from nemo_rl_ext.receipts.receipt import Receipt
from nemo_rl_ext.receipts.store import actor_handle, rollout_key

logger = logging.getLogger(__name__)

FIELD = "media_receipt"

_MARK = "_nemo_rl_ext_original"
_SERVERS = (
    (
        "vllm.entrypoints.openai.chat_completion.serving",
        "OpenAIServingChat",
        "chat_completion_full_generator",
        "chat_completion_stream_generator",
    ),
    (
        "vllm.entrypoints.scale_out.token_in_token_out.serving",
        "ServingTokens",
        "serve_tokens_full_generator",
        "serve_tokens_stream_generator",
    ),
)
_STORE_RETRY_S = 10.0


def install() -> bool:
    """Wrap this process's recorder and servers, once; returns whether chat completions will carry receipts.

    Where this vLLM is laid out otherwise it is left alone, which is said in one line.
    """
    _show_log()
    why_not = recorder.install()
    if why_not is not None:
        logger.warning("no media receipts: %s. The placeholder runs alone are evidence", why_not)
        return False
    wrapped = [_wrap_server(*names) for names in _SERVERS]
    if not wrapped[0]:
        logger.warning("no media receipts: this vLLM has no chat server of the expected form")
        return False
    logger.info("media receipts are returned as `%s` beside the token ids", FIELD)
    return True


def _show_log() -> None:
    """A vLLM worker's process shows vLLM's own loggers only."""
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)


def _wrap_server(module: str, owner: str, full: str, stream: str) -> bool:
    try:
        server = getattr(importlib.import_module(module), owner)
    except (ImportError, AttributeError):
        return False
    for name, make in ((full, _answering), (stream, _streaming)):
        current = vars(server).get(name)
        if current is None or "request_id" not in inspect.signature(inspect.unwrap(current)).parameters:
            return False
        if not hasattr(current, _MARK):
            replacement = functools.wraps(current)(make(current))
            setattr(replacement, _MARK, current)
            setattr(server, name, replacement)
    return True


def _answering(original: Any) -> Any:
    signature = inspect.signature(original)

    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        last: list[Any] = []
        bound.arguments["result_generator"] = _remember(bound.arguments["result_generator"], last)
        response = await original(*bound.args, **bound.kwargs)
        receipt = recorder.take(bound.arguments["request_id"])
        if receipt is not None and last and hasattr(response, "choices"):
            response = _with_field(response, receipt)
            await _store(last[0], receipt)
        return response

    return generate


def _with_field(response: Any, receipt: Receipt) -> Any:
    """The response with its receipt; `/inference/v1/generate` answers with a model that takes no further fields."""
    kind: Any = type(response)
    if kind.model_config.get("extra") == "allow":
        setattr(response, FIELD, receipt.as_dict())
        return response
    fields = {name: getattr(response, name) for name in kind.model_fields}
    return _open_kind(kind).model_construct(**fields, **{FIELD: receipt.as_dict()})


@functools.cache
def _open_kind(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"model_config": {"extra": "allow"}, "__module__": kind.__module__})


def _streaming(original: Any) -> Any:
    signature = inspect.signature(original)

    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        bound = signature.bind(self, *args, **kwargs)
        receipt: Receipt | None = None
        async for chunk in original(*bound.args, **bound.kwargs):
            if receipt is None:
                receipt = recorder.take(bound.arguments["request_id"])
                if receipt is not None:
                    chunk = _with_receipt(chunk, receipt)
            yield chunk

    return generate


async def _remember(results: AsyncIterator[Any], last: list[Any]) -> AsyncIterator[Any]:
    async for result in results:
        last[:] = [result]
        yield result


def _with_receipt(chunk: str, receipt: Receipt) -> str:
    """A server-sent event with the receipt in its object; anything else as it is."""
    head, found, body = chunk.partition("data: ")
    if not found or not body.startswith("{"):
        return chunk
    return f"{head}data: {json.dumps(json.loads(body) | {FIELD: receipt.as_dict()})}\n\n"


async def _store(result: Any, receipt: Receipt) -> None:
    """Hand a receipt over before its answer leaves: whoever gets the answer may look for it at once."""
    if not receipt.items:
        return
    put = _store_client()
    if put is None:
        return
    keys = []
    for output in result.outputs:
        if output.logprobs is None:
            return
        logprobs = [
            entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        keys.append(rollout_key(result.prompt_token_ids, list(output.token_ids), logprobs))
    try:
        await asyncio.wrap_future(put(keys, receipt).future())
    except Exception as error:  # the store is a help, never a reason to lose an answer
        logger.warning("a media receipt did not reach the store: %s: %s", type(error).__name__, error)


class _Client:
    """The job's store, found once; a job without one is asked again now and then."""

    put: Callable[..., Any] | None = None
    asked: float = float("-inf")


def _store_client() -> Callable[..., Any] | None:
    if _Client.put is None and time.monotonic() - _Client.asked > _STORE_RETRY_S:
        _Client.asked = time.monotonic()
        try:
            store = actor_handle()
        except ImportError:
            store = None
        if store is not None:
            _Client.put = store.put.remote
    return _Client.put
