# SPDX-License-Identifier: Apache-2.0
"""From the requests of one conversation to the sequences that training runs on.

Each turn of a conversation is one engine request whose prompt repeats everything before it. As long as a prompt
continues the previous one token for token, the turns form one sequence. Where it does not (the engine re-sized an
earlier image, or a prefix was replaced) the sampled tokens before and after were drawn from different prompts, and
each is trained on the prompt that it was drawn from: a new segment starts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nemo_rl_ext.align.runs import Grammar, find_all_runs
from nemo_rl_ext.receipts.evidence import items_of_turn, same_media
from nemo_rl_ext.receipts.receipt import ItemReceipt, PromptDigest, Receipt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineTurn:
    """One request of a conversation and one of its samples.

    `prompt_token_ids` int [tokens] as the engine expanded them, `token_ids` int [sampled] and `logprobs` float
    [sampled] of the assistant's answer. `num_media` counts the media of the whole request, earlier turns included;
    `receipt` is what the engine said of them, where it did. `weight_versions` are vLLM's spans of the answer,
    `(version, start, end)`: tokens `[start, end)` were drawn with these weights; more than one when an update came in
    between, an empty one where its extent is not known.
    """

    prompt_token_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    num_media: int
    receipt: Receipt | None = None
    weight_versions: tuple[tuple[int, int, int], ...] = ()


class PromptBuffer:
    """The prompts of one conversation, each a view of one buffer as long as it continues what came before it.

    A buffer that is full is copied to one of twice the length, and the views of the old one stay as they are: all
    prompts together take a small multiple of the longest.
    """

    def __init__(self) -> None:
        self._ids: np.ndarray = np.empty(0, np.int32)
        self._used = 0

    def add(self, prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
        """The prompt [tokens] of a request, as a view where it can be one; `answer` is what was sampled on it."""
        if not self._used or not _starts_with(prompt, self._ids[: self._used]):
            # The first prompt of a group is one array for all its generations.
            self._ids, self._used = prompt, len(prompt)
            self._extend(answer)
            return prompt
        self._extend(prompt[self._used :])
        view = self._ids[: self._used]
        self._extend(answer)
        return view

    def _extend(self, ids: np.ndarray) -> None:
        needed = self._used + len(ids)
        if needed > len(self._ids):
            grown = np.empty(2 * needed, self._ids.dtype)
            grown[: self._used] = self._ids[: self._used]
            self._ids = grown
        self._ids[self._used : needed] = ids
        self._used = needed


def _starts_with(ids: np.ndarray, beginning: np.ndarray) -> bool:
    return len(ids) >= len(beginning) and np.array_equal(ids[: len(beginning)], beginning)


@dataclass(frozen=True, kw_only=True)
class UserTurn:
    """A message of a segment that carries media: items `first_media` up to `last_media` of the conversation.

    `receipt` is what the engine said of the request's media from `first_media` on, counted in the message's own ids.
    """

    message: int
    turn: int
    first_media: int
    last_media: int
    receipt: tuple[ItemReceipt, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Resize:
    """An earlier image whose run changed between two turns: lengths in context tokens, index in the conversation."""

    turn: int
    media: int
    before: int
    after: int

    def __str__(self) -> str:
        return (
            f"media {self.media} had {self.before} tokens in turn {self.turn - 1} "
            f"and {self.after} in turn {self.turn}"
        )


@dataclass(kw_only=True)
class Segment:
    """One training sequence: a message log, its media-bearing turns, and why it does not continue the last one."""

    message_log: list[dict[str, Any]]
    user_turns: list[UserTurn] = field(default_factory=list)
    resizes: tuple[Resize, ...] = ()

    def weight_versions(self) -> set[int]:
        """Versions of the weights that drew this sequence's samples."""
        return {span[0] for message in self.message_log for span in message.get("weight_versions", ())}


def to_segments(turns: Sequence[EngineTurn], grammars: Sequence[Grammar]) -> list[Segment]:
    """Split a conversation into segments. Every sampled token is in exactly one assistant message.

    Messages are dicts with `role`, `token_ids` int64 [tokens] and, for assistants, `generation_logprobs`
    float32 [tokens], as in NeMo-RL's message logs. In a segment that restarts, the conversation so far is one user
    message: its earlier answers are context there, not samples.
    """
    segments: list[Segment] = []
    before: EngineTurn | None = None
    digest = PromptDigest()
    shown: tuple[ItemReceipt, ...] | None = None
    for index, turn in enumerate(turns):
        prompt = np.asarray(turn.prompt_token_ids)
        continues = before is not None and _continues(prompt, before)
        num_seen = len(before.prompt_token_ids) + len(before.token_ids) if before and continues else 0
        if not continues:
            digest = PromptDigest()
        digest.update(prompt[digest.num_tokens :])
        receipt = _own_receipt(turn, digest)
        if continues and shown is not None and receipt is not None:
            # Equal ids over other pixels: what was sampled before was drawn from another prompt.
            continues = same_media(shown, receipt.items[: len(shown)])
        if before is not None and continues:
            new, first = prompt[num_seen:], before.num_media
            segment = segments[-1]
        else:
            resizes = _resizes(index, turns, grammars) if index else ()
            new, first = prompt, 0
            segment = Segment(message_log=[], resizes=resizes)
            segments.append(segment)
        segment.user_turns.append(
            UserTurn(
                message=len(segment.message_log),
                turn=index,
                first_media=first,
                last_media=turn.num_media,
                receipt=items_of_turn(receipt, first, len(prompt) - len(new))
                if receipt is not None
                else None,
            )
        )
        segment.message_log += [
            {"role": "user", "token_ids": _tensor(new, np.int64)},
            {
                "role": "assistant",
                "token_ids": _tensor(turn.token_ids, np.int64),
                "generation_logprobs": _tensor(turn.logprobs, np.float32),
                "weight_versions": turn.weight_versions,
            },
        ]
        before = turn
        shown = receipt.items if receipt is not None else None
    return segments


def _tensor(values: np.ndarray, dtype: type) -> torch.Tensor:
    """A tensor of its own."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def _continues(prompt: np.ndarray, before: EngineTurn) -> bool:
    """Whether a prompt repeats an earlier one and its answer, token for token."""
    earlier, answer = np.asarray(before.prompt_token_ids), np.asarray(before.token_ids)
    if len(prompt) < len(earlier) + len(answer):
        return False
    # Views of one `PromptBuffer` are equal where they overlap.
    known = prompt.base is not None and prompt.base is earlier.base and _same_start(prompt, earlier)
    if not known and not _starts_with(prompt, earlier):
        return False
    return np.array_equal(prompt[len(earlier) : len(earlier) + len(answer)], answer)


def _same_start(left: np.ndarray, right: np.ndarray) -> bool:
    return (
        left.dtype == right.dtype
        and left.strides == right.strides
        and left.__array_interface__["data"] == right.__array_interface__["data"]
    )


def _own_receipt(turn: EngineTurn, prompt: PromptDigest) -> Receipt | None:
    """The turn's receipt, if it is that of exactly this prompt; one of other ids is no evidence."""
    receipt = turn.receipt
    if receipt is None or (receipt.prompt_tokens == prompt.num_tokens and receipt.prompt == prompt.hex()):
        return receipt
    logger.warning(
        "a media receipt belongs to another prompt (%d tokens, here %d) and is not used",
        receipt.prompt_tokens,
        prompt.num_tokens,
    )
    return None


def _resizes(index: int, turns: Sequence[EngineTurn], grammars: Sequence[Grammar]) -> tuple[Resize, ...]:
    """The runs that turn `index` shares with the turn before it and that have another length there."""
    before = find_all_runs(turns[index - 1].prompt_token_ids, grammars).lengths.tolist()
    after = find_all_runs(turns[index].prompt_token_ids, grammars).lengths.tolist()
    return tuple(
        Resize(turn=index, media=media, before=old, after=new)
        for media, (old, new) in enumerate(zip(before, after, strict=False))
        if old != new
    )
