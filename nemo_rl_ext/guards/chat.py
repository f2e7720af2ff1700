# SPDX-License-Identifier: Apache-2.0
"""Chat rendering in which no content field can become a control token.

Works around two ways to render: a checkpoint's Jinja template (`SafeChat`) and a hand-written renderer of
PrimeIntellect's `renderers` package (`SafeRenderer`). Both mark the content, let the original renderer work, and
encode its text with a `SafeEncoder`; a conversation without control literals gets the original's own ids.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_rl_ext.guards.encode import Encoded, SafeEncoder

# Templates compare these with words of their own, so only whole literals in them are broken.
_COMPARED = frozenset({"role", "type"})
_MEDIA_TYPES = frozenset(
    f"{prefix}{kind}{suffix}"
    for kind in ("image", "video", "audio")
    for prefix in ("", "input_")
    for suffix in ("", "_url")
)
# Below these keys, keys are content as well: argument names and JSON-schema property names.
_FREE_FORM = frozenset({"arguments", "parameters", "properties"})
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def mark_messages(encoder: SafeEncoder, messages: Sequence[Any]) -> list[Any]:
    """Mark every content string of messages or tool specifications, at any depth; the input is not changed.

    Tool-call arguments are marked as a mapping (keys and values) and as a JSON string (each string literal in
    it, so that it still parses). Media payloads are left alone.

    Raises:
        TypeError: for a message that is neither a mapping nor a pydantic model.
    """
    return [_marked(encoder, _as_mapping(m)) for m in messages]


def _as_mapping(message: Any) -> Mapping[str, Any]:
    if hasattr(message, "model_dump"):
        return dict(message.model_dump())
    if isinstance(message, Mapping):
        return message
    raise TypeError(
        f"safe chat: a message must be a mapping or a pydantic model, got {type(message).__name__}"
    )


def _marked(encoder: SafeEncoder, root: Mapping[str, Any]) -> Any:
    # An explicit stack: arguments may nest deeper than Python recurses.
    holder: list[Any] = [None]
    stack: list[tuple[Any, Any, Any, bool]] = [(holder, 0, root, False)]
    while stack:
        target, key, value, free_form = stack.pop()
        if isinstance(value, str):
            target[key] = _mark_arguments(encoder, value) if key == "arguments" else encoder.mark(value)
        elif isinstance(value, Mapping):
            target[key] = copied = {}
            is_media = value.get("type") in _MEDIA_TYPES and not free_form
            for name, child in value.items():
                if is_media and name != "text":
                    copied[name] = child
                    continue
                if name in _COMPARED and isinstance(child, str):
                    copied[name] = encoder.mark(child, edges=False)
                    continue
                new_name = encoder.mark(name) if free_form and isinstance(name, str) else name
                copied[new_name] = None  # keeps the order of keys: the stack fills values last to first
                stack.append((copied, new_name, child, free_form or name in _FREE_FORM))
        elif isinstance(value, (list, tuple)):
            target[key] = items = [None] * len(value)
            stack.extend((items, index, item, free_form) for index, item in enumerate(value))
        else:
            target[key] = value
    return holder[0]


def _mark_arguments(encoder: SafeEncoder, arguments: str) -> str:
    if not arguments.lstrip().startswith(("{", "[", '"')):
        return encoder.mark(arguments)
    marked = _JSON_STRING.sub(lambda m: f'"{encoder.mark(m.group()[1:-1])}"', arguments)
    # Literals may also span or lie outside JSON strings, where the text is no JSON after all.
    return marked if marked != arguments else encoder.mark(arguments)


class SafeTokenizer:
    """A tokenizer for a renderer to hold: encodes marked text safely and is otherwise the tokenizer itself."""

    def __init__(self, encoder: SafeEncoder) -> None:
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder.tokenizer, name)

    def __len__(self) -> int:
        return len(self._encoder.tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = False, **kwargs: Any) -> list[int]:
        """Ids of marked text."""
        return self._encode(text, add_special_tokens, kwargs).ids

    def __call__(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        return_offsets_mapping: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """`input_ids`, and `offset_mapping` in characters of `text` when asked for."""
        out = self._encode(text, add_special_tokens, kwargs, offsets=return_offsets_mapping)
        if not return_offsets_mapping:
            return {"input_ids": out.ids}
        if out.offsets is None:
            raise NotImplementedError("a slow tokenizer has no character offsets")
        return {"input_ids": out.ids, "offset_mapping": out.offsets}

    def apply_chat_template(
        self, messages: Sequence[Any], *, tokenize: bool = True, return_dict: bool = False, **kwargs: Any
    ) -> Any:
        """The template over marked messages; ids, text, or a dict of ids."""
        text = self._encoder.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        if not tokenize:
            return text
        ids = self._encoder.encode_marked(text).ids
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids

    def _encode(
        self, text: str, add_special_tokens: bool, kwargs: dict[str, Any], *, offsets: bool = False
    ) -> Encoded:
        if add_special_tokens or not isinstance(text, str) or any(kwargs.values()):
            raise ValueError(
                "safe tokenizer: encodes one string without added special tokens, got "
                f"{type(text).__name__}, add_special_tokens={add_special_tokens}, {kwargs}; the renderer has to "
                "emit scaffold tokens itself"
            )
        return self._encoder.encode_marked(text, offsets=offsets)


class SafeChat:
    """A checkpoint's chat template, with content that stays content.

    chat = SafeChat(SafeEncoder(tokenizer))
    ids = chat.encode(messages, tools=tools, add_generation_prompt=True)
    """

    def __init__(self, encoder: SafeEncoder) -> None:
        self.encoder = encoder

    def encode(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids [tokens] of a conversation; equal to `apply_chat_template` when no content is a control
        literal. `template_kwargs` go to the template."""
        text = self.encoder.tokenizer.apply_chat_template(
            mark_messages(self.encoder, messages),
            tools=None if tools is None else mark_messages(self.encoder, tools),
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **template_kwargs,
        )
        return self.encoder.encode_marked(text).ids


class SafeRenderer:
    """A renderer of the `renderers` package, with content that stays content.

        renderer = SafeRenderer(lambda tok: Nemotron3Renderer(tok), SafeEncoder(tokenizer))

    `make_renderer` builds the renderer on the tokenizer that it is handed. Parsing, stop tokens and everything
    else is the renderer's own. Markup that it writes, that is neither special nor in the checkpoint's chat template
    (`<think>` in some), has to be named with `SafeEncoder(extra=...)`.
    """

    def __init__(self, make_renderer: Callable[[Any], Any], encoder: SafeEncoder) -> None:
        self.encoder = encoder
        self._renderer = make_renderer(SafeTokenizer(encoder))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """`RenderedTokens`, as the wrapped renderer returns them."""
        rendered = self._renderer.render(self._mark(messages), tools=self._mark(tools), **kwargs)
        return self._unmarked(rendered)

    def render_ids(
        self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> Any:
        """Token ids, as the wrapped renderer returns them."""
        return self._renderer.render_ids(self._mark(messages), tools=self._mark(tools), **kwargs)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Extend a conversation; None when the wrapped renderer cannot prove that it may."""
        bridged = self._renderer.bridge_to_next_turn(
            previous_prompt_ids,
            previous_completion_ids,
            self._mark(new_messages),
            tools=self._mark(tools),
            **kwargs,
        )
        return None if bridged is None else self._unmarked(bridged)

    def _unmarked(self, rendered: Any) -> Any:
        names = [n and n.replace(self.encoder.marker, "") for n in rendered.message_tool_names]
        return dataclasses.replace(rendered, message_tool_names=names)

    def _mark(self, messages: Sequence[Any] | None) -> list[Any] | None:
        return None if messages is None else mark_messages(self.encoder, messages)
