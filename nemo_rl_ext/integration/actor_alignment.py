# SPDX-License-Identifier: Apache-2.0
"""The NemoGym actor's side of alignment: from a Gym result to turns, from aligned turns to a message log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.turn import AlignedTurn, align_turn
from nemo_rl_ext.align.verdict import Verdict
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration.aligner import NemoRLAligner, NemoRLAlignerConfig, NemoRLTurnRequest
from nemo_rl_ext.integration.record import RECORD_KEY, RolloutRecord
from nemo_rl_ext.integration.turns import IMAGE_TYPES, GymConversation, GymTurn, read_conversation
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.packed import pack
from nemo_rl_ext.rollout.pool import AlignerPool
from nemo_rl_ext.rollout.provenance import attach_rollout_media

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """The aligned turns of one rollout; `user` and `assistant` hold one entry per trainable turn.

    None in `user` is a turn whose media the trainer holds and this actor cannot judge (a static video). None in
    `assistant` is an answer without media tokens, which is every answer of a policy that cannot sample them.
    """

    user: tuple[AlignedTurn | None, ...]
    assistant: tuple[AlignedTurn | None, ...]
    static_attached: bool
    record: RolloutRecord

    @property
    def keeps_initial(self) -> bool:
        """Whether the first turn's media must come back with the rollout although the trainer holds static ones."""
        return self.static_attached and bool(self.user) and self.user[0] is not None and self.user[0].changed

    def apply(self, result: dict[str, Any]) -> dict[str, Any]:
        """Attach the media to a post-processed rollout, in place, and add the record.

        Raises:
            ValueError: when NeMo-RL wants media back that this plan left to the trainer, or found other turns.
        """
        omitted = result.get("_initial_multimodal_data_omitted", False)
        log = result["message_log"]
        users = [message for message in log if message["role"] == "user"]
        answers = [message for message in log if message["role"] == "assistant"]
        if len(users) != len(self.user):
            raise ValueError(
                f"row {self.record.row_id}: NeMo-RL found {len(users)} turns, alignment {len(self.user)}; the two "
                "must read a Gym result alike"
            )
        for index, (message, turn) in enumerate(zip(users, self.user, strict=True)):
            if turn is None or (index == 0 and omitted and not turn.changed):
                continue
            if index == 0 and self.static_attached and not turn.changed and turn.report.media:
                raise ValueError(
                    f"row {self.record.row_id}: NeMo-RL wants the first turn's media back, although the agent used "
                    "exactly the request's images; the two must read a Gym result alike"
                )
            _attach(message, turn)
        for message, turn in zip(answers, self.assistant, strict=True):
            if turn is not None:
                _attach(message, turn)
        if self.record.neutral:
            mark_neutral(result)
        result[RECORD_KEY] = self.record
        return result


def mark_neutral(result: dict[str, Any]) -> None:
    """Ask NeMo-RL to zero this row's loss and to keep it in its prompt group's advantages."""
    full = result["full_result"]
    full["instance_config"] = {**(full.get("instance_config") or {}), "mask_sample": True}


def _attach(message: dict[str, Any], turn: AlignedTurn) -> None:
    if turn.changed:
        attach_rollout_media(message, turn.tensors)
    elif turn.tensors is not None:
        message.update({key: pack(key, value) for key, value in turn.tensors.values.items()})


@dataclass(kw_only=True)
class ActorAlignment:
    """Plans the media of Gym results through a pool of aligners; lives in the NemoGym actor."""

    processor: Any
    tokenizer_config: Mapping[str, Any]
    settings: MediaAlignmentConfig
    pad_dynamic_image_shapes: bool = False
    max_model_len: int | None = None
    temporal_patch_size: int = 2
    family: NemotronFamily = field(init=False)
    pool: AlignerPool = field(init=False)
    _plans: dict[int, tuple[dict, RolloutPlan]] = field(default_factory=dict, init=False)
    _told: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.family = NemotronFamily.from_processor(self.processor, layout=Layout.REMOTE, dtype=torch.float32)
        roots = tuple(Path(root) for root in self.settings.media_roots)
        config = NemoRLAlignerConfig(
            model_dir=Path(str(self.tokenizer_config.get("name", ""))),
            media_policy=MediaPolicy(roots=roots, allow_remote=self.settings.allow_remote),
            layout=Layout.REMOTE,
            dtype=torch.float32,
            cache_bytes=self.settings.cache_bytes,
            trust_remote_code=True,
            tokenizer_config=dict(self.tokenizer_config),
            pad_dynamic_image_shapes=self.pad_dynamic_image_shapes,
        )
        self.pool = AlignerPool(
            config,
            self.settings.num_aligners,
            timeout_s=self.settings.aligner_timeout_s,
            aligner_class=NemoRLAligner,
            family=self.family,
        )
        logger.info(
            "media alignment is on: %d aligners, patch grids from %s",
            self.settings.num_aligners,
            "the engine's record where a turn has one, else the placeholder runs"
            if self.settings.evidence == "receipt"
            else "the placeholder runs",
        )

    async def encode_local_images(self, examples: Sequence[dict]) -> None:
        """Replace local image files by data URLs, in place, before NeMo-RL would do it on its event loop."""
        parts = list(_local_image_parts(examples))
        references = list(dict.fromkeys(_reference(part[key]) for part, key in parts))
        if not references:
            return
        encoded = await asyncio.gather(
            *(asyncio.wrap_future(self.pool.submit("encode", [reference])) for reference in references)
        )
        urls = {reference: url for reference, (url,) in zip(references, encoded, strict=True)}
        for part, key in parts:
            part[key] = urls[_reference(part[key])]

    async def plan(self, row: Mapping[str, Any], result: dict[str, Any], *, static_attached: bool) -> None:
        """Align a result's turns and keep the plan for `take`; a result without any media gets none.

        Raises:
            ValueError: for a verdict that the settings want raised, told in full.
        """
        conversation = read_conversation(row, result)
        if not conversation.has_media or not conversation.turns:
            return
        plan = await self._plan(row, conversation, static_attached)
        self._raise_if_asked(plan)
        self._plans[id(result)] = (result, plan)

    def take(self, result: dict[str, Any]) -> RolloutPlan | None:
        """The plan of a result, once; None for a result without media."""
        found = self._plans.pop(id(result), None)
        return found[1] if found is not None else None

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
        deferred = {0} if conversation.has_video else set()
        requests = self._requests(row_id, conversation, attached)
        wanted = [index for index in range(len(requests)) if index not in deferred]
        aligned = dict.fromkeys(range(len(requests)))
        submitted = [requests[index] for index in wanted]
        if submitted:
            done = await asyncio.wrap_future(self.pool.submit_align(submitted))
            aligned.update(zip(wanted, done, strict=True))
        answers = tuple(self._answer(row_id, index, turn) for index, turn in enumerate(conversation.turns))
        turns = [turn for turn in (*aligned.values(), *answers) if turn is not None]
        shipped = {
            id(turn.tensors): turn.tensors.num_bytes for turn in turns if turn.changed and turn.tensors
        }
        return RolloutPlan(
            user=tuple(aligned.values()),
            assistant=answers,
            static_attached=attached,
            record=RolloutRecord(
                row_id=row_id,
                reports=tuple(turn.report for turn in turns),
                num_changed=sum(turn.changed for turn in turns),
                bytes_shipped=sum(shipped.values()),
                has_video=conversation.has_video,
                family=self.family,
                temporal_patch_size=self.temporal_patch_size,
                settings=self.settings,
            ),
        )

    def _tell_source(self, turn: GymTurn) -> None:
        """Say once whether the recorded grids that were asked for do arrive."""
        if self._told or self.settings.evidence != "receipt" or not turn.sources:
            return
        self._told = True
        if turn.captured is None:
            logger.warning(
                "the first turn with images came without `media_grids`: patch grids come from the placeholder runs; "
                "the model server between the engine and this actor must hand the field on"
            )
        else:
            logger.info("the engine's patch grids arrive with the rollouts")

    def _requests(
        self, row_id: str, conversation: GymConversation, static_attached: bool
    ) -> list[NemoRLTurnRequest]:
        requests: list[NemoRLTurnRequest] = []
        earlier: tuple[MediaSource, ...] = ()
        for index, turn in enumerate(conversation.turns):
            media = tuple(
                MediaSource(ref=_reference(source), where=f"row {row_id}") for source in turn.sources
            )
            captured = None
            self._tell_source(turn)
            if self.settings.evidence == "receipt" and turn.captured is not None:
                # The engine records every image of the request, earlier turns' included.
                own = turn.captured[len(earlier) : len(earlier) + len(media)]
                captured = tuple(Grid(*grid) for grid in own) if len(own) == len(media) else None
            requests.append(
                NemoRLTurnRequest(
                    row_id=row_id,
                    turn=index,
                    token_ids=np.asarray(turn.prompt_ids, dtype=np.int64),
                    media=media,
                    captured=captured,
                    max_model_len=self.max_model_len,
                    earlier_media=earlier,
                    static_attached=static_attached and index == 0,
                )
            )
            earlier += media
        return requests

    def _answer(self, row_id: str, index: int, turn: Any) -> AlignedTurn | None:
        """Neutral media for media tokens that the policy sampled; they count as placeholders in the forward."""
        ids = np.asarray(turn.sampled_ids, dtype=np.int64)
        if not (ids == self.family.grammar.context_id).any():
            return None
        return align_turn(ids, (), family=self.family, row_id=row_id, turn=index)

    def _raise_if_asked(self, plan: RolloutPlan) -> None:
        asked = {
            verdict
            for verdict, action in (
                (Verdict.AMBIGUOUS, self.settings.on_ambiguous),
                (Verdict.UNALIGNABLE, self.settings.on_unalignable),
            )
            if action == "raise"
        }
        for report in plan.record.reports:
            verdicts = {item.verdict for item in report.media}
            if report.neutral and not verdicts & {Verdict.AMBIGUOUS, Verdict.UNALIGNABLE}:
                verdicts.add(Verdict.UNALIGNABLE)
            if verdicts & asked:
                raise ValueError(str(report))


def _row_id(row: Mapping[str, Any]) -> str:
    name = row.get("id")
    task = row.get("_ng_task_index")
    label = str(name) if name is not None else f"task {task}" if task is not None else "unnamed"
    return f"{label}, rollout {row.get('_rowidx', 0)}"


def _reference(source: Any) -> str:
    if isinstance(source, Mapping):
        source = source.get("url") or source.get("path") or ""
    if isinstance(source, str):
        return source
    from nemo_rl.data.multimodal_utils import image_to_data_url

    return image_to_data_url(source)


def _local_image_parts(examples: Sequence[dict]):
    """The (part, key) pairs that NeMo-RL's `encode_images_in_examples` would encode."""
    for example in examples:
        messages = example.get("responses_create_params", {}).get("input", [])
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                if not isinstance(part, dict) or part.get("type") not in IMAGE_TYPES:
                    continue
                key = next((name for name in ("image_url", "image", "url") if name in part), None)
                if key is None or not isinstance(part[key], str | dict):
                    continue
                reference = _reference(part[key])
                if reference and not reference.startswith(("http://", "https://", "data:")):
                    yield part, key
