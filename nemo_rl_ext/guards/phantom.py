# SPDX-License-Identifier: Apache-2.0
"""Phantom tokens: placeholder ids with no pixels behind them, found in token ids.

A tool call that quotes the literal `<image>` tokenises to the same id as a real placeholder. The forward then
counts one placeholder more than it has features, and one rank's exception wedges the job. Detection needs only
ids and what is known about the row's media; it does not care which renderer made them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from nemo_rl_ext.align.runs import Grammar, PlaceholderRun, RunKind, find_runs
from nemo_rl_ext.align.wording import counted

logger = logging.getLogger("nemo_rl_ext.guards.phantom")

MediaMap = Grammar | Mapping[int, int]
"""A family's `Grammar`, or PrimeIntellect renderers' `mm_token_type_id_map` (token id -> modality type)."""


class PhantomMode(Enum):
    """What a guard does with a row that holds phantoms."""

    DROP = "drop"
    """Leave the row out, with a warning. For supervised data sets, before rows are dealt to ranks."""
    NEUTRALISE = "neutralise"
    """Keep the row and its shape, replace the phantoms in the model input, zero its loss. For RL."""
    RAISE = "raise"
    """Refuse the row."""


class PhantomTokenError(ValueError):
    """A row holds placeholder tokens that no media item explains."""


@dataclass(frozen=True, kw_only=True)
class RowMedia:
    """What is known about a row's media. At most one of the three sources of truth, best first.

    With none of them the row is taken to carry media at positions that only the grammar tells.
    """

    ranges: Sequence[tuple[int, int]] | None = None
    """(offset, length) of every real placeholder run: exact."""
    run_lengths: Sequence[int] | None = None
    """Length of every real run, in order (0 for a pruned tubelet)."""
    num_runs: int | None = None
    """How many real runs there are: images plus video tubelets."""
    min_run_length: int = 1
    """Tokens that the smallest possible media item makes; a shorter run cannot be media."""

    def __post_init__(self) -> None:
        given = [n for n in ("ranges", "run_lengths", "num_runs") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(
                f"row media: give one of ranges, run_lengths or num_runs, got {', '.join(given)}"
            )

    @classmethod
    def from_placeholders(cls, placeholders: Mapping[str, Sequence[Any]] | None) -> RowMedia | None:
        """From `MultiModalData.mm_placeholders` of renderers or vLLM: modality -> items with offset, length."""
        items = [r for ranges in (placeholders or {}).values() for r in ranges]
        return cls(ranges=[(int(r.offset), int(r.length)) for r in items]) if items else None


@dataclass(frozen=True, kw_only=True)
class PhantomReport:
    """Where a row's phantoms are. False when the row is healthy."""

    offsets: np.ndarray
    """int64 [phantoms]: positions of context tokens that no media item explains."""
    num_unresolved: int = 0
    """Well-formed runs beyond the row's media, when nothing says which of them are the real ones."""
    num_missing: int = 0
    """Expected runs that the ids do not hold. Not a phantom; alignment judges it."""
    media_offsets: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64: positions of context tokens that are, or may be, real."""

    @property
    def num_tokens(self) -> int:
        """Phantom tokens at known positions."""
        return len(self.offsets)

    def __bool__(self) -> bool:
        return self.num_tokens > 0 or self.num_unresolved > 0

    def describe(self) -> str:
        """One phrase with counts and first positions, for logs and errors."""
        parts = []
        if self.num_tokens:
            first = ", ".join(str(i) for i in self.offsets[:5].tolist())
            more = ", ..." if self.num_tokens > 5 else ""
            parts.append(f"{counted(self.num_tokens, 'phantom media token')} at {first}{more}")
        if self.num_unresolved:
            parts.append(f"{counted(self.num_unresolved, 'well-formed run')} more than the row has media")
        return " and ".join(parts) or "no phantom media tokens"


def context_ids(media: MediaMap) -> tuple[int, ...]:
    """The ids that each consume one media feature. Empty for a text-only vocabulary."""
    return (media.context_id,) if isinstance(media, Grammar) else tuple(int(i) for i in media)


def find_phantoms(
    token_ids: Sequence[int] | np.ndarray | Any, media: MediaMap, row_media: RowMedia | None = None
) -> PhantomReport:
    """Find context tokens of one row that no media item explains. O(tokens), never raises on content.

    `token_ids` is [tokens] or [1, tokens], on any device; positions count tokens in both.

    `row_media=None` says that the row carries no media at all: every context token is a phantom. A row with
    media is judged by exact ranges when given, and by the grammar's runs otherwise. A run that truncation cut at
    the very start or end of the row is media, not a phantom. Nothing is guessed: when more well-formed runs
    stand in the row than it has media and their lengths do not tell them apart, `num_unresolved` says so.

    Raises:
        ValueError: for a row with media when `media` is a bare id map and no ranges are given, and for ids of
            another shape.
    """
    ids = _one_row(token_ids)
    wanted = context_ids(media)
    if not wanted or ids.size == 0:
        return PhantomReport(offsets=np.empty(0, np.int64))
    is_context = ids == wanted[0]
    for token in wanted[1:]:
        is_context |= ids == token
    positions = np.flatnonzero(is_context)
    if row_media is None:
        return PhantomReport(offsets=positions)
    if row_media.ranges is not None:
        return _outside_ranges(positions, is_context, row_media.ranges)
    if not isinstance(media, Grammar):
        raise ValueError(
            "phantom detection: a row with media needs its placeholder ranges, or a Grammar with wrapper tokens; "
            f"got only the media-token map {dict(media)}. Pass RowMedia(ranges=...) or a Grammar"
        )
    return _outside_runs(ids, positions, media, row_media)


def _one_row(token_ids: Any) -> np.ndarray:
    """[tokens] of a row that may carry a batch dimension of one."""
    ids = np.asarray(token_ids.detach().cpu() if hasattr(token_ids, "detach") else token_ids)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(
            f"phantom detection: expected the ids of one row, [tokens] or [1, tokens], got shape {list(ids.shape)}; "
            "pass the rows of a batch one by one"
        )
    return ids


def _outside_ranges(
    positions: np.ndarray, is_context: np.ndarray, ranges: Sequence[tuple[int, int]]
) -> PhantomReport:
    covered = np.zeros(len(is_context), bool)
    missing = 0
    for offset, length in ranges:
        span = slice(max(offset, 0), max(offset + length, 0))
        covered[span] = True
        missing += not is_context[span].any()
    real = covered[positions]
    return PhantomReport(offsets=positions[~real], media_offsets=positions[real], num_missing=missing)


def _outside_runs(ids: np.ndarray, positions: np.ndarray, grammar: Grammar, known: RowMedia) -> PhantomReport:
    runs = [r for r in find_runs(ids, grammar) if _may_be_media(r, len(ids), known.min_run_length)]
    missing = unresolved = 0
    num_filled = sum(r.length > 0 for r in runs)
    hollow_expected = 0 in (known.run_lengths or ()) or num_filled < (known.num_runs or 0)
    if not hollow_expected:
        # A literal `<img></img>` in text holds no context token, so it needs no media and shifts no count.
        runs = [r for r in runs if r.length]
    if known.run_lengths is not None:
        runs, missing, unresolved = _match_lengths(runs, list(known.run_lengths))
    elif known.num_runs is not None:
        missing = max(known.num_runs - len(runs), 0)
        unresolved = max(len(runs) - known.num_runs, 0)
        if known.num_runs == 0:
            runs, unresolved = [], 0
    real = np.zeros(len(ids), bool)
    for run in runs:
        real[run.offset : run.offset + run.length] = True
    keep = real[positions]
    return PhantomReport(
        offsets=positions[~keep],
        media_offsets=positions[keep],
        num_missing=missing,
        num_unresolved=unresolved,
    )


def _may_be_media(run: PlaceholderRun, num_tokens: int, min_run_length: int) -> bool:
    cut_tail = run.kind is RunKind.UNCLOSED and run.offset + run.length == num_tokens
    cut_head = run.kind is RunKind.UNOPENED and run.offset == 0
    if run.kind is RunKind.EMPTY or cut_tail or cut_head:
        return True
    return run.kind is RunKind.WRAPPED and run.length >= min_run_length


def _match_lengths(runs: list[PlaceholderRun], lengths: list[int]) -> tuple[list[PlaceholderRun], int, int]:
    """Match expected lengths to runs in order: (real runs, missing, unresolved).

    The earliest and the latest in-order matching bracket every other one, so the choice is unique exactly when
    both pick the same runs.
    """
    if [r.length for r in runs] == lengths:
        return runs, 0, 0
    earliest = _first_matches([r.length for r in runs], lengths)
    latest = _first_matches([r.length for r in reversed(runs)], lengths[::-1])
    if len(earliest) < len(lengths):
        # The engine gave some item another length than expected. Which runs are real is alignment's question.
        return runs, max(len(lengths) - len(runs), 0), max(len(runs) - len(lengths), 0)
    if earliest == [len(runs) - 1 - i for i in reversed(latest)]:
        return [runs[i] for i in earliest], 0, 0
    return runs, 0, len(runs) - len(lengths)


def _first_matches(have: list[int], want: list[int]) -> list[int]:
    found: list[int] = []
    for index, length in enumerate(have):
        if len(found) < len(want) and length == want[len(found)]:
            found.append(index)
    return found


@dataclass(frozen=True, kw_only=True)
class GuardedRow:
    """A row after the guard. The caller's own ids and mask are never written to."""

    keep: bool
    token_ids: Any
    """Model input, same type and length as given: phantoms replaced when neutralised, else the caller's own."""
    loss_mask: Any
    """Same type and shape as given; all zero when neutralised."""
    media_mask: np.ndarray
    """bool, shaped like the ids: context tokens that real media stand behind. A forward that takes such a validity mask
    needs no replaced ids."""
    drop_media: bool
    """The row's media must not be attached: nothing distinguished its real runs from phantoms, so all went."""
    report: PhantomReport


class PhantomGuard:
    """Apply one `PhantomMode` to rows, warn by name and count what happened.

        guard = PhantomGuard(media=grammar, mode=PhantomMode.NEUTRALISE, replacement_id=tokenizer.unk_token_id)
        row = guard.check(example_id, token_ids, loss_mask, RowMedia(num_runs=len(images)) if images else None)

    Inert for a text-only vocabulary (an empty media map): every row comes back as it is.
    """

    def __init__(self, *, media: MediaMap, mode: PhantomMode, replacement_id: int | None = None) -> None:
        if mode is PhantomMode.NEUTRALISE and context_ids(media):
            # A wrapper as replacement would open or close a run where the phantom stood.
            wrappers = (media.start_id, media.end_id) if isinstance(media, Grammar) else ()
            if (
                replacement_id is None
                or replacement_id < 0
                or replacement_id in (*context_ids(media), *wrappers)
            ):
                raise ValueError(
                    f"phantom guard: neutralising needs a replacement_id that is no media token (context or "
                    f"wrapper) and not negative, got {replacement_id}; use the tokenizer's unk or pad id"
                )
        self.media, self.mode, self.replacement_id = media, mode, replacement_id
        self._counts = dict.fromkeys(
            ("rows", "rows_dropped", "rows_neutralised", "tokens", "rows_unresolved"), 0
        )

    def check(
        self, example_id: str, token_ids: Any, loss_mask: Any = None, row_media: RowMedia | None = None
    ) -> GuardedRow:
        """Judge one row.

        Raises:
            PhantomTokenError: in `RAISE` mode, naming the example, the count and the first positions.
        """
        report = find_phantoms(token_ids, self.media, row_media)
        shape = np.shape(token_ids)
        media_mask = np.zeros(shape, bool)
        media_mask[..., report.media_offsets] = True
        self._counts["rows"] += 1
        if not report:
            return GuardedRow(
                keep=True, token_ids=token_ids, loss_mask=loss_mask, media_mask=media_mask, drop_media=False,
                report=report,
            )  # fmt: skip
        self._counts["tokens"] += report.num_tokens
        self._counts["rows_unresolved"] += report.num_unresolved > 0
        said = f"example {example_id!r}: {report.describe()}"
        if self.mode is PhantomMode.RAISE:
            raise PhantomTokenError(
                f"{said}; expected every media token to stand for a media item of the row. Literal media markers "
                "in its text are the usual cause: encode text with guards.encode.SafeEncoder, or find them with "
                "`nemo-rl-ext census`"
            )
        if self.mode is PhantomMode.DROP:
            self._counts["rows_dropped"] += 1
            logger.warning("%s; row dropped", said)
            return GuardedRow(
                keep=False, token_ids=token_ids, loss_mask=loss_mask, media_mask=media_mask, drop_media=False,
                report=report,
            )  # fmt: skip
        self._counts["rows_neutralised"] += 1
        drop_media = report.num_unresolved > 0
        positions = report.offsets
        if drop_media:
            positions = np.concatenate([positions, report.media_offsets])
            media_mask = np.zeros(shape, bool)
        logger.warning("%s; row kept with its loss zeroed%s", said, ", media detached" if drop_media else "")
        return GuardedRow(
            keep=True,
            token_ids=_with_replaced(token_ids, positions, self.replacement_id),
            loss_mask=_zeros_like(loss_mask),
            media_mask=media_mask,
            drop_media=drop_media,
            report=report,
        )

    def metrics(self) -> dict[str, float]:
        """Counts so far as `guards/phantom_*`."""
        return {f"guards/phantom_{name}": float(count) for name, count in self._counts.items()}


def _with_replaced(token_ids: Any, positions: np.ndarray, replacement: int | None) -> Any:
    if hasattr(token_ids, "new_tensor"):
        out = token_ids.clone()
        out[..., positions.tolist()] = replacement
        return out
    if isinstance(token_ids, np.ndarray):
        out = token_ids.copy()
        out[..., positions] = replacement
        return out
    if np.ndim(token_ids) == 2:
        return type(token_ids)([_with_replaced(token_ids[0], positions, replacement)])
    out = list(token_ids)
    for position in positions.tolist():
        out[position] = replacement
    return type(token_ids)(out)


def _zeros_like(loss_mask: Any) -> Any:
    if loss_mask is None:
        return None
    if hasattr(loss_mask, "new_zeros"):
        return loss_mask.new_zeros(loss_mask.shape)
    if isinstance(loss_mask, np.ndarray):
        return np.zeros_like(loss_mask)
    return type(loss_mask)(
        _zeros_like(value) if isinstance(value, Sequence) else type(value)(0) for value in loss_mask
    )
