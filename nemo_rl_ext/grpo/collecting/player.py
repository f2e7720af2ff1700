# SPDX-License-Identifier: Apache-2.0
"""Plays manifest rows on the engine, turn by turn: prompts in, expanded ids and samples out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_rl_ext.grpo.collecting.prompts import PromptRenderer
from nemo_rl_ext.grpo.engine.client import EngineClient
from nemo_rl_ext.grpo.engine.requests import GenerationRequest, GenerationResult, VideoInput
from nemo_rl_ext.manifest.row_media import media_by_turn
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.reader import MediaFacts, MediaSource
from nemo_rl_ext.rollout.aligner import StaticTurn
from nemo_rl_ext.rollout.pool import AlignerPool
from nemo_rl_ext.rollout.segments import EngineTurn, PromptBuffer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn; the training log-probs are restricted in the same way."""

    temperature: float
    max_new_tokens: int
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs_mode: str = "processed_logprobs"
    """Which log-probs the engine reports (vLLM's names); the trainer's are made alike."""


@dataclass(kw_only=True)
class Conversation:
    """One generation of a row while it is played. `reward` is set where the player's own environment scores.

    `error` says why nothing was sampled, `outgrown` why a later turn was not: its prompt no longer fits the context.
    `truncated` says that an answer ran into its limit before its end.
    """

    row: ManifestRow
    media: list[tuple[MediaSource, ...]]
    static: list[StaticTurn]
    prompt: np.ndarray
    turns: list[EngineTurn] = field(default_factory=list)
    prompts: PromptBuffer = field(default_factory=PromptBuffer)
    error: str = ""
    outgrown: str = ""
    truncated: bool = False
    text: str = ""
    reward: float | None = None

    def media_inputs(self) -> tuple[tuple[np.ndarray, ...], tuple[VideoInput, ...]]:
        """Decoded images and videos of every turn so far and of the one to come, each in prompt order."""
        seen = [
            (fact, pixels)
            for turn in self.static[: len(self.turns) + 1]
            for fact, pixels in zip(turn.facts, turn.pixels, strict=True)
        ]
        images = tuple(pixels for fact, pixels in seen if fact.kind == "image")
        videos = tuple(
            VideoInput(frames=pixels, metadata=_video_metadata(fact))
            for fact, pixels in seen
            if fact.kind == "video"
        )
        return images, videos


@dataclass(frozen=True, kw_only=True)
class Player:
    """Runs conversations on the engine. With `receipts` what the engine says of its media is kept."""

    engine: EngineClient
    pool: AlignerPool
    renderer: PromptRenderer
    max_turns: int
    receipts: bool

    def play(
        self, rows: Sequence[ManifestRow], sampling: Sampling, num_generations: int, *, step: int
    ) -> list[list[Conversation]]:
        """Run every row's turns on the engine, `num_generations` times each."""
        media = [media_by_turn(row)[: self.max_turns] for row in rows]
        static = [future.result() for future in [self.pool.submit_static(turns) for turns in media]]
        played = [
            [
                Conversation(row=row, media=turns, static=tensors, prompt=self.renderer.first(row))
                for _ in range(num_generations)
            ]
            for row, turns, tensors in zip(rows, media, static, strict=True)
        ]
        for turn in range(max(len(turns) for turns in media)):
            self._play_turn(played, turn, sampling, step)
        return played

    def answer(self, conversation: Conversation) -> str:
        """The last answer as text, special tokens left out."""
        if not conversation.turns:
            return ""
        return str(self.renderer.tokenizer.decode(conversation.turns[-1].token_ids, skip_special_tokens=True))

    def _play_turn(self, played: list[list[Conversation]], turn: int, sampling: Sampling, step: int) -> None:
        """One engine request per distinct prompt: a group's first turn is one request with n samples."""
        batches: list[list[Conversation]] = []
        for group in played:
            alive = [
                c
                for c in group
                if turn < len(c.media) and not c.error and not c.outgrown and not self._unreadable(c, turn)
            ]
            batches += ([alive] if alive else []) if turn == 0 else [[c] for c in alive]
        requests = []
        for number, batch in enumerate(batches):
            first = batch[0]
            if turn:
                first.prompt = self.renderer.following(
                    first.row, turn, first.prompt, first.turns[-1].token_ids
                )
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
                    seed=request_seed(sampling.seed, step, turn, number),
                    allowed_token_ids=sampling.allowed_token_ids,
                    banned_token_ids=sampling.banned_token_ids,
                )
            )
        for batch, result in zip(batches, self.engine.generate(requests), strict=True):
            for index, conversation in enumerate(batch):
                self._record(conversation, result, index)

    def _unreadable(self, conversation: Conversation, turn: int) -> bool:
        conversation.error = conversation.error or conversation.static[turn].error
        return bool(conversation.error)

    def _record(self, conversation: Conversation, result: GenerationResult, index: int) -> None:
        if result.error is not None:
            if result.exceeds_context and conversation.turns:
                conversation.outgrown = result.error
            else:
                conversation.error = result.error
            return
        output = result.outputs[index]
        conversation.truncated |= output.finish_reason == "length"
        conversation.turns.append(
            EngineTurn(
                prompt_token_ids=conversation.prompts.add(result.prompt_token_ids, output.token_ids),
                token_ids=output.token_ids,
                logprobs=output.logprobs,
                num_media=sum(len(turn) for turn in conversation.media[: len(conversation.turns) + 1]),
                receipt=result.receipt if self.receipts else None,
                weight_versions=output.weight_versions
                or ((result.weight_version_start, 0, len(output.token_ids)),),
            )
        )


def _video_metadata(fact: MediaFacts) -> dict[str, Any]:
    """What vLLM wants to know of frames that are sampled already."""
    return {
        "total_num_frames": fact.total_frames,
        "fps": fact.fps,
        "duration": fact.total_frames / fact.fps,
        "video_backend": "opencv",
        "frames_indices": list(fact.frame_indices),
        "do_sample_frames": False,
    }


def request_seed(*numbers: int) -> int:
    """One reproducible 31-bit seed from a run's seed and the place of a request in it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)
