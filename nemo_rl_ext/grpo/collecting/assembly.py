# SPDX-License-Identifier: Apache-2.0
"""From played conversations to aligned rollouts: what to align, and where each aligned turn belongs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.runs import Grammar, has_context
from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.grpo.collecting.player import Conversation
from nemo_rl_ext.grpo.collecting.rollouts import Rollout, merge_static
from nemo_rl_ext.media.reader import MediaFacts
from nemo_rl_ext.rollout.fitting import TurnRequest
from nemo_rl_ext.rollout.packed import pack
from nemo_rl_ext.rollout.prevention import refuse_resized
from nemo_rl_ext.rollout.provenance import attach_rollout_media, reattach_static_media
from nemo_rl_ext.rollout.segments import EngineTurn, UserTurn, to_segments

Score = Callable[[Conversation], tuple[str, float]]
"""The last answer of a conversation as text, and its reward."""


@dataclass(frozen=True, kw_only=True)
class AlignmentOptions:
    """What the collector needs of `grpo.media_alignment`, and whether truncated rollouts are masked.

    `max_model_len` is the budget that the images of a request share, None where they share none. `ordered` says that
    the run writes the engine's requests itself, so that the order of their media is certain; an agent may reorder them.
    With `prevent` a re-sized image masks its row.
    """

    enabled: bool
    share_static: bool
    max_model_len: int | None
    ordered: bool
    prevent: bool = False
    overlong_filtering: bool = False


class GroupAssembly:
    """The generations of one prompt between the engine and training."""

    def __init__(
        self, conversations: Sequence[Conversation], options: AlignmentOptions, grammars: Sequence[Grammar]
    ) -> None:
        self.conversations, self.options, self.grammars = conversations, options, grammars
        for conversation in conversations:
            _keep_row(conversation, grammars)
        self.segments = [to_segments(conversation.turns, grammars) for conversation in conversations]
        self.requests, self._places = self._turn_requests() if options.enabled else ([], [])

    def _turn_requests(self) -> tuple[list[TurnRequest], list[tuple[int, int, int, int]]]:
        """What to align, each turn once, and where results belong: (rollout, segment, message, request).

        The generations of a prompt differ in their answers; what the engine was shown is mostly the same turn.
        """
        requests: list[TurnRequest] = []
        numbers: dict[Hashable, int] = {}
        places: list[tuple[int, int, int, int]] = []
        for index, (conversation, sequences) in enumerate(
            zip(self.conversations, self.segments, strict=True)
        ):
            every = tuple(source for turn in conversation.media for source in turn)
            facts = _facts(conversation)
            for number, segment in enumerate(sequences):
                by_message = {turn.message: turn for turn in segment.user_turns}
                for place, message in enumerate(segment.message_log):
                    turn = by_message.get(place)
                    sampled_context = has_context(message["token_ids"].numpy(), self.grammars)
                    if turn is None and not sampled_context:
                        continue
                    media = every[turn.first_media : turn.last_media] if turn is not None else ()
                    if not media and not sampled_context:
                        continue
                    seen = conversation.turns[turn.turn].num_media if turn is not None else 0
                    request = TurnRequest(
                        row_id=conversation.row.row_id,
                        turn=turn.turn if turn is not None else segment.user_turns[-1].turn,
                        token_ids=message["token_ids"].numpy(),
                        media=media,
                        facts=_known(facts[turn.first_media : turn.last_media]) if turn is not None else (),
                        static_grids=self._static_grids(conversation, number, turn),
                        receipt=turn.receipt if turn is not None else None,
                        ordered=self.options.ordered,
                        sampled=message["role"] == "assistant",
                        max_model_len=self.options.max_model_len if media else None,
                        earlier_media=every[: turn.first_media] if turn is not None else (),
                        later_media=every[turn.last_media : seen] if turn is not None else (),
                    )
                    known = numbers.setdefault(request.identity(), len(requests))
                    if known == len(requests):
                        requests.append(request)
                    places.append((index, number, place, known))
        return requests, places

    def _static_grids(
        self, conversation: Conversation, segment: int, turn: UserTurn | None
    ) -> tuple[Grid, ...] | None:
        """Grids of the static tensors that this message will be given, when it is one of the prompt's own turns."""
        if turn is None or segment > 0 or not self.options.share_static:
            return None
        tensors = conversation.static[turn.turn].tensors
        return tensors.grids if tensors is not None else None

    def rollouts(self, aligned: Sequence[AlignedTurn], score: Score) -> list[Rollout]:
        """One rollout per generation, its media attached, from the results of `requests` in order."""
        rollouts = []
        for conversation, sequences in zip(self.conversations, self.segments, strict=True):
            text, reward = score(conversation)
            rollout = Rollout(
                row_id=conversation.row.row_id,
                segments=list(sequences),
                text=text,
                reward=None if conversation.error else reward,
                truncated=conversation.truncated or bool(conversation.outgrown),
            )
            where = f"row {rollout.row_id!r} ({conversation.row.where})"
            if conversation.error:
                rollout.masked = True
                rollout.extra_reasons[Reason.GENERATION_FAILED] = f"{where}: {conversation.error}"
            if conversation.outgrown:
                rollout.extra_reasons[Reason.CONTEXT_OUTGROWN] = (
                    f"{where}, turn {len(conversation.turns)}: {conversation.outgrown}"
                )
            if rollout.truncated and self.options.overlong_filtering:
                rollout.masked = True
                rollout.extra_reasons[Reason.OVERLONG_FILTERED] = f"{where}: truncated"
            for segment in sequences:
                for resize in segment.resizes:
                    rollout.extra_reasons[Reason.EARLIER_TURN_RESIZED] = f"row {rollout.row_id!r}: {resize}"
            rollouts.append(rollout)
        seen: set[int] = set()
        for index, number, message, request in self._places:
            rollout, turn = rollouts[index], aligned[request]
            if request in seen:
                # Its work was done once, for the first generation.
                turn = dataclasses.replace(turn, report=dataclasses.replace(turn.report, repair_ms=0.0))
            if self.options.prevent:
                turn = refuse_resized(turn)
            seen.add(request)
            rollout.aligned.append(turn)
            rollout.masked |= turn.report.neutral
            if turn.report.repaired:
                rollout.repaired_segments.add(number)
            if turn.changed:
                attach_rollout_media(rollout.segments[number].message_log[message], turn.tensors)
        for conversation, rollout in zip(self.conversations, rollouts, strict=True):
            self._reattach(conversation, rollout)
        return rollouts

    def _reattach(self, conversation: Conversation, rollout: Rollout) -> None:
        """Give every unmarked user turn the prompt's static tensors: the step that alignment protects against."""
        for number, segment in enumerate(rollout.segments):
            # A restarted sequence has no static counterpart; all its media are the aligner's.
            turns = segment.user_turns if not number or not self.options.enabled else ()
            views = {"input_message_log": segment.message_log[:1], "message_log": segment.message_log}
            reattach_static_media(views, [_static_message(conversation, turn) for turn in turns])


def _keep_row(conversation: Conversation, grammars: Sequence[Grammar]) -> None:
    """A row that nothing could be sampled for stays a training sequence: its prompt without media or answer."""
    if conversation.turns:
        return
    media = [grammar.context_id for grammar in grammars]
    text = conversation.prompt[~np.isin(conversation.prompt, media)]
    nothing = np.empty(0, np.int32)
    conversation.turns.append(
        EngineTurn(
            prompt_token_ids=text,
            token_ids=nothing,
            logprobs=nothing.astype(np.float32),
            num_media=0,
            weight_versions=(),
        )
    )


def _facts(conversation: Conversation) -> list[MediaFacts | None]:
    """What was measured of each medium of a conversation; None of what nobody opened yet."""
    return [
        fact
        for media, static in zip(conversation.media, conversation.static, strict=True)
        for fact in (static.facts or (None,) * len(media))
    ]


def _known(facts: Sequence[MediaFacts | None]) -> tuple[MediaFacts, ...] | None:
    known = tuple(fact for fact in facts if fact is not None)
    return known if len(known) == len(facts) else None


def _static_message(conversation: Conversation, turn: UserTurn) -> dict[str, Any]:
    """A user message with the static tensors of the media that its counterpart holds."""
    message: dict[str, Any] = {"role": "user"}
    parts, seen = [], 0
    for media, static in zip(conversation.media, conversation.static, strict=True):
        if turn.first_media <= seen < turn.last_media:
            parts.append(static.tensors)
        seen += len(media)
    tensors = merge_static(parts)
    if tensors is not None:
        message |= {key: pack(key, value) for key, value in tensors.values.items()}
    return message
