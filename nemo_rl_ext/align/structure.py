# SPDX-License-Identifier: Apache-2.0
"""Runs that no engine writes for media, each kind of damage by its own name."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_ext.align.families.family import MediaFamily, Seen
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.runs import PlaceholderRuns, RunKind
from nemo_rl_ext.align.verdict import Fault, Reason


def run_fault(
    runs: PlaceholderRuns, items: Sequence[MediaItem], family: MediaFamily, *, sampled: bool = False
) -> Fault | None:
    """The first fault of a turn's runs as such, or None. `sampled`: the ids are an answer's."""
    if sampled and runs.num_tokens:
        return Fault(Reason.SAMPLED_CONTEXT, f"{_tokens(runs)} in an answer, first at {int(runs.offsets[0])}")
    if fault := _unexpanded(runs, items, family):
        return fault
    cut = [run for kind in (RunKind.UNOPENED, RunKind.UNCLOSED) for run in runs.of_kind(kind)]
    if cut:
        return _doubly_expanded(runs) or Fault(
            Reason.TRUNCATED_RUN, f"the run at token {cut[0].offset} is {cut[0].kind.value}"
        )
    bare = runs.of_kind(RunKind.BARE)
    if len(bare):
        return Fault(Reason.BARE_CONTEXT, f"{_tokens(bare)} outside any run, first at {int(bare.offsets[0])}")
    return None


def _tokens(runs: PlaceholderRuns) -> str:
    return f"{runs.num_tokens} context token{'s' * (runs.num_tokens != 1)}"


def _unexpanded(runs: PlaceholderRuns, items: Sequence[MediaItem], family: MediaFamily) -> Fault | None:
    """One context token per item: the prompt as it was sent, before the engine wrote whole runs into it."""
    if not items or runs.num_tokens != len(items):
        return None
    bare = len(runs.of_kind(RunKind.BARE)) == len(runs)
    single = len(runs.of_kind(RunKind.WRAPPED)) == len(runs) == len(items)
    if bare or (single and not any(_can_be_one_token(item, family) for item in items)):
        return Fault(Reason.UNEXPANDED_IDS, f"one context token for each of {len(items)} media")
    return None


def _can_be_one_token(item: MediaItem, family: MediaFamily) -> bool:
    possible = family.candidates(item, Seen(lengths=(1,)))
    return bool(possible) and not isinstance(possible, Fault)


def _doubly_expanded(runs: PlaceholderRuns) -> Fault | None:
    """`<img><img>` + N tokens + `</img>` + N - 1 tokens + `</img>`: the first token of a run became a run again."""
    for first, second in zip(runs, list(runs)[1:], strict=False):
        behind = first.offset + first.length + 1 == second.offset
        whole = first.kind is RunKind.WRAPPED and second.kind is RunKind.UNOPENED
        if whole and behind and second.length == first.length - 1:
            return Fault(
                Reason.DOUBLY_EXPANDED,
                f"the run at token {first.offset} is followed by the {second.length} tokens that are left of the run "
                "it was written into",
            )
    return None
