# SPDX-License-Identifier: Apache-2.0
"""From manifest rows to token-id prompts, turn by turn, without ever re-tokenising what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_rl_ext.guards.chat import mark_messages
from nemo_rl_ext.guards.encode import SafeEncoder
from nemo_rl_ext.manifest.row_media import template_content
from nemo_rl_ext.manifest.rows import ManifestRow, Message

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
        return self.chat(_chat(row.messages(0)))

    def chat(self, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        """Ids int32 [tokens] of messages in the form that chat templates take, ready for an answer."""
        return self._ids(self._text(messages))

    def following(self, row: ManifestRow, turn: int, prompt: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Ids of turn `turn`'s prompt: the last prompt, what was sampled on it, and the new messages.

        The text between is what the template puts after an answer; its end-of-turn token is left out where the
        policy sampled it itself.
        """
        chat: list[dict[str, Any]] = []
        for earlier in range(turn):
            chat += [*_chat(row.messages(earlier)), {"role": "assistant", "content": _ANSWER}]
        text = self._text([*chat, *_chat(row.messages(turn))])
        suffix = self._ids(text.rpartition(_ANSWER)[2])
        if len(sampled) and len(suffix) and sampled[-1] == suffix[0] == self.tokenizer.eos_token_id:
            suffix = suffix[1:]
        return np.concatenate((prompt, np.asarray(sampled, np.int32), suffix))

    def _text(self, chat: Sequence[dict[str, Any]]) -> str:
        """The template's text over marked content; only `_ids` may read it."""
        marked = mark_messages(self._encoder, chat)
        return str(self.tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True))

    def _ids(self, marked: str) -> np.ndarray:
        return np.array(self._encoder.encode_marked(marked).ids, dtype=np.int32)


def _chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form that chat templates take."""
    return [{"role": message.role, "content": template_content(message)} for message in messages]
