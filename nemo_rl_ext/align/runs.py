# SPDX-License-Identifier: Apache-2.0
"""Placeholder runs: where the engine put media into a sequence of token ids."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from nemo_rl_ext.align import compiled

Array = np.ndarray[Any, np.dtype[Any]]


class RunKind(enum.Enum):
    """How a block of context tokens is delimited."""

    WRAPPED = "wrapped"
    """`<img>` + N x `<image>` + `</img>`: what the engine writes for one image or tubelet."""
    EMPTY = "empty"
    """`<img></img>` with nothing between: a tubelet whose tokens were pruned away."""
    BARE = "bare"
    """Neither delimiter: a phantom from text, or a token that the policy sampled."""
    UNOPENED = "unopened"
    """No start token: the head of the run was cut off."""
    UNCLOSED = "unclosed"
    """No end token: the tail of the run was cut off."""


_KINDS = tuple(RunKind)
_CODE = {kind: code for code, kind in enumerate(_KINDS)}
# Indexed by "a start token before" + 2 * "an end token behind".
_BY_DELIMITERS = np.array(
    [_CODE[kind] for kind in (RunKind.BARE, RunKind.UNCLOSED, RunKind.UNOPENED, RunKind.WRAPPED)],
    dtype=np.int8,
)


@dataclass(frozen=True)
class Grammar:
    """The three token ids that delimit media, read from a tokenizer and never hard-coded.

    Raises:
        ValueError: when two of the ids are equal, so that a run and its delimiters look the same.
    """

    start_id: int
    context_id: int
    end_id: int

    def __post_init__(self) -> None:
        if len({self.start_id, self.context_id, self.end_id}) != 3:
            raise ValueError(
                f"a placeholder grammar needs three different token ids, got start_id={self.start_id}, "
                f"context_id={self.context_id}, end_id={self.end_id}; check that the tokenizer knows all three "
                "media tokens (an unknown token maps to the same id as every other unknown token)"
            )


@dataclass(frozen=True)
class PlaceholderRun:
    """One maximal block of context tokens, or one empty `<img></img>`.

    `offset` is the index of the first context token; for an empty run it is the index of the end token, where
    the first context token would have stood. `length` counts context tokens, and `grammar` is the position of the
    run's grammar among those that were looked for.
    """

    offset: int
    length: int
    kind: RunKind
    grammar: int = 0


class PlaceholderRuns(Sequence[PlaceholderRun]):
    """The runs of one sequence, in order, held as arrays and turned into objects only when read.

    `offsets` int64 [runs], `lengths` int64 [runs], `kinds` int8 [runs] (positions in `RunKind`), and `grammars` int8
    [runs] (positions among the grammars that were looked for).
    """

    __slots__ = ("grammars", "kinds", "lengths", "offsets")

    def __init__(self, offsets: Array, lengths: Array, kinds: Array, grammars: Array | None = None) -> None:
        self.offsets, self.lengths, self.kinds = offsets, lengths, kinds
        self.grammars = np.zeros(len(offsets), dtype=np.int8) if grammars is None else grammars

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> PlaceholderRun: ...
    @overload
    def __getitem__(self, index: slice) -> PlaceholderRuns: ...
    def __getitem__(self, index: int | slice) -> PlaceholderRun | PlaceholderRuns:
        if isinstance(index, slice):
            return PlaceholderRuns(
                self.offsets[index], self.lengths[index], self.kinds[index], self.grammars[index]
            )
        return PlaceholderRun(
            int(self.offsets[index]),
            int(self.lengths[index]),
            _KINDS[self.kinds[index]],
            int(self.grammars[index]),
        )

    def __iter__(self) -> Iterator[PlaceholderRun]:
        rows = zip(
            self.offsets.tolist(),
            self.lengths.tolist(),
            self.kinds.tolist(),
            self.grammars.tolist(),
            strict=True,
        )
        return (
            PlaceholderRun(offset, length, _KINDS[kind], grammar) for offset, length, kind, grammar in rows
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PlaceholderRuns({list(self)!r})"

    @property
    def num_tokens(self) -> int:
        """Context tokens over all runs: the number of features that the forward expects."""
        return int(self.lengths.sum())

    def of_kind(self, kind: RunKind) -> PlaceholderRuns:
        """The runs of one kind, in order."""
        return self.chosen(self.kinds == _CODE[kind])

    def chosen(self, keep: Array) -> PlaceholderRuns:
        """The runs at these positions, or where this mask [runs] is true."""
        return PlaceholderRuns(self.offsets[keep], self.lengths[keep], self.kinds[keep], self.grammars[keep])


_COMPILED_FOR = (np.int32, np.int64)
_NARROW_FROM = 4096
"""Tokens from which int64 ids are narrowed to int32 first: the copy costs less than it saves in two comparisons."""
_WORD = 8
"""Bytes of a mask that are looked at together."""


def _mask(size: int) -> Array:
    """A boolean mask of at least `size` entries and of whole words; what is over `size` is False."""
    mask = np.empty(-(-size // _WORD) * _WORD, dtype=bool)
    mask[size:] = False
    return mask


def _positions(mask: Array) -> Array:
    """Indices of the true entries of a mask of `_mask`, int64, ascending.

    Masks are sparse: eight entries at a time are skipped, and only words that hold a true entry are looked at byte
    by byte.
    """
    (words,) = (mask.view(np.uint64) != 0).nonzero()
    hit, place = mask.reshape(-1, _WORD).take(words, axis=0).nonzero()
    positions: Array = words.take(hit) * _WORD + place
    return positions


def find_runs(token_ids: Sequence[int] | Array | Any, grammar: Grammar) -> PlaceholderRuns:
    """Find every maximal block of context tokens and every empty pair of delimiters, in order.

    Takes a list, an array or a CPU tensor of ids [tokens]; vectorised, or compiled where the kernels are loaded,
    O(tokens). Never raises on content:
    a run that makes no sense is returned with the kind that says so, and `align.turn` judges it.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1:
        raise ValueError(f"token ids must be one sequence [tokens], got an array of shape {list(ids.shape)}")
    kernels = compiled.loaded()
    if kernels is None or ids.dtype not in _COMPILED_FOR or not ids.flags.c_contiguous:
        return vectorised_runs(ids, grammar)
    tokens = grammar.start_id, grammar.context_id, grammar.end_id
    return PlaceholderRuns(*kernels.scan(ids, *tokens, _BY_DELIMITERS, _CODE[RunKind.EMPTY]))


def find_all_runs(token_ids: Sequence[int] | Array | Any, grammars: Sequence[Grammar]) -> PlaceholderRuns:
    """The runs of several grammars in one sequence of ids [tokens], in order, each with its grammar's position.

    Grammars may share their delimiters (`<img><image></img>` beside `<img><video></img>`): an empty pair of them is
    then counted once, for the first.
    """
    if len(grammars) == 1:
        return find_runs(token_ids, grammars[0])
    ids = np.asarray(token_ids)
    found: list[PlaceholderRuns] = []
    for place, grammar in enumerate(grammars):
        runs = find_runs(ids, grammar)
        delimiters = [(other.start_id, other.end_id) for other in grammars[:place]]
        if (grammar.start_id, grammar.end_id) in delimiters:
            runs = runs.chosen(runs.kinds != _CODE[RunKind.EMPTY])
        found.append(
            PlaceholderRuns(runs.offsets, runs.lengths, runs.kinds, np.full(len(runs), place, dtype=np.int8))
        )
    joined = PlaceholderRuns(
        *(
            np.concatenate([getattr(runs, name) for runs in found])
            for name in ("offsets", "lengths", "kinds", "grammars")
        )
    )
    return joined.chosen(np.argsort(joined.offsets, kind="stable"))


def has_context(token_ids: Sequence[int] | Array | Any, grammars: Sequence[Grammar]) -> bool:
    """Whether any token of the ids [tokens] is one that the forward counts as a place for a media feature."""
    ids = np.asarray(token_ids)
    return any(bool((ids == grammar.context_id).any()) for grammar in grammars)


def vectorised_runs(ids: Array, grammar: Grammar) -> PlaceholderRuns:
    """What `find_runs` does with numpy alone, for ids [tokens]: two comparisons over all of them, then sparse masks."""
    empty = np.empty(0, dtype=np.int64)
    if ids.size == 0:
        return PlaceholderRuns(empty, empty, empty.astype(np.int8))

    if ids.dtype == np.int64 and ids.size > _NARROW_FROM:
        ids = ids.astype(np.int32)
    context = ids == grammar.context_id
    changes = _mask(ids.size + 1)
    changes[0], changes[ids.size] = context[0], context[-1]
    np.not_equal(context[1:], context[:-1], out=changes[1 : ids.size])
    edges = _positions(changes)
    begin, end = edges[0::2], edges[1::2]

    # At either end of the ids `clip` looks at a context token, which is no delimiter.
    opened = ids.take(begin - 1, mode="clip") == grammar.start_id
    closed = ids.take(end, mode="clip") == grammar.end_id
    kinds = _BY_DELIMITERS.take(opened + 2 * closed)

    opening = _mask(ids.size - 1)
    np.equal(ids[:-1], grammar.start_id, out=opening[: ids.size - 1])
    if np.count_nonzero(opening) == np.count_nonzero(opened):
        # Every start token opens a run that was found.
        return PlaceholderRuns(begin, end - begin, kinds)
    starts = _positions(opening) + 1
    hollow = starts[ids[starts] == grammar.end_id]
    if hollow.size == 0:
        return PlaceholderRuns(begin, end - begin, kinds)

    offsets = np.concatenate((begin, hollow))
    lengths = np.concatenate((end - begin, np.zeros_like(hollow)))
    kinds = np.concatenate((kinds, np.full(hollow.size, _CODE[RunKind.EMPTY], dtype=np.int8)))
    order = np.argsort(offsets, kind="stable")
    return PlaceholderRuns(offsets[order], lengths[order], kinds[order])
