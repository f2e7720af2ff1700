# SPDX-License-Identifier: Apache-2.0
"""Generates prompt groups ahead of training, every turn of every rollout aligned before training sees it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.grpo.collecting.assembly import AlignmentOptions, GroupAssembly
from nemo_rl_ext.grpo.collecting.buffer import TrajectoryBuffer
from nemo_rl_ext.grpo.collecting.gym_player import GymPlayer
from nemo_rl_ext.grpo.collecting.player import Conversation, Player, Sampling
from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup
from nemo_rl_ext.manifest.row_media import media_by_turn
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.rollout.pool import AlignerPool

Reward = Callable[[ManifestRow, str], float]

CALLS_PER_ALIGNER = 2
"""Calls into which a step's work is cut for each aligner, so that none idles behind one heavy group."""


class Collector:
    """Plays rows on the engine and turns what comes back into prompt groups."""

    def __init__(
        self,
        *,
        player: Player | GymPlayer,
        pool: AlignerPool,
        reward: Reward,
        sampling: Sampling,
        options: AlignmentOptions,
        num_generations: int,
    ) -> None:
        self.player, self.pool, self.reward = player, pool, reward
        self.sampling, self.options, self.num_generations = sampling, options, num_generations

    def run(
        self,
        buffer: TrajectoryBuffer,
        steps: Iterator[tuple[int, Sequence[ManifestRow]]],
        name: str = "collector",
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
        played = self.player.play(rows, self.sampling, self.num_generations, step=step)
        grammars = self.pool.family.grammars
        assemblies = [GroupAssembly(conversations, self.options, grammars) for conversations in played]
        aligned = self._align(assemblies)
        return [
            PromptGroup(row=row, rollouts=assembly.rollouts(next(aligned), self._score), step=step)
            for row, assembly in zip(rows, assemblies, strict=True)
        ]

    def _align(self, assemblies: Sequence[GroupAssembly]) -> Iterator[list[AlignedTurn]]:
        """The results of each group's requests, in a few calls for all groups: each call costs a round trip."""
        per_call = max(1, -(-len(assemblies) // (CALLS_PER_ALIGNER * self.pool.num_aligners)))
        parts = [assemblies[first : first + per_call] for first in range(0, len(assemblies), per_call)]
        requests = [[request for assembly in part for request in assembly.requests] for part in parts]
        futures = [self.pool.submit_align(part) if part else None for part in requests]
        for part, future in zip(parts, futures, strict=True):
            results = iter(future.result() if future is not None else [])
            for assembly in part:
                yield list(itertools.islice(results, len(assembly.requests)))

    def _score(self, conversation: Conversation) -> tuple[str, float]:
        text = self.player.answer(conversation)
        if conversation.reward is not None:
            return text, conversation.reward
        # A conversation that ended early has no last answer to score.
        return text, 0.0 if conversation.outgrown else self.reward(conversation.row, text)

    def images_of(self, row: ManifestRow) -> tuple[np.ndarray, ...]:
        """The decoded media of a row, uint8 RGB, in prompt order."""
        turns = self.pool.submit_static(media_by_turn(row)).result()
        return tuple(pixels for turn in turns for pixels in turn.pixels)

    def scores(self, rows: Sequence[ManifestRow], sampling: Sampling) -> list[float]:
        """The reward of one answer per row; 0 where nothing could be sampled."""
        played = self.player.play(rows, sampling, 1, step=0)
        return [0.0 if conversation.error else self._score(conversation)[1] for (conversation,) in played]
