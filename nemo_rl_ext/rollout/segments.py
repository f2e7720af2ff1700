# SPDX-License-Identifier: Apache-2.0
"""From the requests of one conversation to the sequences that training runs on.

Each turn of a conversation is one engine request whose prompt repeats everything before it. As long as a prompt
continues the previous one token for token, the turns form one sequence. Where it does not (the engine re-sized an
earlier image, or a prefix was replaced) the sampled tokens before and after were drawn from different prompts, and
each is trained on the prompt that it was drawn from: a new segment starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.runs import Grammar, find_runs


@dataclass(frozen=True, kw_only=True)
class EngineTurn:
    """One request of a conversation and one of its samples.

    `prompt_token_ids` int [tokens] as the engine expanded them, `token_ids` int [sampled] and `logprobs` float
    [sampled] of the assistant's answer. `num_media` counts the media of the whole request, earlier turns included;
    `captured` are their grids where the engine recorded them, `weight_versions` the versions of the weights that
    drew the answer, more than one when an update came in between.
    """

    prompt_token_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    num_media: int
    captured: tuple[Grid, ...] | None = None
    weight_versions: tuple[int, ...] = (0,)


@dataclass(frozen=True, kw_only=True)
class UserTurn:
    """A message of a segment that carries media: items `first_media` up to `last_media` of the conversation."""

    message: int
    turn: int
    first_media: int
    last_media: int
    captured: tuple[Grid, ...] | None = None


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
        return {version for message in self.message_log for version in message.get("weight_versions", ())}


def to_segments(turns: Sequence[EngineTurn], grammar: Grammar) -> list[Segment]:
    """Split a conversation into segments. Every sampled token is in exactly one assistant message.

    Messages are dicts with `role`, `token_ids` int64 [tokens] and, for assistants, `generation_logprobs`
    float32 [tokens], as in NeMo-RL's message logs. In a segment that restarts, the conversation so far is one user
    message: its earlier answers are context there, not samples.
    """
    segments: list[Segment] = []
    seen = np.empty(0, dtype=np.int64)
    num_media = 0
    for index, turn in enumerate(turns):
        prompt = np.asarray(turn.prompt_token_ids, dtype=np.int64)
        continues = bool(segments) and len(prompt) >= len(seen) and np.array_equal(prompt[: len(seen)], seen)
        if continues:
            new, first = prompt[len(seen) :], num_media
            segment = segments[-1]
        else:
            resizes = _resizes(index, turns, grammar) if index else ()
            new, first = prompt, 0
            segment = Segment(message_log=[], resizes=resizes)
            segments.append(segment)
        captured = turn.captured[first : turn.num_media] if turn.captured is not None else None
        segment.user_turns.append(
            UserTurn(
                message=len(segment.message_log),
                turn=index,
                first_media=first,
                last_media=turn.num_media,
                captured=captured,
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
    return segments


def _resizes(index: int, turns: Sequence[EngineTurn], grammar: Grammar) -> tuple[Resize, ...]:
    """The runs that turn `index` shares with the turn before it and that have another length there."""
    before = find_runs(turns[index - 1].prompt_token_ids, grammar).lengths.tolist()
    after = find_runs(turns[index].prompt_token_ids, grammar).lengths.tolist()
    return tuple(
        Resize(turn=index, media=media, before=old, after=new)
        for media, (old, new) in enumerate(zip(before, after, strict=False))
        if old != new
    )
