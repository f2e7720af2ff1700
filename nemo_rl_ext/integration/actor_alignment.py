# SPDX-License-Identifier: Apache-2.0
"""The NemoGym actor's side of alignment: from a Gym result to turns, from aligned turns to a message log."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from nemo_rl_ext.align.families.family import Layout, MediaTensors
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.runs import find_all_runs, has_context
from nemo_rl_ext.align.timestamps import names_frames
from nemo_rl_ext.align.turn import AlignedTurn, align_turn
from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration.aligner import NemoRLAligner, NemoRLAlignerConfig, NemoRLTurnRequest
from nemo_rl_ext.integration.clips import (
    ClipSettings,
    can_decode_files,
    can_read,
    clip_references,
    with_video,
)
from nemo_rl_ext.integration.local_images import local_image_parts, reference_of
from nemo_rl_ext.integration.neutral import NeutralMedia, mixed_sizes
from nemo_rl_ext.integration.refusal import raise_if_asked
from nemo_rl_ext.integration.rollout_plan import RolloutPlan
from nemo_rl_ext.integration.shared_turns import SharedTurns
from nemo_rl_ext.integration.static_processor import StaticProcessor
from nemo_rl_ext.integration.travelling_record import TravellingRecord
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.receipts.evidence import belongs_to, items_of_turn
from nemo_rl_ext.receipts.receipt import Receipt
from nemo_rl_ext.receipts.store import actor_handle, rollout_key
from nemo_rl_ext.rollout.fitting import TurnRequest
from nemo_rl_ext.rollout.gym_conversation import GymConversation, GymTurn, read_conversation
from nemo_rl_ext.rollout.pool import AlignerPool
from nemo_rl_ext.rollout.prevention import refuse_resized

logger = logging.getLogger(__name__)


class AlignmentPool(Protocol):
    """What the actor asks of its aligners: `rollout.pool.AlignerPool`, or another that answers alike."""

    def submit_align(self, turns: Sequence[TurnRequest], /) -> Future[list[AlignedTurn]]: ...

    def submit(self, method: str, work: Sequence[Any], /) -> Future[list[Any]]: ...


@dataclass(kw_only=True)
class ActorAlignment:
    """Plans the media of Gym results through a pool of aligners; lives in the NemoGym actor.

    `max_model_len` is the engine's context length, `temporal_patch_size` counts the frames of one video tubelet.
    With `repairs_clips` the aligners can read clips; without, a clip is left to the comparison with static tensors.
    """

    neutral: NeutralMedia
    pool: AlignmentPool
    settings: MediaAlignmentConfig
    max_model_len: int | None = None
    temporal_patch_size: int = 2
    repairs_clips: bool = False
    shares: bool = False
    _turns: SharedTurns = field(default_factory=SharedTurns, init=False)
    _source_is_reported: bool = field(default=False, init=False)
    _store: Any = field(default=None, init=False)

    @classmethod
    def start(
        cls,
        settings: MediaAlignmentConfig,
        *,
        processor: Any,
        tokenizer_config: Mapping[str, Any],
        pad_dynamic_image_shapes: bool = False,
        one_size_per_row: bool = False,
        clips: Mapping[str, Any] | None = None,
        share: bool = False,
        pixel_dtype: str = "float32",
        **context: Any,
    ) -> ActorAlignment:
        """With a pool of its own, whose aligners load the processor from the same `policy.tokenizer` block.

        `one_size_per_row`: the training backend takes no images of several sizes in one row. `clips`: the fields of
        `ClipSettings`, for recipes with video. `share`: the job has brokers, and repaired media travel as references
        into the object store, in `pixel_dtype`.
        """
        family = family_of(processor, layout=Layout.REMOTE, dtype=torch.float32)
        clip_settings = ClipSettings(**clips) if clips is not None else None
        if clip_settings is not None:
            family = with_video(family, clip_settings.tiler_of(family))
        config = NemoRLAlignerConfig(
            model_dir=Path(str(tokenizer_config.get("name", ""))),
            media_policy=MediaPolicy(
                roots=tuple(Path(root) for root in settings.media_roots), allow_remote=settings.allow_remote
            ),
            layout=Layout.REMOTE,
            dtype=getattr(torch, pixel_dtype) if share else torch.float32,
            share=share,
            cache_bytes=settings.cache_bytes,
            trust_remote_code=True,
            tokenizer_config=dict(tokenizer_config),
            pad_dynamic_image_shapes=pad_dynamic_image_shapes,
            clips=clip_settings,
        )
        pool = AlignerPool(
            config,
            settings.num_aligners,
            num_cpus=settings.aligner_cpus,
            timeout_s=settings.aligner_timeout_s,
            aligner_class=NemoRLAligner,
            family=family,
        )
        logger.info(
            "media alignment is on: %d aligners, patch grids from %s",
            settings.num_aligners,
            "the engine's record where a turn has one, else the placeholder runs"
            if settings.evidence == "receipt"
            else "the placeholder runs",
        )
        if clip_settings is not None:
            logger.info(
                "clips are %s",
                "repaired from their files and cached frames"
                if can_decode_files()
                else "repaired from cached frames; those in files are compared and masked, for want of torchcodec",
            )
        neutral = NeutralMedia(
            family=family,
            counters=StaticProcessor(processor, family).counters,
            one_size=one_size_per_row,
        )
        return cls(
            neutral=neutral,
            pool=pool,
            settings=settings,
            repairs_clips=clip_settings is not None,
            shares=share,
            **context,
        )

    async def encode_local_images(self, examples: Sequence[dict[str, Any]]) -> None:
        """Replace local image files by data URLs, in place, before NeMo-RL would do it on its event loop."""
        parts = list(local_image_parts(examples))
        references = list(dict.fromkeys(reference_of(part[key]) for part, key in parts))
        if not references:
            return
        encoded = await asyncio.gather(
            *(asyncio.wrap_future(self.pool.submit("encode", [reference])) for reference in references)
        )
        urls = {reference: url for reference, (url,) in zip(references, encoded, strict=True)}
        for part, key in parts:
            part[key] = urls[reference_of(part[key])]

    async def plan(
        self, row: Mapping[str, Any], result: Mapping[str, Any], *, static_attached: bool
    ) -> RolloutPlan | None:
        """The aligned turns of a Gym result; None for a result without any media.

        Raises:
            ValueError: for a verdict that the settings want raised, with the whole report.
        """
        conversation = await self._with_receipts(read_conversation(row, result))
        if not conversation.has_media or not conversation.turns:
            return None
        plan = await self._plan(row, conversation, static_attached)
        raise_if_asked(plan.record.reports, self.settings)
        return plan

    async def _plan(
        self, row: Mapping[str, Any], conversation: GymConversation, static_attached: bool
    ) -> RolloutPlan:
        row_id = _row_id(row)
        first = conversation.turns[0].sources
        attached = (
            static_attached
            and conversation.initial_unchanged
            and len(first) == len(conversation.initial_sources)
        )
        clips = tuple(
            MediaSource(ref=reference, kind="video", where=f"row {row_id}")
            for reference in clip_references(row)
        )
        readable = self.repairs_clips and not first and all(can_read(clip.ref) for clip in clips)
        deferred = {0} if conversation.has_video and not readable else set()
        requests = self._requests(row_id, conversation, attached, clips)
        wanted = [index for index in range(len(requests)) if index not in deferred]
        aligned: list[AlignedTurn | None] = [None] * len(requests)
        if wanted:
            done = await self._turns.align(self.pool.submit_align, [requests[index] for index in wanted])
            for index, turn in zip(wanted, done, strict=True):
                aligned[index] = (
                    self._judged_clip(turn, requests[0]) if clips and index == 0 else self._completed(turn)
                )
        answers = tuple(self._answer(row_id, index, turn) for index, turn in enumerate(conversation.turns))
        if self.settings.prevent:
            aligned = [turn and refuse_resized(turn) for turn in aligned]
        turns = [turn for turn in (*aligned, *answers) if turn is not None]
        reports = [turn.report for turn in turns]
        if self.neutral.one_size and any(turn.changed for turn in turns):
            reports = mixed_sizes(reports)
        # Equal repairs of one rollout share their tensors, which travel once.
        shipped: list[MediaTensors] = []
        for turn in turns:
            if turn.changed and turn.tensors is not None and not any(turn.tensors is one for one in shipped):
                shipped.append(turn.tensors)
        return RolloutPlan(
            user=tuple(aligned),
            assistant=answers,
            static_attached=attached,
            record=TravellingRecord(
                row_id=row_id,
                reports=tuple(reports),
                num_changed=sum(turn.changed for turn in turns),
                bytes_shipped=sum(tensors.num_bytes for tensors in shipped),
                has_video=conversation.has_video,
                neutral_media=self.neutral,
                temporal_patch_size=self.temporal_patch_size,
                settings=self.settings,
                shares=self.shares,
            ),
        )

    async def _with_receipts(self, conversation: GymConversation) -> GymConversation:
        """The conversation with the engine's receipts: those that came with it, else those in the job's store.

        NeMo-Gym's model server drops fields that it does not know, so most come from the store.
        """
        if self.settings.evidence != "receipt" or not conversation.has_media:
            return conversation
        if self._store is None:
            self._store = actor_handle()

        def wants_more(turn: GymTurn) -> bool:
            return bool(turn.logprobs) and (turn.receipt is None or turn.receipt.has_places_only)

        wanted = [turn for turn in conversation.turns if wants_more(turn)]
        found: list[Receipt | None] = []
        if wanted and self._store is not None:
            keys = [rollout_key(turn.request_ids, turn.sampled_ids, turn.logprobs) for turn in wanted]
            found = await asyncio.wrap_future(self._store.get.remote(keys).future())
        stored = iter(found or [None] * len(wanted))
        turns = tuple(
            dataclasses.replace(turn, receipt=next(stored) or turn.receipt) if wants_more(turn) else turn
            for turn in conversation.turns
        )
        self._report_source(turns)
        return dataclasses.replace(conversation, turns=turns)

    def _report_source(self, turns: Sequence[GymTurn]) -> None:
        """Say once whether the receipts that were asked for do arrive."""
        if self._source_is_reported or not turns:
            return
        self._source_is_reported = True
        if turns[0].receipt is None:
            logger.warning(
                "the first rollout with media came without a receipt: the placeholder runs alone are evidence. "
                "Receipts come from vLLM workers of this job, under the rollout's ids and log-probs"
            )
        else:
            logger.info("the engine's media receipts arrive with the rollouts")

    def _requests(
        self,
        row_id: str,
        conversation: GymConversation,
        static_attached: bool,
        clips: tuple[MediaSource, ...],
    ) -> list[NemoRLTurnRequest]:
        requests: list[NemoRLTurnRequest] = []
        earlier: tuple[MediaSource, ...] = ()
        for index, turn in enumerate(conversation.turns):
            ids = np.asarray(turn.prompt_ids, dtype=np.int64)
            shown = turn.shown(len(find_all_runs(ids, self.neutral.family.grammars)))
            media = tuple(MediaSource(ref=reference_of(source), where=f"row {row_id}") for source in shown)
            if index == 0:
                # A row holds a clip or images, and its clip is the first turn's.
                media += clips
            receipt = None
            if turn.receipt is not None and belongs_to(turn.receipt, np.asarray(turn.request_ids)):
                receipt = items_of_turn(turn.receipt, len(earlier), len(turn.request_ids) - len(ids))
            requests.append(
                NemoRLTurnRequest(
                    row_id=row_id,
                    turn=index,
                    token_ids=ids,
                    media=media,
                    receipt=receipt,
                    max_model_len=self.max_model_len,
                    earlier_media=earlier,
                    static_attached=static_attached and index == 0,
                )
            )
            earlier += media
        return requests

    def _answer(self, row_id: str, index: int, turn: GymTurn) -> AlignedTurn | None:
        """Neutral media for media tokens that the policy sampled; they count as placeholders in the forward."""
        ids = np.asarray(turn.sampled_ids, dtype=np.int64)
        family = self.neutral.family
        if not has_context(ids, family.grammars):
            return None
        return self._completed(align_turn(ids, (), family=family, sampled=True, row_id=row_id, turn=index))

    def _judged_clip(self, turn: AlignedTurn, request: NemoRLTurnRequest) -> AlignedTurn | None:
        """A clip's turn; None where the prompt names no frames: then static tensors are all there is to compare."""
        if turn.report.reasons() != (Reason.TUBELET_COUNT,):
            return turn
        text = self.neutral.family.decode(request.token_ids.tolist())
        return turn if text is None or names_frames(text) else None

    def _completed(self, turn: AlignedTurn) -> AlignedTurn:
        """A turn whose neutral media, wherever they were made, have every key that NeMo-RL's own have."""
        if turn.tensors is None or not turn.report.neutral:
            return turn
        return replace(turn, tensors=self.neutral.completed(turn.tensors))


def _row_id(row: Mapping[str, Any]) -> str:
    name = row.get("id")
    task = row.get("_ng_task_index")
    label = str(name) if name is not None else f"task {task}" if task is not None else "unnamed"
    return f"{label}, rollout {row.get('_rowidx', 0)}"
