# SPDX-License-Identifier: Apache-2.0
"""Messages, calls and tools as chat templates take them, and a rendering in which none of them gets lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl_ext.manifest.row_media import template_content
from nemo_rl_ext.manifest.rows import ManifestRow, Message
from nemo_rl_ext.media.errors import shorten

Chat = Sequence[Mapping[str, Any]]

_FIELDS = ("reasoning_content", "tool_call_id", "name")


class LeftOutError(ValueError):
    """A chat template cannot write a conversation, or leaves a part of it out."""


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them; a call, and what was thought before it, belong to one message."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": template_content(message)}
        entry |= {key: value for key in _FIELDS if (value := getattr(message, key)) is not None}
        if message.tool_calls:
            entry["tool_calls"] = [call.for_template() for call in message.tool_calls]
        if chat and _continues(chat[-1], entry):
            last = chat[-1]
            calls = [*last.get("tool_calls", ()), *entry.get("tool_calls", ())]
            last |= {**entry, "content": last["content"] or entry["content"]}
            if calls:
                last["tool_calls"] = calls
        else:
            chat.append(entry)
    return chat


def chat_tools(row: ManifestRow) -> list[dict[str, Any]]:
    """The tools of a row's request as chat templates take them."""
    return [tool.for_template() for tool in row.responses_create_params.tools]


def has_tools(row: ManifestRow) -> bool:
    """Whether a row holds what a chat template may leave out."""
    messages = [message for turn in range(row.num_turns) for message in row.messages(turn)]
    return bool(row.responses_create_params.tools) or any(
        message.tool_calls or message.reasoning_content or message.role == "tool" for message in messages
    )


def render_chat(tokenizer: Any, messages: Chat, tools: Chat = ()) -> str:
    """The text of a conversation in a checkpoint's own chat template, ready for an answer.

    Raises:
        LeftOutError: where the template refuses the conversation, or writes the same text without one of its tools,
            calls, tools' answers or thoughts.
    """
    try:
        text = _text(tokenizer, messages, tools)
    except Exception as error:  # templates are programs, which raise almost anything
        raise LeftOutError(
            f"the checkpoint's chat template does not take this conversation: {error or type(error).__name__}"
        ) from None
    for part, fewer_messages, fewer_tools in _without_one(messages, tools):
        try:
            lost = _text(tokenizer, fewer_messages, fewer_tools) == text
        except Exception:  # it does look for this part
            lost = False
        if lost:
            raise LeftOutError(
                f"the checkpoint's chat template leaves out {part}, so that the policy would not see it; take it out "
                "of the conversation, or train a checkpoint whose template writes it"
            )
    return text


def _text(tokenizer: Any, messages: Chat, tools: Chat) -> str:
    return str(
        tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
    )


def _without_one(messages: Chat, tools: Chat) -> Iterator[tuple[str, Chat, Chat]]:
    """The conversation without one part that a template may leave out, and that part in words."""
    for index, tool in enumerate(tools):
        yield f"the tool {_name(tool)}", messages, [*tools[:index], *tools[index + 1 :]]
    for index, message in enumerate(messages):
        before, after = messages[:index], messages[index + 1 :]
        if message["role"] == "tool":
            yield "a tool's answer", [*before, *after], tools
        if message.get("reasoning_content"):
            fewer = {key: value for key, value in message.items() if key != "reasoning_content"}
            yield "what an assistant thought (reasoning)", [*before, fewer, *after], tools
        calls = message.get("tool_calls") or ()
        for place, call in enumerate(calls):
            fewer = {**message, "tool_calls": [*calls[:place], *calls[place + 1 :]]}
            yield f"a call of {_name(call)}", [*before, fewer, *after], tools


def _name(tool: Mapping[str, Any]) -> str:
    return repr(shorten(str(tool.get("function", tool).get("name")), 60))


def _continues(last: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Whether an assistant's message goes on in this one: Responses items hold a part of a message each."""
    if not last["role"] == entry["role"] == "assistant":
        return False
    only_thought = not last["content"] and "tool_calls" not in last and "reasoning_content" not in entry
    only_calls = not entry["content"] and "reasoning_content" not in entry and "tool_calls" in entry
    return only_thought or only_calls
