# SPDX-License-Identifier: Apache-2.0
"""Plays rows through NeMo-Gym: agents, verifiers and rewards over HTTP, on the embedded engine's endpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_ext.align.runs import find_all_runs
from nemo_rl_ext.grpo.collecting.endpoint import SampleFacts
from nemo_rl_ext.grpo.collecting.gym import GymRollout, collect_rollouts, inline_images
from nemo_rl_ext.grpo.collecting.gym_servers import GymServers
from nemo_rl_ext.grpo.collecting.player import Conversation, Sampling, request_seed
from nemo_rl_ext.grpo.collecting.prompts import PromptRenderer
from nemo_rl_ext.grpo.engine.client import EngineClient
from nemo_rl_ext.manifest.row_media import media_by_turn
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.media.sources import read_media_bytes
from nemo_rl_ext.receipts.receipt import Receipt
from nemo_rl_ext.receipts.store import ReceiptStore, SampleStore, rollout_key
from nemo_rl_ext.rollout.aligner import StaticTurn
from nemo_rl_ext.rollout.gym_conversation import read_conversation
from nemo_rl_ext.rollout.pool import AlignerPool
from nemo_rl_ext.rollout.segments import EngineTurn


@dataclass(frozen=True, kw_only=True)
class GymPlayer:
    """As `player.Player`, with an agent of Gym at the other end.

    Gym hands on ids and log-probs and nothing else of the engine's: receipts wait in `receipts`, where the endpoint
    left them (None where the placeholder runs alone are to be evidence), the rest in `samples`.
    """

    servers: GymServers
    engine: EngineClient
    pool: AlignerPool
    renderer: PromptRenderer
    media_policy: MediaPolicy
    base_dir: Path
    max_turns: int
    samples: SampleStore[SampleFacts]
    receipts: ReceiptStore | None = None

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
        played, source = [], iter(zip(bodies, rollouts, strict=True))
        for row, turns, future in zip(rows, media, futures, strict=True):
            static = future.result()
            group = []
            for _ in range(num_generations):
                conversation = Conversation(
                    row=row, media=turns, static=static, prompt=self.renderer.first(row)
                )
                self._record(conversation, *next(source), before)
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

    def _record(
        self, conversation: Conversation, body: dict[str, Any], rollout: GymRollout, before: int
    ) -> None:
        conversation.reward, conversation.text = rollout.reward, rollout.text
        conversation.error = rollout.error or (
            "the verifier asked for this rollout to be masked" if rollout.masked else ""
        )
        if not rollout.turns:
            return
        conversation.media, conversation.static = self._shown(conversation, body, rollout)
        conversation.outgrown = rollout.outgrown
        keys = [rollout_key(turn.prompt_token_ids, turn.token_ids, turn.logprobs) for turn in rollout.turns]
        receipts: list[Receipt | None] = [None] * len(keys)
        if self.receipts is not None:
            receipts = self.receipts.get(keys)
        samples = self.samples.get(keys)
        for index, (turn, receipt, facts) in enumerate(zip(rollout.turns, receipts, samples, strict=True)):
            conversation.truncated |= facts is not None and facts.finish_reason == "length"
            conversation.turns.append(
                EngineTurn(
                    prompt_token_ids=conversation.prompts.add(turn.prompt_token_ids, turn.token_ids),
                    token_ids=turn.token_ids,
                    logprobs=turn.logprobs,
                    num_media=sum(len(media) for media in conversation.media[: index + 1]),
                    receipt=receipt,
                    # Without the engine's word it was drawn with the weights before, or newer ones.
                    weight_versions=((before, 0, 0),) if facts is None else facts.weight_versions,
                )
            )

    def _shown(
        self, conversation: Conversation, body: dict[str, Any], rollout: GymRollout
    ) -> tuple[list[tuple[MediaSource, ...]], list[StaticTurn]]:
        """The media of every turn as the agent's own items hold them, and the static tensors of those that have some.

        The prompt's own media are the manifest's, as long as the agent used exactly them. What a tool or the agent
        brought is known from the result alone, and so is what an agent left out.
        """
        found = read_conversation(body, rollout.result)
        media: list[tuple[MediaSource, ...]] = []
        static: list[StaticTurn] = []
        for index, turn in enumerate(found.turns):
            own = conversation.media[0] if conversation.media else ()
            if index == 0 and found.initial_unchanged and len(own) == len(turn.sources):
                media.append(own)
                static.append(conversation.static[0])
                continue
            runs = find_all_runs(np.asarray(turn.prompt_ids, dtype=np.int64), self.pool.family.grammars)
            where = f"{conversation.row.where}, turn {index}"
            media.append(tuple(MediaSource(ref=str(ref), where=where) for ref in turn.shown(len(runs))))
            static.append(StaticTurn(tensors=None))
        return media, static

    def answer(self, conversation: Conversation) -> str:
        """The last answer as Gym reports it."""
        return conversation.text
