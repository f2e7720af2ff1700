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
from nemo_rl_ext.receipts.evidence import belongs_to, items_of_turn, same_media
from nemo_rl_ext.receipts.receipt import ItemReceipt, Receipt

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
    seen = np.empty(0, dtype=np.int64)
    num_media = 0
    shown: tuple[ItemReceipt, ...] | None = None
    for index, turn in enumerate(turns):
        prompt = np.asarray(turn.prompt_token_ids, dtype=np.int64)
        receipt = _own_receipt(turn, prompt)
        continues = bool(segments) and len(prompt) >= len(seen) and np.array_equal(prompt[: len(seen)], seen)
        if continues and shown is not None and receipt is not None:
            # Equal ids over other pixels: what was sampled before was drawn from another prompt.
            continues = same_media(shown, receipt.items[: len(shown)])
        if continues:
            new, first = prompt[len(seen) :], num_media
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
        answer = np.asarray(turn.token_ids, dtype=np.int64)
        segment.message_log += [
            {"role": "user", "token_ids": torch.from_numpy(new.copy())},
            {
                "role": "assistant",
                "token_ids": torch.from_numpy(answer.copy()),
                "generation_logprobs": torch.from_numpy(np.asarray(turn.logprobs, dtype=np.float32).copy()),
                "weight_versions": turn.weight_versions,
            },
        ]
        seen = np.concatenate((prompt, answer))
        num_media = turn.num_media
        shown = receipt.items if receipt is not None else None
    return segments


def _own_receipt(turn: EngineTurn, prompt: np.ndarray) -> Receipt | None:
    """The turn's receipt, if it is that of exactly this prompt; one of other ids is no evidence."""
    if turn.receipt is None or belongs_to(turn.receipt, prompt):
        return turn.receipt
    logger.warning(
        "a media receipt belongs to another prompt (%d tokens, here %d) and is not used",
        turn.receipt.prompt_tokens,
        len(prompt),
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
