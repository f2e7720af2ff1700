# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's rollouts without NeMo-Gym: the ids that the engine made of a prompt against the ids that are trained on.

There vLLM gets text and media and expands them on its own, and the worker puts the sampled ids behind the trainer's
prompt ids without looking at the engine's. This module needs neither NeMo-RL nor vLLM; `comparing_worker` binds it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import numpy as np


class PromptMismatch(ValueError):
    """The engine saw another prompt than the one that would be trained on; one string with the counts."""


class ComparedPrompt(dict[str, Any]):
    """A prompt for vLLM that remembers the ids which the trainer has for it."""

    trainer_ids: list[int]


def remember_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `format_prompt_for_vllm_generation`: prompts with media carry the trainer's ids [prompt tokens]."""

    def format_prompt(data: Any, sample_idx: int | None = None) -> Any:
        made = original(data, sample_idx)
        if sample_idx is not None:
            return _remember(made, data, sample_idx)
        return [_remember(prompt, data, index) for index, prompt in enumerate(made)]

    return format_prompt


def _remember(prompt: dict[str, Any], data: Any, index: int) -> dict[str, Any]:
    if not prompt.get("multi_modal_data"):
        return prompt
    compared = ComparedPrompt(prompt)
    compared.trainer_ids = data["input_ids"][index, : int(data["input_lengths"][index])].tolist()
    return compared


def compare_batch(generate: Callable[..., Iterable[Any]]) -> Callable[..., Iterable[Any]]:
    """For `LLM.generate`: every output is compared before it is returned.

    Raises:
        PromptMismatch: for the first prompt that the engine expanded otherwise.
    """

    def compared(prompts: Sequence[Any], *args: Any, **options: Any) -> Iterable[Any]:
        outputs = list(generate(prompts, *args, **options))
        for prompt, output in zip(prompts, outputs, strict=True):
            compare(prompt, output)
        return outputs

    return compared


def compare_stream(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """For `AsyncLLM.generate`: the first output of a request is compared before it is handed on.

    Raises:
        PromptMismatch: when the engine expanded the prompt otherwise.
    """

    async def compared(prompt: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        first = True
        async for output in generate(prompt, *args, **options):
            if first:
                compare(prompt, output)
                first = False
            yield output

    return compared


def compare(prompt: Any, output: Any) -> None:
    """Hold the engine's prompt ids to the trainer's.

    Raises:
        PromptMismatch: with both lengths, the first difference, and the placeholder runs of both there; also when the
            engine does not say what it saw.
    """
    if not isinstance(prompt, ComparedPrompt):
        return
    seen = getattr(output, "prompt_token_ids", None)
    if seen is None:
        raise PromptMismatch(
            "the engine did not say which prompt ids it made of a prompt with media: not comparable"
        )
    engine, trainer = np.asarray(seen), np.asarray(prompt.trainer_ids)
    if np.array_equal(engine, trainer):
        return
    shared = min(len(engine), len(trainer))
    differing = np.flatnonzero(engine[:shared] != trainer[:shared])
    at = int(differing[0]) if len(differing) else shared
    media = ", ".join(f"{kind} x {_count(value)}" for kind, value in prompt["multi_modal_data"].items())
    raise PromptMismatch(
        f"the engine made {len(engine)} ids of a prompt with {media}, the trainer has {len(trainer)}; they first "
        f"differ at {at} (engine {_shown(engine, at)}, trainer {_shown(trainer, at)})"
        f"{_runs(engine, trainer, at)}. The sampled ids would be trained on behind a prompt that the engine never saw. "
        "Give the engine and the policy's processor the same media limits (vllm_kwargs.mm_processor_kwargs and the "
        "processor's own), and a max_model_len under which the engine does not re-size media, or move the "
        "environment to NeMo-Gym, where media are repaired"
    )


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1


def _shown(ids: np.ndarray[Any, Any], at: int) -> str:
    return str(int(ids[at])) if at < len(ids) else "ends"


def _runs(engine: np.ndarray[Any, Any], trainer: np.ndarray[Any, Any], at: int) -> str:
    """The runs of the id before the first difference, which repeats where one side's medium is longer."""
    if at < 2 or engine[at - 1] != engine[at - 2]:
        return ""
    token = engine[at - 1]
    return f"; runs of id {token}: engine {_lengths(engine == token)}, trainer {_lengths(trainer == token)}"


def _lengths(mask: np.ndarray[Any, Any]) -> list[int]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [int(length) for length in edges[1::2] - edges[::2]]
