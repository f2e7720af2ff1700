# SPDX-License-Identifier: Apache-2.0
"""The NemoGym actor with its pixel work moved to aligners.

A subclass in an importable module pickles by reference, so that in the actor's process the base class's methods see
NeMo-RL's real modules. Nothing of NeMo-RL is patched here: the helper that streams Gym results is wrapped so that
each result is aligned before NeMo-RL post-processes it, and post-processing runs without a processor, so that it
neither decodes nor resizes on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator
from typing import Any

import nemo_rl.environments.nemo_gym as nemo_gym
from nemo_rl.experience.failures import RolloutDataFailure

from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration.actor_alignment import ActorAlignment, RolloutPlan
from nemo_rl_ext.integration.install import install_in_process
from nemo_rl_ext.integration.settings import ACTOR_KEY

logger = logging.getLogger(__name__)

# Read when this module is first imported, before the driver binds the name to the subclass below.
UpstreamNemoGym: type = nemo_gym.NemoGym.__ray_metadata__.modified_class


class AlignedNemoGym(UpstreamNemoGym):
    """NeMo-RL's `NemoGym` whose rollouts come back with media that fit their own placeholder runs."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        install_in_process()
        cfg = dict(cfg)
        gym = dict(cfg.get("initial_global_config_dict") or {})
        handed_over = gym.pop(ACTOR_KEY, None)
        cfg["initial_global_config_dict"] = gym
        super().__init__(cfg)
        self._alignment: ActorAlignment | None = None
        if handed_over is None or self._processor is None:
            return
        handed_over = dict(handed_over)
        context = handed_over.pop("context", {})
        self._alignment = ActorAlignment(
            processor=self._processor,
            tokenizer_config=cfg["tokenizer_config"],
            pad_dynamic_image_shapes=self._pad_dynamic_image_shapes,
            settings=MediaAlignmentConfig(**handed_over),
            **context,
        )
        # Post-processing decodes and attaches on the event loop wherever it finds a processor.
        self._processor = None

    async def run_rollouts(
        self,
        nemo_gym_examples: list[dict],
        timer_prefix: str,
        deduplicate_multimodal_data: bool = False,
    ) -> AsyncGenerator[tuple[int, dict, dict | None], None]:
        """Stream rollouts as NeMo-RL does, each aligned by then."""
        alignment: ActorAlignment | None = getattr(self, "_alignment", None)
        if alignment is None or self.rch is None:
            async for item in UpstreamNemoGym.run_rollouts(
                self, nemo_gym_examples, timer_prefix, deduplicate_multimodal_data
            ):
                yield item
            return
        if not isinstance(self.rch, _AligningCollection):
            self.rch = _AligningCollection(self.rch, alignment)
        try:
            await alignment.encode_local_images(nemo_gym_examples)
        except (ValueError, RuntimeError) as error:
            raise RolloutDataFailure(str(error)) from None
        call = self.rch.open(nemo_gym_examples, static_attached=deduplicate_multimodal_data)
        try:
            async for item in UpstreamNemoGym.run_rollouts(
                self, nemo_gym_examples, timer_prefix, deduplicate_multimodal_data
            ):
                yield item
        finally:
            self.rch.close(call)

    def _postprocess_nemo_gym_to_nemo_rl_result(
        self,
        nemo_gym_row: dict,
        nemo_gym_result: dict,
        tokenizer: Any,
        *,
        include_initial_multimodal_data: bool = True,
    ) -> dict:
        alignment: ActorAlignment | None = getattr(self, "_alignment", None)
        plan: RolloutPlan | None = alignment.take(nemo_gym_result) if alignment is not None else None
        include = include_initial_multimodal_data or (plan is not None and plan.keeps_initial)
        result = UpstreamNemoGym._postprocess_nemo_gym_to_nemo_rl_result(
            self, nemo_gym_row, nemo_gym_result, tokenizer, include_initial_multimodal_data=include
        )
        if plan is None:
            return result
        try:
            return plan.apply(result)
        except ValueError as error:
            raise RolloutDataFailure(str(error)) from None


class _AligningCollection:
    """NeMo-Gym's rollout helper, whose results are aligned before anybody sees them.

    Everything else is the helper's own.
    """

    def __init__(self, inner: Any, alignment: ActorAlignment) -> None:
        self._inner, self._alignment = inner, alignment
        self._static_attached: dict[int, bool] = {}
        self._tasks: dict[int, list[asyncio.Task]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, examples: list[dict], *, static_attached: bool) -> int:
        """Announce the call that will hand over exactly this list."""
        self._static_attached[id(examples)] = static_attached
        return id(examples)

    def close(self, call: int) -> None:
        """Give up what is left of a call; a failed rollout ends the stream of its siblings."""
        self._static_attached.pop(call, None)
        for task in self._tasks.pop(call, []):
            task.cancel()

    def run_examples(self, examples: list[dict], **options: Any) -> Iterator[Awaitable[tuple[dict, dict]]]:
        static_attached = self._static_attached.get(id(examples), False)
        # Eager, so that one rollout's pixels do not hold up its siblings; in completion order, as the inner helper.
        tasks = [
            asyncio.ensure_future(self._aligned(task, static_attached))
            for task in self._inner.run_examples(examples=examples, **options)
        ]
        self._tasks[id(examples)] = tasks
        return iter(asyncio.as_completed(tasks))

    async def _aligned(self, task: Awaitable[tuple[dict, dict]], static_attached: bool) -> tuple[dict, dict]:
        row, result = await task
        # Anything else is a failed rollout, which NeMo-RL itself knows how to report.
        if isinstance(result, dict) and isinstance(result.get("response"), dict):
            try:
                await self._alignment.plan(row, result, static_attached=static_attached)
            except (ValueError, RuntimeError) as error:
                raise RolloutDataFailure(str(error)) from None
        return row, result
