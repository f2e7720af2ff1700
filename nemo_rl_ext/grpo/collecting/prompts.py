# SPDX-License-Identifier: Apache-2.0
"""From manifest rows to token-id prompts, turn by turn, without ever re-tokenising what was sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from nemo_rl_ext.guards.chat import mark_messages
from nemo_rl_ext.guards.encode import SafeEncoder
from nemo_rl_ext.manifest.chat import (
    LeftOutError,
    chat_messages,
    chat_tools,
    has_tools,
    render_chat,
)
from nemo_rl_ext.manifest.rows import ManifestRow

_ANSWER = "\u241eanswer\u241e"
"""Stands for an assistant answer while a later turn is rendered; removed before tokenising."""


class PromptRenderer:
    """Renders rows with a checkpoint's own chat template. Ids are unexpanded: one context token per image.

    A manifest's text is content and never becomes a control token: `<image>` typed by a user is seven characters.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; a chat checkpoint is expected")
        self.tokenizer = tokenizer
        self._encoder = SafeEncoder(tokenizer)

    def first(self, row: ManifestRow) -> np.ndarray:
        """Ids int32 [tokens] of the prompt of a row's first turn."""
        return self.chat(chat_messages(row.messages(0)), chat_tools(row))

    def chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        """Ids int32 [tokens] of messages and tools in the form that chat templates take, ready for an answer.

        Raises:
            LeftOutError: where the template leaves out a tool, a call or a tool's answer.
        """
        return self._ids(self._text(messages, tools))

    def following(self, row: ManifestRow, turn: int, prompt: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Ids of turn `turn`'s prompt: the last prompt, what was sampled on it, and the new messages.

        The text between is what the template puts after an answer; its end-of-turn token is left out where the
        policy sampled it itself.
        """
        chat: list[dict[str, Any]] = []
        for earlier in range(turn):
            chat += [*chat_messages(row.messages(earlier)), {"role": "assistant", "content": _ANSWER}]
        text = self._text([*chat, *chat_messages(row.messages(turn))], chat_tools(row))
        suffix = self._ids(text.rpartition(_ANSWER)[2])
        if len(sampled) and len(suffix) and sampled[-1] == suffix[0] == self.tokenizer.eos_token_id:
            suffix = suffix[1:]
        return np.concatenate((prompt, np.asarray(sampled, np.int32), suffix))

    def _text(self, chat: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """The template's text over marked content; only `_ids` may read it."""
        marked = [mark_messages(self._encoder, part) for part in (chat, tools)]
        return render_chat(self.tokenizer, *marked)

    def _ids(self, marked: str) -> np.ndarray:
        return np.array(self._encoder.encode_marked(marked).ids, dtype=np.int32)


def require_prompts(rows: Iterable[ManifestRow], new_renderer: Callable[[], PromptRenderer]) -> None:
    """Refuse rows whose tools, calls or tools' answers the checkpoint's chat template does not write.

    Raises:
        ValueError: naming the first such row.
    """
    renderer: PromptRenderer | None = None
    nothing = np.empty(0, np.int32)
    for row in filter(has_tools, rows):
        renderer = renderer or new_renderer()
        try:
            renderer.first(row)
            for turn in range(1, row.num_turns):
                renderer.following(row, turn, nothing, nothing)
        except LeftOutError as error:
            raise ValueError(f"{row.where}: {error}") from None
