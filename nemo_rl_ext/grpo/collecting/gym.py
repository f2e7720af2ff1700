# SPDX-License-Identifier: Apache-2.0
"""Rollouts with token ids and rewards from NeMo-Gym's agents, over HTTP.

`collect_rollouts` sends rows to the agents of running servers (`gym_servers.start_gym`). One bad row, one outage of a
judge or one empty answer costs that row alone: it keeps its place, masked where its reward means nothing, with the
reason. `in_process_scorer` is the same scoring code without servers.
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from nemo_rl_ext.grpo.collecting.gym_servers import GymServers, post_json


@dataclass(frozen=True, kw_only=True, eq=False)
class GymTurn:
    """One model call of an agent: what the engine was given and what it sampled."""

    prompt_token_ids: np.ndarray  # int32 [tokens], media expanded
    token_ids: np.ndarray  # int32 [tokens]
    logprobs: np.ndarray  # float32 [tokens]


@dataclass(frozen=True, kw_only=True, eq=False)
class GymRollout:
    """One row's rollout; `masked` ones keep their place in the group and have zero loss, `error` says why.

    `outgrown` says that a later turn was not sampled, because its prompt no longer fits the engine's context.
    """

    turns: tuple[GymTurn, ...] = ()
    text: str = ""
    reward: float = 0.0
    reward_components: Mapping[str, float] = field(default_factory=dict)
    masked: bool = False
    error: str | None = None
    outgrown: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)


def collect_rollouts(
    servers: GymServers,
    rows: Sequence[Mapping[str, Any]],
    *,
    params: Mapping[str, Any] | None = None,
    extra_body: Mapping[str, Any] | None = None,
    num_in_flight: int = 64,
    timeout_s: float = 600.0,
) -> list[GymRollout]:
    """One rollout per row, in order; a row that fails comes back masked with its reason.

    `params` replaces fields of `responses_create_params` (`temperature`, `max_output_tokens`, ...). `extra_body` goes
    to the engine with every request (`seed`, `logit_bias`, ...). Raises `GymError` only when Gym itself has died.
    """
    with ThreadPoolExecutor(max_workers=max(1, min(num_in_flight, len(rows) or 1))) as pool:
        found = list(
            pool.map(lambda row: _run_row(servers, row, params or {}, extra_body or {}, timeout_s), rows)
        )
    if any(rollout.error for rollout in found):
        servers.check()
    return found


def _run_row(
    servers: GymServers,
    row: Mapping[str, Any],
    params: Mapping[str, Any],
    extra_body: Mapping[str, Any],
    timeout_s: float,
) -> GymRollout:
    agent = row.get("agent_ref")
    name = agent.get("name") if isinstance(agent, Mapping) else None
    if name not in servers.urls:
        known = ", ".join(sorted(servers.urls))
        return GymRollout(
            masked=True, error=f"agent_ref: expected the name of a running agent ({known}), got {name!r}"
        )
    body = deepcopy(dict(row))
    create = body.get("responses_create_params")
    if not isinstance(create, dict):
        return GymRollout(
            masked=True, error=f"responses_create_params: expected an object, got {type(create).__name__}"
        )
    create |= params
    if extra_body:
        metadata = create["metadata"] = dict(create.get("metadata") or {})
        metadata["extra_body"] = json.dumps({**json.loads(metadata.get("extra_body", "{}")), **extra_body})
    try:
        result = post_json(f"{servers.urls[str(name)]}/run", body, timeout_s)
        return _rollout(result)
    except httpx.HTTPStatusError as error:
        answer = error.response
        return GymRollout(masked=True, error=f"{name} answered {answer.status_code}: {answer.text[:500]}")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        return GymRollout(masked=True, error=f"{name}: {type(error).__name__}: {error}"[:500])


def _rollout(result: Mapping[str, Any]) -> GymRollout:
    turns, text, outgrown = [], "", ""
    for item in result["response"]["output"]:
        if _is_answer(item):
            text = _text(item.get("content"))
        # An empty answer is no turn for NeMo-RL either: nothing was sampled in it.
        if item.get("generation_token_ids"):
            turn = GymTurn(
                prompt_token_ids=np.asarray(item["prompt_token_ids"], dtype=np.int32),
                token_ids=np.asarray(item["generation_token_ids"], dtype=np.int32),
                logprobs=np.asarray(item["generation_log_probs"], dtype=np.float32),
            )
            if len(turn.token_ids) != len(turn.logprobs):
                raise ValueError(f"{len(turn.token_ids)} token ids and {len(turn.logprobs)} log-probs")
            turns.append(turn)
        elif turns and _is_answer(item) and item.get("generation_token_ids") is None:
            # What vllm_model makes of the engine's refusal of a prompt beyond its context.
            outgrown = "the last answer carries no token ids: its prompt is longer than the engine's context"
    error = _failure(result)
    if not turns and error is None:
        # nothing was sampled, so nothing can be trained on; without ids vllm_model answers a prompt beyond the context
        is_empty = any(item.get("generation_token_ids") == [] for item in result["response"]["output"])
        error = (
            "the answer has no tokens"
            if is_empty
            else "the rollout carries no token ids; the prompt may be longer than the engine's context"
        )
    # newer Gyms mark the result itself, older ones its instance_config
    flagged = bool(result.get("mask_sample") or (result.get("instance_config") or {}).get("mask_sample"))
    reward = float(result["reward"])
    if not np.isfinite(reward):
        raise ValueError(f"reward is {reward}")
    return GymRollout(
        turns=tuple(turns),
        text=text,
        reward=reward,
        reward_components=dict(result.get("reward_components") or {}),
        masked=error is not None or flagged,
        error=error,
        outgrown=outgrown,
        result=result,
    )


def _failure(result: Mapping[str, Any]) -> str | None:
    """Why the verifier did not judge the answer: its own words, or the mark that Gym itself puts on a failed judge."""
    if result.get("error_class") in ("judge_unavailable", "internal"):
        return str(result.get("error") or result["error_class"])
    failed = result.get("_ng_failure_class")
    if failed is None:
        return None
    reason = result.get("failure_reason") or result.get("_ng_failure_judge_error")
    return f"{failed}: {reason}" if reason else str(failed)


def _is_answer(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "message" and item.get("role") == "assistant"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or () if part.get("type") == "output_text")


def inline_images(row: Mapping[str, Any], read: Callable[[str], bytes]) -> dict[str, Any]:
    """A copy of the row in which every image is a `data:` URL, the only form that any OpenAI endpoint takes.

    `read` returns an image file's bytes for a reference as the row has it, under the caller's own media policy; the
    bytes are passed on unchanged, so that the engine decodes what the trainer decodes.
    """
    copy = deepcopy(dict(row))
    messages = copy["responses_create_params"]["input"]
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "input_image":
                part.setdefault("detail", "auto")  # nemo-gym 0.4.0 refuses a row without it
                if not part["image_url"].startswith("data:"):
                    content_bytes = read(part["image_url"])
                    encoded = base64.b64encode(content_bytes).decode("ascii")
                    part["image_url"] = f"data:{_media_type(content_bytes)};base64,{encoded}"
    return copy


def _media_type(content: bytes) -> str:
    for start, name in ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp")):
        if content.startswith(start):
            return f"image/{name}"
    return "image/webp" if content[8:12] == b"WEBP" else "application/octet-stream"


def in_process_scorer(agent: str, root: Path) -> Callable[[str, Any], dict[str, Any]]:
    """`score(text, verifier_metadata)` with the fields of the verifier's HTTP answer, for an agent without a judge.

    Raises `ValueError` for an agent whose verifier needs servers. Loads the scoring module from `root`.
    """
    if agent != "sav_tracks_simple_agent":
        raise ValueError(
            f"{agent!r} cannot be scored in process, only sav_tracks_simple_agent can; others need "
            "env.should_use_nemo_gym: true"
        )
    folder = str(root.absolute())
    if folder not in sys.path:
        sys.path.append(folder)
    scoring = importlib.import_module("resources_servers.sav_tracks.scoring")
    cache = importlib.import_module("resources_servers.sav_tracks.truth").TruthCache()
    return lambda text, metadata: scoring.score_answer(text, metadata, cache=cache).as_fields()
