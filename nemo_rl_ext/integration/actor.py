# SPDX-License-Identifier: Apache-2.0
"""The NemoGym actor with its pixel work moved to aligners.

A subclass in an importable module pickles by reference, so that in the actor's process the base class's methods see
NeMo-RL's real modules. Nothing of NeMo-RL is patched here: the helper that streams Gym results is wrapped so that
each result is aligned before NeMo-RL post-processes it, and post-processing runs without a processor, so that it
neither decodes nor resizes on the event loop.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator
from typing import Any

import nemo_rl.environments.nemo_gym as nemo_gym
from nemo_rl.experience.failures import RolloutDataFailure

from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration.actor_alignment import ActorAlignment
from nemo_rl_ext.integration.in_process import install_in_process
from nemo_rl_ext.integration.rollout_plan import RolloutPlan
from nemo_rl_ext.integration.rollout_result import PLAN_KEY
from nemo_rl_ext.integration.settings import ACTOR_KEY

logger = logging.getLogger(__name__)

# Read when this module is first imported, before the driver binds the name to the subclass below.
UpstreamNemoGym: Any = nemo_gym.NemoGym.__ray_metadata__.modified_class


class AlignedNemoGym(UpstreamNemoGym):  # type: ignore[misc]  # known only at run time
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
        self._alignment = ActorAlignment.start(
            MediaAlignmentConfig(**handed_over),
            processor=self._processor,
            tokenizer_config=cfg["tokenizer_config"],
            pad_dynamic_image_shapes=self._pad_dynamic_image_shapes,
            **context,
        )
        # Post-processing decodes and attaches on the event loop wherever it finds a processor.
        self._processor: Any = None

    async def run_rollouts(
        self,
        nemo_gym_examples: list[dict[str, Any]],
        timer_prefix: str,
        deduplicate_multimodal_data: bool = False,
        *args: Any,
        **options: Any,
    ) -> AsyncGenerator[tuple[int, dict[str, Any], dict[str, Any] | None], None]:
        """Stream rollouts as NeMo-RL does, each aligned by then."""
        alignment: ActorAlignment | None = getattr(self, "_alignment", None)
        if alignment is None or self.rch is None:
            async for item in UpstreamNemoGym.run_rollouts(
                self, nemo_gym_examples, timer_prefix, deduplicate_multimodal_data, *args, **options
            ):
                yield item
            return
        try:
            await alignment.encode_local_images(nemo_gym_examples)
        except (ValueError, RuntimeError) as error:
            raise RolloutDataFailure(str(error)) from None
        # Calls run side by side in one actor: each gets a copy of it that holds the helper of this call.
        call = copy.copy(self)
        call.rch = AligningCollection(self.rch, alignment, static_attached=deduplicate_multimodal_data)
        try:
            async for item in UpstreamNemoGym.run_rollouts(
                call, nemo_gym_examples, timer_prefix, deduplicate_multimodal_data, *args, **options
            ):
                yield item
        finally:
            call.rch.close()

    def _postprocess_nemo_gym_to_nemo_rl_result(
        self,
        nemo_gym_row: dict[str, Any],
        nemo_gym_result: dict[str, Any],
        tokenizer: Any,
        *,
        include_initial_multimodal_data: bool = True,
        **options: Any,
    ) -> dict[str, Any]:
        plan: RolloutPlan | None = None
        if isinstance(nemo_gym_result, dict):
            plan = nemo_gym_result.pop(PLAN_KEY, None)
        include = include_initial_multimodal_data or (plan is not None and plan.keeps_initial)
        result: dict[str, Any] = UpstreamNemoGym._postprocess_nemo_gym_to_nemo_rl_result(
            self, nemo_gym_row, nemo_gym_result, tokenizer, include_initial_multimodal_data=include, **options
        )
        if plan is None:
            return result
        try:
            return plan.apply(result)
        except ValueError as error:
            raise RolloutDataFailure(str(error)) from None


class AligningCollection:
    """NeMo-Gym's rollout helper for one call, whose results are aligned before anybody sees them.

    A result carries its plan under `PLAN_KEY` until it is post-processed. Everything else is the helper's own.
    """

    def __init__(self, inner: Any, alignment: ActorAlignment, *, static_attached: bool) -> None:
        self._inner, self._alignment, self._static_attached = inner, alignment, static_attached
        self._tasks: list[asyncio.Task[tuple[dict[str, Any], dict[str, Any]]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run_examples(
        self, examples: list[dict[str, Any]], **options: Any
    ) -> Iterator[Awaitable[tuple[dict[str, Any], dict[str, Any]]]]:
        """The helper's results in completion order, each with its plan."""
        # Eager, so that one rollout's pixels do not hold up its siblings.
        started = [
            asyncio.ensure_future(self._aligned(task))
            for task in self._inner.run_examples(examples=examples, **options)
        ]
        self._tasks += started
        return iter(asyncio.as_completed(started))

    def close(self) -> None:
        """Give up what is left; a failed rollout ends the stream of its siblings."""
        for task in self._tasks:
            task.cancel()
        # A finished task holds its result.
        self._tasks.clear()

    async def _aligned(
        self, task: Awaitable[tuple[dict[str, Any], dict[str, Any]]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        row, result = await task
        # Anything else is a failed rollout, which NeMo-RL itself knows how to report.
        if isinstance(result, dict) and isinstance(result.get("response"), dict):
            try:
                plan = await self._alignment.plan(row, result, static_attached=self._static_attached)
            except (ValueError, RuntimeError) as error:
                raise RolloutDataFailure(str(error)) from None
            if plan is not None:
                result[PLAN_KEY] = plan
        return row, result
