# SPDX-License-Identifier: Apache-2.0
"""Generates prompt groups, turn by turn, and aligns every turn of every rollout before training sees it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.grpo.buffer import TrajectoryBuffer
from nemo_rl_ext.grpo.engine_client import EngineClient
from nemo_rl_ext.grpo.prompts import PromptRenderer, media_by_turn
from nemo_rl_ext.grpo.requests import GenerationRequest, GenerationResult, VideoInput
from nemo_rl_ext.grpo.rollouts import PromptGroup, Rollout, merge_static
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.rollout.aligner import StaticTurn, TurnRequest
from nemo_rl_ext.rollout.packed import pack
from nemo_rl_ext.rollout.pool import AlignerPool
from nemo_rl_ext.rollout.provenance import attach_rollout_media, reattach_static_media
from nemo_rl_ext.rollout.reader import MediaFacts, MediaSource
from nemo_rl_ext.rollout.segments import EngineTurn, Segment, UserTurn, to_segments

logger = logging.getLogger(__name__)

Reward = Callable[[ManifestRow, str], float]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn; the training log-probs are restricted in the same way."""

    temperature: float
    max_new_tokens: int
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class AlignmentOptions:
    """What the collector needs of `grpo.media_alignment`."""

    enabled: bool
    captured: bool
    share_static: bool
    max_model_len: int


@dataclass(kw_only=True)
class _Conversation:
    """One generation of a row while it is played."""

    row: ManifestRow
    media: list[tuple[MediaSource, ...]]
    static: list[StaticTurn]
    prompt: np.ndarray
    turns: list[EngineTurn] = field(default_factory=list)
    error: str = ""

    def media_inputs(self) -> tuple[tuple[np.ndarray, ...], tuple[VideoInput, ...]]:
        """Decoded images and videos of every turn so far and of the one to come, each in prompt order."""
        seen = [
            (fact, pixels)
            for turn in self.static[: len(self.turns) + 1]
            for fact, pixels in zip(turn.facts, turn.pixels, strict=True)
        ]
        images = tuple(pixels for fact, pixels in seen if fact.kind == "image")
        videos = tuple(
            VideoInput(frames=pixels, metadata=_video_metadata(fact)) for fact, pixels in seen if fact.kind == "video"
        )
        return images, videos


class Collector:
    """Plays rows on the engine and turns what comes back into prompt groups."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        pool: AlignerPool,
        renderer: PromptRenderer,
        reward: Reward,
        sampling: Sampling,
        options: AlignmentOptions,
        num_generations: int,
        max_turns: int,
    ) -> None:
        self.engine, self.pool, self.renderer, self.reward = engine, pool, renderer, reward
        self.sampling, self.options = sampling, options
        self.num_generations, self.max_turns = num_generations, max_turns

    def run(
        self, buffer: TrajectoryBuffer, steps: Iterator[tuple[int, Sequence[ManifestRow]]], name: str = "collector"
    ) -> threading.Thread:
        """Collect steps ahead of training in a thread of its own, until they end or the buffer closes."""

        def work() -> None:
            try:
                for step, rows in steps:
                    if not buffer.wait_to_collect(step):
                        return
                    buffer.put(step, self.collect(rows, step=step))
            except BaseException as error:
                buffer.fail(error)

        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def collect(self, rows: Sequence[ManifestRow], *, step: int) -> list[PromptGroup]:
        """One prompt group per row, in order; every group has all its rollouts."""
        played = self.play(rows, self.sampling, self.num_generations, step=step)
        for conversation in itertools.chain.from_iterable(played):
            self._keep_row(conversation)
        futures = []
        for conversations in played:
            segments = [to_segments(conversation.turns, self.pool.family.grammar) for conversation in conversations]
            requests, places = self._turn_requests(conversations, segments)
            future = self.pool.submit_align(requests) if self.options.enabled and requests else None
            futures.append((conversations, segments, places, future))
        groups = []
        for row, (conversations, segments, places, future) in zip(rows, futures, strict=True):
            aligned = future.result() if future is not None else []
            rollouts = self._assemble(conversations, segments, places, aligned)
            groups.append(PromptGroup(row=row, rollouts=rollouts, step=step))
        return groups

    def _keep_row(self, conversation: _Conversation) -> None:
        """A row that nothing could be sampled for stays a training sequence: its prompt without media or answer."""
        if conversation.turns:
            return
        text = conversation.prompt[conversation.prompt != self.pool.family.grammar.context_id]
        nothing = np.empty(0, np.int32)
        conversation.turns.append(
            EngineTurn(prompt_token_ids=text, token_ids=nothing, logprobs=nothing.astype(np.float32), num_media=0)
        )

    def images_of(self, row: ManifestRow) -> tuple[np.ndarray, ...]:
        """The decoded images of a row, uint8 RGB [height, width, 3], in prompt order."""
        turns = self.pool.submit_static(media_by_turn(row)).result()
        return tuple(pixels for turn in turns for pixels in turn.pixels)

    def scores(self, rows: Sequence[ManifestRow], sampling: Sampling) -> list[float]:
        """The reward of one answer per row; 0 where nothing could be sampled."""
        played = self.play(rows, sampling, 1, step=0)
        return [
            0.0 if conversation.error else self.reward(conversation.row, self._decode(conversation))
            for (conversation,) in played
        ]

    def play(
        self, rows: Sequence[ManifestRow], sampling: Sampling, num_generations: int, *, step: int
    ) -> list[list[_Conversation]]:
        """Run every row's turns on the engine, `num_generations` times each."""
        media = [media_by_turn(row)[: self.max_turns] for row in rows]
        static = [future.result() for future in [self.pool.submit_static(turns) for turns in media]]
        played = [
            [
                _Conversation(row=row, media=turns, static=tensors, prompt=self.renderer.first(row))
                for _ in range(num_generations)
            ]
            for row, turns, tensors in zip(rows, media, static, strict=True)
        ]
        for turn in range(max(len(turns) for turns in media)):
            self._play_turn(played, turn, sampling, step)
        return played

    def _play_turn(self, played: list[list[_Conversation]], turn: int, sampling: Sampling, step: int) -> None:
        """One engine request per distinct prompt: a group's first turn is one request with n samples."""
        batches: list[list[_Conversation]] = []
        for group in played:
            alive = [c for c in group if turn < len(c.media) and not c.error and not self._unreadable(c, turn)]
            batches += ([alive] if alive else []) if turn == 0 else [[c] for c in alive]
        requests = []
        for number, batch in enumerate(batches):
            first = batch[0]
            if turn:
                first.prompt = self.renderer.following(first.row, turn, first.prompt, first.turns[-1].token_ids)
            images, videos = first.media_inputs()
            requests.append(
                GenerationRequest(
                    name=first.row.row_id,
                    prompt_token_ids=first.prompt,
                    images=images,
                    videos=videos,
                    n=len(batch),
                    max_new_tokens=sampling.max_new_tokens,
                    temperature=sampling.temperature,
                    seed=_seed(sampling.seed, step, turn, number),
                    allowed_token_ids=sampling.allowed_token_ids,
                    banned_token_ids=sampling.banned_token_ids,
                )
            )
        for batch, result in zip(batches, self.engine.generate(requests), strict=True):
            for index, conversation in enumerate(batch):
                self._record(conversation, result, index)

    def _unreadable(self, conversation: _Conversation, turn: int) -> bool:
        conversation.error = conversation.error or conversation.static[turn].error
        return bool(conversation.error)

    def _record(self, conversation: _Conversation, result: GenerationResult, index: int) -> None:
        if result.error is not None:
            conversation.error = result.error
            return
        output = result.outputs[index]
        captured = self._captured(conversation, result) if self.options.captured else None
        conversation.turns.append(
            EngineTurn(
                prompt_token_ids=result.prompt_token_ids,
                token_ids=output.token_ids,
                logprobs=output.logprobs,
                num_media=sum(len(turn) for turn in conversation.media[: len(conversation.turns) + 1]),
                captured=captured,
                weight_versions=tuple(sorted({version for version, *_ in output.weight_versions}))
                or (result.weight_version_start,),
            )
        )

    def _captured(self, conversation: _Conversation, result: GenerationResult) -> tuple[Grid, ...] | None:
        """The engine's grids in prompt order; it lists images and videos apart. None where the lists do not add up."""
        images = iter([Grid(*grid) for grid in result.grids])
        videos = iter([Grid(*grid[1:]) for grid in result.video_grids])
        media = [source for turn in conversation.media[: len(conversation.turns) + 1] for source in turn]
        counts = [sum(source.kind == kind for source in media) for kind in ("image", "video")]
        if counts != [len(result.grids), len(result.video_grids)]:
            return None
        return tuple(next(videos if source.kind == "video" else images) for source in media)

    def _turn_requests(
        self, conversations: Sequence[_Conversation], segments: Sequence[Sequence[Segment]]
    ) -> tuple[list[TurnRequest], list[tuple[int, int, int]]]:
        """What to align, and where each result belongs: (rollout, segment, message)."""
        grammar = self.pool.family.grammar
        requests: list[TurnRequest] = []
        places: list[tuple[int, int, int]] = []
        for index, (conversation, sequences) in enumerate(zip(conversations, segments, strict=True)):
            every = tuple(source for turn in conversation.media for source in turn)
            facts = tuple(fact for turn in conversation.static for fact in turn.facts)
            for number, segment in enumerate(sequences):
                by_message = {turn.message: turn for turn in segment.user_turns}
                for place, message in enumerate(segment.message_log):
                    turn = by_message.get(place)
                    sampled_context = bool((message["token_ids"] == grammar.context_id).any())
                    if turn is None and not sampled_context:
                        continue
                    media = every[turn.first_media : turn.last_media] if turn is not None else ()
                    if not media and not sampled_context:
                        continue
                    seen = conversation.turns[turn.turn].num_media if turn is not None else 0
                    requests.append(
                        TurnRequest(
                            row_id=conversation.row.row_id,
                            turn=turn.turn if turn is not None else segment.user_turns[-1].turn,
                            token_ids=message["token_ids"].numpy(),
                            media=media,
                            facts=facts[turn.first_media : turn.last_media] if turn is not None else (),
                            static_grids=self._static_grids(conversation, number, turn),
                            captured=turn.captured if turn is not None else None,
                            max_model_len=self.options.max_model_len if media else None,
                            earlier_media=every[: turn.first_media] if turn is not None else (),
                            later_media=every[turn.last_media : seen] if turn is not None else (),
                        )
                    )
                    places.append((index, number, place))
        return requests, places

    def _static_grids(
        self, conversation: _Conversation, segment: int, turn: UserTurn | None
    ) -> tuple[Grid, ...] | None:
        """Grids of the static tensors that this message will be given, when it is one of the prompt's own turns."""
        if turn is None or segment > 0 or not self.options.share_static:
            return None
        tensors = conversation.static[turn.turn].tensors
        return tensors.grids if tensors is not None else None

    def _assemble(
        self,
        conversations: Sequence[_Conversation],
        segments: Sequence[Sequence[Segment]],
        places: Sequence[tuple[int, int, int]],
        aligned: Sequence[AlignedTurn],
    ) -> list[Rollout]:
        rollouts = []
        for conversation, sequences in zip(conversations, segments, strict=True):
            text = self._decode(conversation)
            rollout = Rollout(
                row_id=conversation.row.row_id,
                segments=list(sequences),
                text=text,
                reward=0.0 if conversation.error else self.reward(conversation.row, text),
            )
            if conversation.error:
                rollout.masked = True
                rollout.extra_reasons[Reason.GENERATION_FAILED] = (
                    f"row {rollout.row_id!r} ({conversation.row.where}): {conversation.error}"
                )
            for segment in sequences:
                for resize in segment.resizes:
                    rollout.extra_reasons[Reason.EARLIER_TURN_RESIZED] = f"row {rollout.row_id!r}: {resize}"
            rollouts.append(rollout)
        for (index, segment, message), turn in zip(places, aligned, strict=False):
            rollout = rollouts[index]
            rollout.aligned.append(turn)
            rollout.masked |= turn.report.neutral
            if turn.report.repaired:
                rollout.repaired_segments.add(segment)
            if turn.changed:
                attach_rollout_media(rollout.segments[segment].message_log[message], turn.tensors)
        for conversation, rollout in zip(conversations, rollouts, strict=True):
            self._reattach(conversation, rollout)
        return rollouts

    def _decode(self, conversation: _Conversation) -> str:
        """The last answer as text, special tokens left out."""
        if not conversation.turns:
            return ""
        return self.renderer.tokenizer.decode(conversation.turns[-1].token_ids, skip_special_tokens=True)

    def _reattach(self, conversation: _Conversation, rollout: Rollout) -> None:
        """Give every unmarked user turn the prompt's static tensors: the step that alignment protects against."""
        for number, segment in enumerate(rollout.segments):
            if number and self.options.enabled:
                continue  # a restarted sequence has no static counterpart; all its media are the aligner's
            static_log = [_static_message(conversation, turn) for turn in segment.user_turns]
            views = {"input_message_log": segment.message_log[:1], "message_log": segment.message_log}
            reattach_static_media(views, static_log)


def _video_metadata(fact: MediaFacts) -> dict[str, Any]:
    """What vLLM wants to know of frames that are sampled already."""
    return {
        "total_num_frames": fact.total_frames,
        "fps": fact.fps,
        "duration": fact.total_frames / fact.fps,
        "video_backend": "decord",
        "frames_indices": list(fact.frame_indices),
        "do_sample_frames": False,
    }


def _static_message(conversation: _Conversation, turn: UserTurn) -> dict:
    """A user message with the static tensors of the media that its counterpart holds."""
    message: dict = {"role": "user"}
    parts, seen = [], 0
    for media, static in zip(conversation.media, conversation.static, strict=True):
        if turn.first_media <= seen < turn.last_media:
            parts.append(static.tensors)
        seen += len(media)
    tensors = merge_static(parts)
    if tensors is not None:
        message |= {key: pack(key, value) for key, value in tensors.values.items()}
    return message


def _seed(*numbers: int) -> int:
    """One reproducible 31-bit seed from a run's seed and the place of a request in it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)
