# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from nemo_rl_ext.align.runs import Grammar, PlaceholderRun, RunKind, find_runs

NUM_FUZZED = 100_000


def reference(ids, grammar):
    """A slow scanner that says what a run is, one token at a time."""
    out, i = [], 0
    while i < len(ids):
        if ids[i] == grammar.context_id:
            j = i
            while j < len(ids) and ids[j] == grammar.context_id:
                j += 1
            opened = i > 0 and ids[i - 1] == grammar.start_id
            closed = j < len(ids) and ids[j] == grammar.end_id
            kind = {(1, 1): "WRAPPED", (1, 0): "UNCLOSED", (0, 1): "UNOPENED", (0, 0): "BARE"}[opened, closed]
            out.append(PlaceholderRun(i, j - i, RunKind[kind]))
            i = j
        else:
            if ids[i] == grammar.end_id and i > 0 and ids[i - 1] == grammar.start_id:
                out.append(PlaceholderRun(i, 0, RunKind.EMPTY))
            i += 1
    return out


def test_the_engines_own_form_is_wrapped(grammar, prompt):
    assert list(find_runs(prompt(3, 2), grammar)) == [
        PlaceholderRun(3, 3, RunKind.WRAPPED),
        PlaceholderRun(9, 2, RunKind.WRAPPED),
    ]


@pytest.mark.parametrize(
    ("ids", "runs"),
    [
        ([], []),
        ([1, 2, 3], []),
        ([5], [PlaceholderRun(0, 1, RunKind.BARE)]),
        ([6, 7], [PlaceholderRun(1, 0, RunKind.EMPTY)]),
        ([6], []),
        ([7, 6], []),
        ([6, 5], [PlaceholderRun(1, 1, RunKind.UNCLOSED)]),
        ([5, 7], [PlaceholderRun(0, 1, RunKind.UNOPENED)]),
        ([6, 6, 5, 7, 7], [PlaceholderRun(2, 1, RunKind.WRAPPED)]),
        (
            [6, 5, 5, 7, 6, 7, 6, 7],
            [
                PlaceholderRun(1, 2, RunKind.WRAPPED),
                PlaceholderRun(5, 0, RunKind.EMPTY),
                PlaceholderRun(7, 0, RunKind.EMPTY),
            ],
        ),
    ],
)
def test_each_kind(ids, runs, grammar):
    assert list(find_runs(ids, grammar)) == runs


@pytest.mark.slow
def test_equals_the_reference_on_fuzzed_sequences(grammar):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 24, NUM_FUZZED)
    weights = rng.dirichlet(np.ones(5), 64)
    for case, length in enumerate(lengths):
        ids = rng.choice(np.array([5, 6, 7, 8, 9]), length, p=weights[case % 64])
        assert list(find_runs(ids, grammar)) == reference(ids.tolist(), grammar), ids.tolist()


def test_equals_the_reference_on_a_long_sequence(grammar):
    rng = np.random.default_rng(1)
    ids = rng.choice(np.array([5, 6, 7, 8]), 50_000, p=[0.6, 0.15, 0.15, 0.1])
    assert list(find_runs(ids, grammar)) == reference(ids.tolist(), grammar)


@pytest.mark.parametrize(
    "convert", [list, np.array, torch.tensor, lambda ids: np.array(ids, np.int32), tuple]
)
def test_takes_any_sequence_of_ids(convert, grammar, prompt):
    ids = prompt(4, 1)
    assert find_runs(convert(ids), grammar) == find_runs(ids, grammar)


def test_float_ids_of_a_placeholder_message_are_read_as_numbers(grammar):
    assert len(find_runs(torch.tensor([6.0, 5.0, 7.0]), grammar)) == 1


def test_runs_read_like_a_sequence(grammar, prompt):
    runs = find_runs(prompt(4, 1, 2), grammar)
    assert [run.length for run in runs[1:]] == [1, 2]
    assert runs[-1].length == 2
    assert runs.num_tokens == 7
    assert len(runs.of_kind(RunKind.WRAPPED)) == 3
    assert not len(runs.of_kind(RunKind.BARE))


def test_a_matrix_is_a_programmers_fault(grammar):
    with pytest.raises(ValueError, match=r"one sequence \[tokens\].*\[2, 2\]"):
        find_runs(np.zeros((2, 2), int), grammar)


def test_a_tokenizer_that_knows_none_of_the_tokens_is_refused():
    with pytest.raises(ValueError, match="three different token ids"):
        Grammar(0, 0, 0)
