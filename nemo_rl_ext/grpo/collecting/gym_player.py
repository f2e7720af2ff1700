# SPDX-License-Identifier: Apache-2.0
"""Plays rows through NeMo-Gym: agents, verifiers and rewards over HTTP, on the embedded engine's endpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_ext.grpo.collecting.gym import GymRollout, collect_rollouts, inline_images
from nemo_rl_ext.grpo.collecting.gym_servers import GymServers
from nemo_rl_ext.grpo.collecting.player import Conversation, Sampling, request_seed
from nemo_rl_ext.grpo.collecting.prompts import PromptRenderer
from nemo_rl_ext.grpo.engine.client import EngineClient
from nemo_rl_ext.manifest.row_media import media_by_turn
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.sources import read_media_bytes
from nemo_rl_ext.rollout.pool import AlignerPool
from nemo_rl_ext.rollout.segments import EngineTurn


@dataclass(frozen=True, kw_only=True)
class GymPlayer:
    """As `player.Player`, with an agent of Gym at the other end.

    Gym knows nothing of grids, so alignment works from the runs alone.
    """

    servers: GymServers
    engine: EngineClient
    pool: AlignerPool
    renderer: PromptRenderer
    media_policy: MediaPolicy
    base_dir: Path
    max_turns: int

    def play(
        self, rows: Sequence[ManifestRow], sampling: Sampling, num_generations: int, *, step: int
    ) -> list[list[Conversation]]:
        """Run every row through its agent, `num_generations` times each; one request per rollout."""
        media = [media_by_turn(row)[: self.max_turns] for row in rows]
        futures = [self.pool.submit_static(turns) for turns in media]
        bodies = [
            self._body(row, seed=request_seed(sampling.seed, step, number, generation))
            for number, row in enumerate(rows)
            for generation in range(num_generations)
        ]
        before = self.engine.version
        rollouts = collect_rollouts(
            self.servers,
            bodies,
            params={"temperature": sampling.temperature, "max_output_tokens": sampling.max_new_tokens},
        )
        versions = tuple(range(before, self.engine.version + 1))
        played, source = [], iter(rollouts)
        for row, turns, future in zip(rows, media, futures, strict=True):
            static = future.result()
            group = []
            for _ in range(num_generations):
                conversation = Conversation(
                    row=row, media=turns, static=static, prompt=self.renderer.first(row)
                )
                self._record(conversation, next(source), versions)
                group.append(conversation)
            played.append(group)
        return played

    def _body(self, row: ManifestRow, *, seed: int) -> dict[str, Any]:
        def read(ref: str) -> bytes:
            return read_media_bytes(ref, self.media_policy, self.base_dir, where=row.where)

        body = inline_images(json.loads(row.model_dump_json(by_alias=True, exclude_none=True)), read)
        metadata = body["responses_create_params"].setdefault("metadata", {})
        metadata["extra_body"] = json.dumps({**json.loads(metadata.get("extra_body", "{}")), "seed": seed})
        return body

    def _record(self, conversation: Conversation, rollout: GymRollout, versions: tuple[int, ...]) -> None:
        conversation.reward, conversation.text = rollout.reward, rollout.text
        conversation.error = rollout.error or (
            "the verifier asked for this rollout to be masked" if rollout.masked else ""
        )
        for index, turn in enumerate(rollout.turns):
            conversation.turns.append(
                EngineTurn(
                    prompt_token_ids=turn.prompt_token_ids,
                    token_ids=turn.token_ids,
                    logprobs=turn.logprobs,
                    num_media=sum(len(media) for media in conversation.media[: index + 1]),
                    weight_versions=versions,
                )
            )

    def answer(self, conversation: Conversation) -> str:
        """The last answer as Gym reports it."""
        return conversation.text
