# SPDX-License-Identifier: Apache-2.0
"""The embedded engine behind an OpenAI-compatible endpoint, for Gym's agents: the same engine, weights and ban.

It answers `POST /v1/chat/completions` as vLLM's own server does with `return_token_ids`, so that the ids that were
really used travel with the text. Bound to loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_rl_ext.grpo.collecting.player import Sampling, request_seed
from nemo_rl_ext.grpo.collecting.prompts import PromptRenderer
from nemo_rl_ext.grpo.engine.client import EngineClient
from nemo_rl_ext.grpo.engine.requests import GeneratedSequence, GenerationRequest, GenerationResult
from nemo_rl_ext.manifest.tools import Tool, ToolCall
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.receipts.store import ReceiptStore, SampleStore, rollout_key

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0

_FIELDS = ("reasoning_content", "tool_call_id", "name")


@dataclass(frozen=True, kw_only=True)
class SampleFacts:
    """What the engine says of a sample beside its ids: why it ended, and vLLM's spans of weight versions."""

    finish_reason: str
    weight_versions: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, output: GeneratedSequence) -> SampleFacts:
        return cls(finish_reason=output.finish_reason, weight_versions=output.weight_versions)


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Chat completions on the embedded engine.

    `sampling` gives the defaults and what no request can change: the allowed and the banned tokens. Images come as
    `data:` URLs or within `media_policy`.
    """

    engine: EngineClient
    renderer: PromptRenderer
    sampling: Sampling
    media_policy: MediaPolicy
    model_name: str
    receipts: ReceiptStore | None = None
    """Where the engine's receipts wait for whoever gets the rollout."""
    samples: SampleStore[SampleFacts] = field(default_factory=SampleStore)
    """Where what no agent hands on waits for them as well."""

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One completion.

        Raises:
            ValueError: for a request that cannot be answered, the engine's own refusals included.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError(
                f"messages: expected a list with at least one message, got {type(messages).__name__}"
            )
        chat, images = self._chat(messages)
        tools = [Tool.model_validate(tool).for_template() for tool in body.get("tools") or ()]
        prompt = self.renderer.chat(chat, tools)
        request = GenerationRequest(
            name=str(body.get("user") or "chat"),
            prompt_token_ids=prompt,
            images=images,
            max_new_tokens=self._max_new_tokens(body),
            temperature=float(_given(body.get("temperature"), self.sampling.temperature)),
            seed=seed_of_turn(body.get("seed"), prompt),
            allowed_token_ids=self.sampling.allowed_token_ids,
            banned_token_ids=self.sampling.banned_token_ids,
        )
        (result,) = self.engine.generate([request])
        if result.error is not None:
            # An agent of Gym ends its conversation at these words, where another error ends its rollout.
            too_long = "the context length is exceeded: " if result.exceeds_context else ""
            raise ValueError(f"{too_long}{result.error}")
        keys = [rollout_key(result.prompt_token_ids, o.token_ids, o.logprobs) for o in result.outputs]
        for key, output in zip(keys, result.outputs, strict=True):
            self.samples.put([key], SampleFacts.of(output))
        if self.receipts is not None and result.receipt is not None:
            self.receipts.put(keys, result.receipt)
        return self._completion(result)

    def _max_new_tokens(self, body: Mapping[str, Any]) -> int:
        asked = _given(body.get("max_completion_tokens"), body.get("max_tokens"))
        return min(int(_given(asked, self.sampling.max_new_tokens)), self.sampling.max_new_tokens)

    def _chat(self, messages: Sequence[Any]) -> tuple[list[dict[str, Any]], tuple[np.ndarray, ...]]:
        """Messages as the chat template takes them, and their decoded images in prompt order."""
        chat, images = [], []
        for index, message in enumerate(messages):
            content = message.get("content") or ""
            entry = {"role": message.get("role"), "content": content}
            entry |= {key: message[key] for key in _FIELDS if message.get(key) is not None}
            if calls := message.get("tool_calls"):
                entry["tool_calls"] = [ToolCall.model_validate(call).for_template() for call in calls]
            chat.append(entry)
            if isinstance(content, str):
                continue
            parts: list[dict[str, str]] = []
            for part in content:
                if part.get("type") in ("text", "input_text"):
                    parts.append({"type": "text", "text": part["text"]})
                elif part.get("type") in ("image_url", "input_image"):
                    url = part["image_url"]
                    url = url["url"] if isinstance(url, Mapping) else url
                    images.append(load_image(url, self.media_policy, where=f"message {index}").pixels)
                    parts.append({"type": "image"})
                else:
                    raise ValueError(f"message {index}: content part {part.get('type')!r} is not supported")
            entry["content"] = parts
        return chat, tuple(images)

    def _completion(self, result: GenerationResult) -> dict[str, Any]:
        output = result.outputs[0]
        tokenizer = self.renderer.tokenizer
        token_ids = output.token_ids.tolist()
        content = [
            {"token": tokenizer.decode([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(token_ids, output.logprobs.tolist(), strict=True)
        ]
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model_name,
            "prompt_token_ids": result.prompt_token_ids.tolist(),
            "choices": [
                {
                    "index": 0,
                    "finish_reason": output.finish_reason,
                    "message": {
                        "role": "assistant",
                        "content": tokenizer.decode(token_ids, skip_special_tokens=True),
                    },
                    "logprobs": {"content": content},
                    "token_ids": token_ids,
                }
            ],
            "usage": {
                "prompt_tokens": len(result.prompt_token_ids),
                "completion_tokens": len(token_ids),
                "total_tokens": len(result.prompt_token_ids) + len(token_ids),
            },
        }


def seed_of_turn(seed: Any, prompt: np.ndarray) -> int | None:
    """A seed of its own for every turn of a rollout, from the one that an agent sends with all of them.

    Turns that drew with the same noise would not be independent, and their log-probs not those of the distribution
    that they were drawn from.
    """
    return (
        None if seed is None else request_seed(int(seed), zlib.crc32(np.asarray(prompt, np.int32).tobytes()))
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


@contextlib.contextmanager
def serve(completions: Completions) -> Iterator[str]:
    """Serve completions on a free loopback port; yields the base URL, ending in `/v1`.

    Raises:
        RuntimeError: when the server does not start.
    """
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            _app(completions), host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=5
        )
    )
    thread = threading.Thread(target=server.run, name="engine-endpoint", daemon=True)
    thread.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError(f"the engine's endpoint did not start within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def _app(completions: Completions) -> Any:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    app = FastAPI()

    async def chat(request: Request) -> Any:
        try:
            body = await request.json()
            # The engine batches whatever calls are in flight, each of which waits in a thread of its own.
            return await asyncio.to_thread(completions.create, body)
        except (ValueError, KeyError, TypeError) as error:
            message = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            detail = {"message": message, "type": "BadRequestError", "code": 400}
            return JSONResponse(detail | {"error": detail}, status_code=400)

    def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": completions.model_name, "object": "model", "owned_by": "embedded"}],
        }

    # The annotations are strings here, which FastAPI would look up in this module.
    chat.__annotations__["request"] = Request
    app.add_api_route("/v1/chat/completions", chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/health", lambda: {"status": "ok"}, methods=["GET"])
    return app
