# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from nemo_rl_ext.align.runs import Grammar, PlaceholderRun, RunKind, find_runs

NUM_FUZZED = 100_000


pytestmark = pytest.mark.usefixtures("kernels_or_not")


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


@pytest.mark.parametrize(
    "weights", [[0.6, 0.15, 0.15, 0.1], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0]], ids=["mixed", "cut", "hollow"]
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_equals_the_reference_on_a_long_sequence(weights, dtype, grammar):
    """More runs than there is room for at first, too."""
    ids = np.random.default_rng(1).choice(np.array([5, 6, 7, 8], dtype=dtype), 50_000, p=weights)
    assert list(find_runs(ids, grammar)) == reference(ids.tolist(), grammar)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_runs_of_every_length_at_every_place_of_a_block(dtype, grammar):
    """Blocks are skipped whole where nothing begins or ends: at each border something does, once."""
    for length in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300):
        for before in range(0, 140, 3):
            for behind in (0, 1, 70):
                ids = [8] * before + [6] + [5] * length + [7] + [8] * behind
                for cut in (0, 1):
                    array = np.array(ids[cut : len(ids) - cut], dtype=dtype)
                    assert list(find_runs(array, grammar)) == reference(array.tolist(), grammar)


def test_what_the_kernel_does_not_take_is_found_all_the_same(grammar, prompt):
    ids = np.array(prompt(70, 3), dtype=np.int64)
    expected = list(find_runs(ids, grammar))
    strided = np.repeat(ids, 2)[::2]
    assert not strided.flags.c_contiguous and list(find_runs(strided, grammar)) == expected
    frozen = ids.copy()
    frozen.flags.writeable = False
    assert list(find_runs(frozen, grammar)) == expected
    for dtype in (np.int16, np.uint32, np.uint8, ">i8"):
        assert list(find_runs(ids.astype(dtype), grammar)) == expected


@pytest.mark.parametrize("context_id", [2**31 + 5, -5])
def test_ids_that_fit_only_one_of_the_types_are_not_taken_for_others(context_id, prompt, grammar):
    ids = np.array(prompt(70, 3), dtype=np.int64)
    ids[ids == 5] = context_id
    other = Grammar(6, context_id, 7)
    assert [run.length for run in find_runs(ids, other)] == [70, 3]


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
