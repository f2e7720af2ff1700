# SPDX-License-Identifier: Apache-2.0
"""Rollouts that NeMo-Gym's collection or NeMo-RL stored, read back row by row with their token ids and media.

A stored row is a manifest row with `response.output`: the items of the conversation after the prompt. An item that
the policy generated carries `prompt_token_ids` (the whole prompt of its engine request) and `generation_token_ids`;
tool results and user messages in between may carry media. NeMo-RL's own collection replaces the ids by their text,
`prompt_str` and `generation_str`: those are tokenised again, which gives the same runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from nemo_rl_ext.align.runs import Grammar, find_all_runs
from nemo_rl_ext.manifest.file_kinds import UnreadableError
from nemo_rl_ext.manifest.row_media import media_by_turn
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.manifest.streams import text_lines
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.gym_conversation import item_sources, receipt_in
from nemo_rl_ext.rollout.segments import EngineTurn

MAX_LINE_BYTES = 1 << 30

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, media tokens recognised, nothing added."""


class StoredRowError(ValueError):
    """A line that holds no rollout with token ids; the text says what was expected and found."""


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """One rollout: its engine requests in order, and the media that each added to the prompt, in prompt order."""

    row_id: str
    line: int
    turns: tuple[EngineTurn, ...]
    media: tuple[tuple[MediaSource, ...], ...]


def stored_rows(
    path: Path, encode: Encode, grammars: Sequence[Grammar]
) -> Iterator[StoredRow | tuple[int, str]]:
    """Every rollout of a JSONL file, plain or compressed, one line in memory at a time.

    A line that holds none gives (line, problem).

    `encode` is used where a row holds text in the place of token ids. A tool result that is nothing but an image's URL
    is an image where the turn's ids hold a run for it, by `grammars`, else text.

    Raises:
        OSError: when the file cannot be read.
    """
    number = 0
    try:
        for number, line in enumerate(text_lines(path, MAX_LINE_BYTES), start=1):
            if len(line) > MAX_LINE_BYTES:
                yield number, f"the line is longer than {MAX_LINE_BYTES} bytes"
                continue
            if not line.strip():
                continue
            try:
                yield _read(line, path, number, encode, grammars)
            except StoredRowError as error:
                yield number, str(error)
    except UnreadableError as error:
        yield number + 1, str(error)


def _read(line: bytes, path: Path, number: int, encode: Encode, grammars: Sequence[Grammar]) -> StoredRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StoredRowError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StoredRowError(f"expected a JSON object, found {type(value).__name__}")
    response = value.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    if not isinstance(output, list):
        raise StoredRowError("no response.output: a rollout as NeMo-Gym's collection stores it is expected")
    generated = [item for item in output if _is_generated(item)]
    if not generated:
        raise StoredRowError(
            "no token ids: no item of response.output has prompt_token_ids (or prompt_str, as NeMo-RL stores it); "
            "collect with a model server that returns them (return_token_id_information: true)"
        )
    row = _as_manifest_row(value, output, path, number)
    media = media_by_turn(row)[: len(generated)]
    ids = list(_turn_ids(generated, encode))
    if any(_is_bare_url(item) for item in output):
        opened = [_opened(item) if _is_bare_url(item) else item for item in output]
        with_urls = media_by_turn(_as_manifest_row(value, opened, path, number))
        runs = [len(find_all_runs(new, grammars)) for new in _new_ids(ids)]
        media = [
            more if len(more) == count else less
            for count, less, more in zip(runs, media, with_urls, strict=False)
        ]
    counts = np.cumsum([len(turn) for turn in media]).tolist()
    turns = tuple(
        EngineTurn(
            prompt_token_ids=prompt,
            token_ids=answer,
            logprobs=np.zeros(len(answer), dtype=np.float32),
            num_media=count,
            receipt=receipt_in(item),
        )
        for (prompt, answer), count, item in zip(ids, counts, generated, strict=True)
    )
    return StoredRow(row_id=_row_id(value, row), line=number, turns=turns, media=tuple(media))


def _is_bare_url(item: Any) -> bool:
    """Whether a tool's result is nothing but an image's URL."""
    return isinstance(item, dict) and isinstance(item.get("output"), str) and bool(item_sources(item))


def _opened(item: dict[str, Any]) -> dict[str, Any]:
    return item | {"output": [{"type": "input_image", "image_url": item["output"]}]}


def _new_ids(turns: Sequence[tuple[np.ndarray, np.ndarray]]) -> Iterator[np.ndarray]:
    """What each prompt adds to the prompt and answer before it; all of it where it does not continue them."""
    seen = np.empty(0, dtype=np.int64)
    for prompt, answer in turns:
        yield prompt[len(seen) :] if np.array_equal(prompt[: len(seen)], seen) else prompt
        seen = np.concatenate((prompt, answer))


def _is_generated(item: Any) -> bool:
    return isinstance(item, dict) and bool(item.get("prompt_token_ids") or item.get("prompt_str"))


def _turn_ids(generated: Sequence[dict[str, Any]], encode: Encode) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Prompt and answer of each item as token ids [tokens].

    A prompt whose text goes on from the turn before goes on from its ids too, wherever a tokenizer would cut it.
    """
    said, ids = "", np.empty(0, dtype=np.int64)
    for item in generated:
        if item.get("prompt_token_ids"):
            prompt = _ids(item["prompt_token_ids"], "prompt_token_ids")
            yield prompt, _ids(item.get("generation_token_ids") or [], "generation_token_ids")
            continue
        text, answer_text = item["prompt_str"], item.get("generation_str") or ""
        if not isinstance(text, str) or not isinstance(answer_text, str):
            raise StoredRowError("prompt_str and generation_str: expected text")
        goes_on = text.startswith(said)
        new = _ids(encode(text[len(said) :] if goes_on else text), "prompt_str")
        prompt = np.concatenate((ids, new)) if goes_on else new
        answer = _ids(encode(answer_text), "generation_str")
        said, ids = text + answer_text, np.concatenate((prompt, answer))
        yield prompt, answer


def _as_manifest_row(value: dict[str, Any], output: list[Any], path: Path, number: int) -> ManifestRow:
    """The conversation as a manifest row: the messages between two generated items are the next turn's."""
    turns: list[list[Any]] = [[]]
    for item in output:
        if not isinstance(item, dict):
            raise StoredRowError(f"response.output holds {type(item).__name__} where an object is expected")
        if _is_generated(item):
            turns.append([])
        elif item.get("type") == "function_call_output" or item.get("role") in (
            "user",
            "system",
            "developer",
            "tool",
        ):
            turns[-1].append(item)
    # What precedes the first generated item belongs to the prompt; what follows the last one was never generated on.
    params = dict(value.get("responses_create_params") or {})
    prompt = params.get("input")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    params = {"input": messages + turns[0]}
    between = [turn or [{"role": "user", "content": ""}] for turn in turns[1:-1]]
    row = {"responses_create_params": params, "turns": between}
    if isinstance(value.get("num_frames"), int):
        row["num_frames"] = value["num_frames"]
    try:
        return ManifestRow.from_json(row, file=str(path), line=number)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise StoredRowError(f"{where}: {first['msg']}") from None


def _ids(values: Any, name: str) -> np.ndarray:
    try:
        ids = np.asarray(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise StoredRowError(f"{name}: expected a list of integers") from None
    if ids.ndim != 1:
        raise StoredRowError(f"{name}: expected one list of integers, got {ids.ndim} dimensions")
    return ids


def _row_id(value: dict[str, Any], row: ManifestRow) -> str:
    """The row's own name, and which of its rollouts it is where Gym numbered them."""
    metadata = value.get("verifier_metadata")
    candidates = [value.get(key) for key in ("id", "uuid", "uid", "task_id")]
    candidates += [metadata.get(key) for key in ("row_id", "id")] if isinstance(metadata, dict) else []
    candidates += [value.get("_ng_task_index")]
    name = next((str(entry) for entry in candidates if isinstance(entry, str | int)), row.row_id)
    rollout = value.get("_ng_rollout_index")
    return f"{name}#{rollout}" if isinstance(rollout, int) else name
