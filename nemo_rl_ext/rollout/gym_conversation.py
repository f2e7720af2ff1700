# SPDX-License-Identifier: Apache-2.0
"""Which media reference belongs to which trainable turn of a NeMo-Gym result.

The binning is NeMo-RL's own (`_index_per_turn_images` and the omission rule of
`_postprocess_nemo_gym_to_nemo_rl_result` in nemo_rl/environments/nemo_gym.py), over references instead of decoded
images: nothing is opened here. Tests hold the two against each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_ext.receipts.placeholders import receipt_of_placeholders
from nemo_rl_ext.receipts.receipt import Receipt, read_receipt

logger = logging.getLogger(__name__)

IMAGE_TYPES = ("input_image", "image", "image_url")
VIDEO_TYPES = ("input_video", "video", "video_url")
_TOOL_IMAGE_PREFIXES = ("data:image/", "http://", "https://", "file://")


@dataclass(frozen=True, kw_only=True)
class GymTurn:
    """One trainable turn: its new prompt tokens, its sampled tokens, and the images that came before it.

    `prompt_ids` are the last of `request_ids`, the whole prompt of the engine's request. `sources` are strings, or PIL
    images where an agent in the same process handed them over. Those at the positions `bare` are tool results that are
    nothing but an image's URL as text: some model servers make an image of it, others hand it on as text.
    `receipt` is what the engine said of the request's media, where it came with the result.
    """

    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]
    sources: tuple[Any, ...]
    bare: frozenset[int] = frozenset()
    request_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    receipt: Receipt | None = None

    def shown(self, num_runs: int) -> tuple[Any, ...]:
        """The images that the engine was shown, given how many placeholder runs the new prompt tokens hold."""
        if self.bare and num_runs == len(self.sources) - len(self.bare):
            return tuple(source for place, source in enumerate(self.sources) if place not in self.bare)
        return self.sources


@dataclass(frozen=True, kw_only=True)
class GymConversation:
    """The trainable turns of one result and what is known about its initial media.

    `initial_unchanged`: the agent used exactly the request's images, so that tensors made from the request alone
    are those of the first turn. `has_video`: the request holds a video, whose tensors only the trainer has.
    """

    turns: tuple[GymTurn, ...]
    initial_sources: tuple[Any, ...]
    initial_unchanged: bool
    has_video: bool

    @property
    def has_media(self) -> bool:
        return self.has_video or any(turn.sources for turn in self.turns)


def read_conversation(row: Mapping[str, Any], result: Mapping[str, Any]) -> GymConversation:
    """Read one NeMo-Gym row and its result; neither is changed."""
    response = result["response"]
    result_input = (result.get("responses_create_params") or {}).get("input", [])
    request_input = row.get("responses_create_params", {}).get("input")
    raw = _list_or(request_input, result_input)
    agent = _list_or(response.get("agent_input"), raw)
    observed = _list_or(response.get("seed_obs"), agent)

    initial = tuple(_content_sources(raw))
    unchanged = (
        bool(initial)
        and _same(_content_sources(agent), initial)
        and _same(_content_sources(observed), initial)
    )
    return GymConversation(
        turns=tuple(_turns(response["output"], observed)),
        initial_sources=initial,
        initial_unchanged=unchanged,
        has_video=any(part.get("type") in VIDEO_TYPES for part in _parts(raw)),
    )


def _turns(output: Sequence[Mapping[str, Any]], observed: Any) -> Iterator[GymTurn]:
    pending: list[Any] = []
    bare: set[int] = set()

    def gather(item: Mapping[str, Any]) -> None:
        sources = item_sources(item)
        if isinstance(item.get("output"), str):
            bare.update(range(len(pending), len(pending) + len(sources)))
        pending.extend(sources)

    for item in observed if isinstance(observed, list) else ():
        if isinstance(item, Mapping) and item.get("role") != "assistant":
            gather(item)
    seen = 0
    for item in output:
        if item.get("generation_token_ids"):
            prompt, sampled = item["prompt_token_ids"], item["generation_token_ids"]
            yield GymTurn(
                prompt_ids=prompt[seen:],
                sampled_ids=sampled,
                sources=tuple(pending),
                bare=frozenset(bare),
                request_ids=prompt,
                logprobs=item.get("generation_log_probs") or (),
                receipt=receipt_in(item),
            )
            seen = len(prompt) + len(sampled)
            pending.clear()
            bare.clear()
        elif item.get("role") != "assistant":
            gather(item)


def receipt_in(item: Mapping[str, Any]) -> Receipt | None:
    """The receipt beside an item's token ids, or vLLM's own account of its media; one that cannot be read is none."""
    values, places = item.get("media_receipt"), item.get("mm_placeholders")
    try:
        if isinstance(values, Mapping):
            return read_receipt(values)
        if isinstance(places, Mapping):
            return receipt_of_placeholders(item.get("prompt_token_ids") or (), places)
        return None
    except ValueError as error:
        logger.warning("a media receipt in a Gym result is not used: %s", error)
        return None


def item_sources(item: Mapping[str, Any]) -> list[Any]:
    """The images of one Responses item that is not an assistant's; a tool's result may be one, or a list of parts."""
    content = item.get("content") or []
    if item.get("type") == "function_call_output":
        content = item.get("output")
        if isinstance(content, str):
            return [content] if content.startswith(_TOOL_IMAGE_PREFIXES) else []
    if not isinstance(content, list):
        return []
    found = (
        _source(part) for part in content if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES
    )
    return [source for source in found if source is not None]


def _content_sources(messages: Any) -> list[Any]:
    return [
        source
        for part in _parts(messages)
        if part.get("type") in IMAGE_TYPES and (source := _source(part)) is not None
    ]


def _parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, Mapping))


def _source(part: Mapping[str, Any]) -> Any:
    source = part.get("image") or part.get("image_url") or part.get("url")
    return source.get("url") if isinstance(source, Mapping) else source


def _list_or(value: Any, otherwise: Any) -> Any:
    return value if isinstance(value, list) and value else otherwise


def _same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(found) == len(wanted) and all(
        left == right if isinstance(left, str) and isinstance(right, str) else left is right
        for left, right in zip(found, wanted, strict=True)
    )
