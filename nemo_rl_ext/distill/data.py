# SPDX-License-Identifier: Apache-2.0
"""From prompt/response pairs to token rows with an exact boundary.

The verbatim contract: ``input`` and ``output`` are tokenised as they stand and apart from each other, without
a chat template and without BOS; EOS is appended once after the output. Tokenising the parts, not their sum,
is what makes the boundary exact: a token that spans it would put prompt text under the loss. `verbatim.py`
sees to it that the ids decode to input + output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import TemplateError

from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.distill.records import Problems, Record, RecordError
from nemo_rl_ext.distill.verbatim import VerbatimTokenizer

logger = logging.getLogger(__name__)

_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class PlacedMedia:
    """One image or video and the patch grid that its placeholder runs stand for."""

    item: MediaItem
    grid: Grid


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training row: ``ids[:response_start]`` is context, ``ids[response_start:]`` is trained on."""

    where: str
    ids: np.ndarray
    """int32 ``[tokens]``; ends with EOS, and with the white space that its text has after one, unless it is a
    window of a longer document."""
    response_start: int
    media: tuple[PlacedMedia, ...] = ()
    """The images and videos whose placeholder runs are in ``ids``, in order."""

    @property
    def num_response_tokens(self) -> int:
        """Tokens that are predicted: the first token of a row has nothing before it."""
        return len(self.ids) - max(self.response_start, 1)


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """How long a row may be and what happens to a pair that is longer."""

    seq_length: int
    on_long_prompt: Literal["truncate", "error"] = "truncate"
    on_long_response: Literal["error", "skip"] = "error"


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """Prompt ids with expanded media; ``spans`` are half-open and stay whole, one per media item."""

    ids: np.ndarray
    spans: tuple[tuple[int, int], ...] = ()
    media: tuple[PlacedMedia, ...] = ()


def encode_pairs(
    records: Sequence[Record],
    tokenizer: Any,
    rules: RowRules,
    problems: Problems,
    *,
    chat_template: bool = False,
    expand: Callable[[Record, np.ndarray, np.ndarray], EncodedPrompt] | None = None,
) -> list[Row]:
    """Tokenise, expand media, truncate. Faults go to ``problems``; what was cut or skipped is logged by name.

    ``expand(record, prompt_ids, response_ids)`` turns media markers into placeholder runs and raises
    `RecordError` for a record whose media cannot be used (see `media.py`); without it records with media are
    refused.

    Raises:
        ValueError: the tokenizer has no EOS, or no chat template although one is asked for.
    """
    eos_id = require_eos(tokenizer)
    if chat_template and not tokenizer.chat_template:
        raise ValueError("--chat-template: the student's tokenizer has no chat template")
    verbatim = VerbatimTokenizer(tokenizer)
    rows: list[Row] = []
    cut: list[str] = []
    skipped: list[str] = []
    for first in range(0, len(records), _BATCH):
        batch = records[first : first + _BATCH]
        turns = [_render(r, verbatim) if chat_template else _Turn(r.prompt, [eos_id]) for r in batch]
        prompts = verbatim.starts([turn.prompt for turn in turns])
        responses = verbatim.continuations([r.response for r in batch])
        for record, turn, prompt, response in zip(batch, turns, prompts, responses, strict=True):
            try:
                if chat_template:
                    # What the template wrote is encoded as the engine would encode it at inference.
                    context = verbatim.decode(prompt)
                else:
                    context, prompt = turn.prompt, verbatim.start(turn.prompt, prompt, name="input")
                if not prompt:
                    raise RecordError("'input' has no tokens; the response would have nothing before it")
                verbatim.require_continuation(prompt, context, response, record.response, name="output")
                response = _ended(response, turn.ending, verbatim)
                if response[: len(turn.ending)] == turn.ending:
                    raise RecordError("'output' has no tokens of its own; expected at least one before EOS")
                rows.append(_row(record, _int32(prompt), _int32(response), rules, expand, cut))
            except _ResponseTooLong as problem:
                if rules.on_long_response == "error":
                    problems.add(record.where, problem)
                else:
                    skipped.append(record.where)
            except RecordError as problem:
                problems.add(record.where, problem)
    _report("prompt", "cut from the left to fit seq_length", cut)
    _report("pair", "skipped because the response does not fit seq_length", skipped)
    return rows


def require_eos(tokenizer: Any) -> int:
    """The id that ends every response.

    Raises:
        ValueError: the tokenizer names none.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the student's tokenizer has no eos_token, which ends every response; set one")
    return int(tokenizer.eos_token_id)


class _ResponseTooLong(RecordError):
    pass


class _Turn(NamedTuple):
    prompt: str
    ending: list[int]
    """The ids that end the response."""


def _render(record: Record, verbatim: VerbatimTokenizer) -> _Turn:
    """Prompt text up to the assistant's first token, and the ids with which the template ends its turn."""
    tokenizer = verbatim.tokenizer
    user = {"role": "user", "content": record.prompt}
    reply = {"role": "assistant", "content": record.response}
    try:
        prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([user, reply], tokenize=False)
    except TemplateError as error:
        raise ValueError(f"{record.where}: --chat-template: the template refuses the pair: {error}") from None
    if whole.startswith(prompt + record.response):
        (ids,) = verbatim.continuations([whole[len(prompt) + len(record.response) :]])
        specials = [i for i, token in enumerate(ids) if token in set(tokenizer.all_special_ids)]
        # The policy stops at the turn's last special token; white space after it is the next turn's business.
        if specials:
            return _Turn(prompt, ids[: specials[-1] + 1])
    return _Turn(prompt, [tokenizer.eos_token_id])


def _ended(ids: list[int], ending: list[int], verbatim: VerbatimTokenizer) -> list[int]:
    """``ids`` with their ending once: a text that ends with it, alone or before white space, gets no second."""
    for stop in range(len(ids), len(ending) - 1, -1):
        if ids[stop - len(ending) : stop] == ending:
            return ids
        if verbatim.decode(ids[stop - 1 : stop]).strip():
            break
    return ids + ending


def _int32(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


def _row(
    record: Record,
    prompt_ids: np.ndarray,
    response_ids: np.ndarray,
    rules: RowRules,
    expand: Callable[[Record, np.ndarray, np.ndarray], EncodedPrompt] | None,
    cut: list[str],
) -> Row:
    if expand is not None:
        prompt = expand(record, prompt_ids, response_ids)
    elif record.images or record.videos:
        raise RecordError(
            "has media, but the student is a text model; remove them or use an image-text student"
        )
    else:
        prompt = EncodedPrompt(ids=prompt_ids)
    room = rules.seq_length - len(response_ids)
    if room < 1:
        raise _ResponseTooLong(
            f"the response has {len(response_ids)} tokens with EOS; with one prompt token that does not fit "
            f"seq_length = {rules.seq_length}; raise --seq-length, shorten it, or set on_long_response=skip"
        )
    if len(prompt.ids) > room:
        if rules.on_long_prompt == "error":
            raise RecordError(
                f"the prompt has {len(prompt.ids)} tokens, {room} fit beside the response in seq_length = "
                f"{rules.seq_length}; raise --seq-length, shorten it, or set on_long_prompt=truncate"
            )
        before = len(prompt.ids)
        prompt = truncate_left(prompt, room)
        lost = len(record.images) + len(record.videos) - len(prompt.media)
        dropped = f", {counted(lost, 'media item')} with it" if lost else ""
        cut.append(f"{record.where} ({before} -> {len(prompt.ids)} tokens{dropped})")
    return Row(
        where=record.where,
        ids=np.concatenate([prompt.ids, response_ids]).astype(np.int32),
        response_start=len(prompt.ids),
        media=prompt.media,
    )


def truncate_left(prompt: EncodedPrompt, room: int) -> EncodedPrompt:
    """Keep at most the last ``room`` tokens; a media item stays, or goes with all of its runs.

    Raises:
        RecordError: nothing would be left, because the prompt ends in a media item that does not fit.
    """
    start = len(prompt.ids) - room
    if start <= 0:
        return prompt
    for first, stop in prompt.spans:
        if first < start < stop:
            start = stop
    if start >= len(prompt.ids):
        raise RecordError(
            f"the prompt ends in a media item of {prompt.spans[-1][1] - prompt.spans[-1][0]} tokens and only "
            f"{room} fit; "
            "raise --seq-length"
        )
    kept = [i for i, (first, _) in enumerate(prompt.spans) if first >= start]
    return EncodedPrompt(
        ids=prompt.ids[start:],
        spans=tuple((prompt.spans[i][0] - start, prompt.spans[i][1] - start) for i in kept),
        media=tuple(prompt.media[i] for i in kept),
    )


def encode_documents(
    records: Sequence[Record], tokenizer: Any, rules: RowRules, problems: Problems
) -> list[Row]:
    """Plain text for ``--data-paths``: every token is trained on, long documents become several windows.

    A later window starts with the last token of the one before it, so that every token but the first is
    predicted exactly once. A text that the tokenizer does not give back goes to ``problems``.
    """
    eos_id, verbatim = require_eos(tokenizer), VerbatimTokenizer(tokenizer)
    rows: list[Row] = []
    for record, ids in zip(records, verbatim.starts([r.response for r in records]), strict=True):
        try:
            ids = verbatim.start(record.response, ids, name="text")
        except RecordError as problem:
            problems.add(record.where, problem)
            continue
        text = _int32(_ended(ids, [eos_id], verbatim))
        for start in range(0, max(len(text) - 1, 1), rules.seq_length - 1):
            window = text[start : start + rules.seq_length]
            if len(window) > 1:
                rows.append(Row(where=record.where, ids=window, response_start=1))
    return rows


def mock_rows(*, ids: Sequence[int], rules: RowRules, eos_id: int, count: int, seed: int) -> list[Row]:
    """Random rows for ``--use-mock-data``: they exercise the machinery and teach nothing."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(rng.integers(1, rules.seq_length))
        row = np.append(rng.choice(ids, length), eos_id).astype(np.int32)
        rows.append(Row(where=f"mock:{index + 1}", ids=row, response_start=int(rng.integers(1, length + 1))))
    return rows


def _report(noun: str, what: str, names: list[str], *, shown: int = 10) -> None:
    if names:
        more = f", ... and {len(names) - shown} more" if len(names) > shown else ""
        logger.warning("%s %s: %s%s", counted(len(names), noun), what, ", ".join(names[:shown]), more)
