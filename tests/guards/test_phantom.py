# SPDX-License-Identifier: Apache-2.0
"""Phantom detection: every placeholder without pixels is found, every healthy row comes back untouched."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_ext.align.runs import Grammar
from nemo_rl_ext.guards.phantom import (
    PhantomGuard,
    PhantomMode,
    PhantomTokenError,
    RowMedia,
    find_phantoms,
)

IMG, START, END, TEXT, UNK = 5, 6, 7, 20, 0
GRAMMAR = Grammar(start_id=START, context_id=IMG, end_id=END)
SEED_STRING = "{type<image>|bold}"


def run(n):
    return [START] + [IMG] * n + [END]


def neutralise(**kwargs):
    return PhantomGuard(media=GRAMMAR, mode=PhantomMode.NEUTRALISE, replacement_id=UNK, **kwargs)


@pytest.mark.parametrize("media", [GRAMMAR, {IMG: 1}], ids=["grammar", "type_map"])
def test_the_seeds_own_string_is_one_phantom(nemotron_tokenizer, media):
    ids = nemotron_tokenizer.encode(SEED_STRING, add_special_tokens=False)
    report = find_phantoms(ids, media)
    assert report.num_tokens == 1 and ids[report.offsets[0]] == IMG
    assert "1 phantom media token at 5" in report.describe()


HEALTHY = {
    "text only": ([TEXT] * 9, None),
    "one image": ([TEXT] + run(4) + [TEXT], RowMedia(num_runs=1)),
    "several images": (run(4) + [TEXT] + run(9) + run(4), RowMedia(num_runs=3)),
    "by lengths": (run(4) + run(9), RowMedia(run_lengths=[4, 9])),
    "by ranges": (run(4) + run(9), RowMedia(ranges=[(1, 4), (7, 9)])),
    "pruned video": (run(22) + run(0) + run(0), RowMedia(run_lengths=[22, 0, 0])),
    "pruned video by count": (run(22) + run(0) + run(0), RowMedia(num_runs=3)),
    "cut by truncation": ([TEXT, START, IMG, IMG], RowMedia(num_runs=1)),
    "head cut off": ([IMG, IMG, END, TEXT], RowMedia(num_runs=1)),
    "literal empty pair beside an image": (run(0) + run(4), RowMedia(num_runs=1)),
    "empty row": ([], None),
}


@pytest.mark.parametrize("ids,media", HEALTHY.values(), ids=HEALTHY.keys())
def test_healthy_rows_come_back_as_the_very_same_objects(ids, media):
    mask = [1] * len(ids)
    for mode in PhantomMode:
        guard = PhantomGuard(media=GRAMMAR, mode=mode, replacement_id=UNK)
        row = guard.check("healthy", ids, mask, media)
        assert row.keep and not row.report and not row.drop_media
        assert row.token_ids is ids and row.loss_mask is mask
        assert row.media_mask.sum() == (ids.count(IMG) if media else 0)


PHANTOMS = {
    "bare token beside an image": ([TEXT, IMG, TEXT] + run(4), RowMedia(num_runs=1), [1]),
    "unclosed in the middle": ([START, IMG, TEXT] + run(4), RowMedia(num_runs=1), [1]),
    "unopened in the middle": (run(4) + [TEXT, IMG, END, TEXT], RowMedia(num_runs=1), [7]),
    "only the grammar known": (run(4) + [TEXT, IMG], RowMedia(), [7]),
    "wrapped literal told apart by length": (run(1) + run(4), RowMedia(run_lengths=[4]), [1]),
    "wrapped literal below the smallest item": (run(1) + run(4), RowMedia(num_runs=1, min_run_length=4), [1]),
    "outside the ranges": (run(1) + run(4), RowMedia(ranges=[(4, 4)]), [1]),
    "wrapped literal in a row without media": (run(2) + [TEXT], None, [1, 2]),
    "zero media items stated": (run(2) + [IMG], RowMedia(num_runs=0), [1, 2, 4]),
}


@pytest.mark.parametrize("ids,media,offsets", PHANTOMS.values(), ids=PHANTOMS.keys())
def test_rows_that_also_carry_media(ids, media, offsets):
    report = find_phantoms(ids, GRAMMAR, media)
    assert report.offsets.tolist() == offsets and report.num_unresolved == 0
    row = neutralise().check("r", ids, [1.0] * len(ids), media)
    assert row.keep and len(row.token_ids) == len(ids) and set(row.loss_mask) == {0.0}
    expected = [UNK if i in offsets else t for i, t in enumerate(ids)]
    assert row.token_ids == expected and not row.drop_media
    assert row.token_ids.count(IMG) == row.media_mask.sum() == ids.count(IMG) - len(offsets)


def test_indistinguishable_runs_are_never_guessed_the_media_is_detached_instead():
    ids = run(4) + [TEXT] + run(4)
    for media in (RowMedia(num_runs=1), RowMedia(run_lengths=[4])):
        report = find_phantoms(ids, GRAMMAR, media)
        assert report.num_unresolved == 1 and report.num_tokens == 0 and report
        row = neutralise().check("r", ids, None, media)
        assert row.keep and row.drop_media and IMG not in row.token_ids and not row.media_mask.any()


def test_runs_of_another_length_than_expected_are_not_phantoms():
    """The engine re-sized the item: the count agrees, alignment decides the rest."""
    assert not find_phantoms(run(9) + run(4), GRAMMAR, RowMedia(run_lengths=[16, 4]))
    assert find_phantoms(run(9), GRAMMAR, RowMedia(num_runs=2)).num_missing == 1


def test_supervised_rows_are_dropped_with_a_warning_that_names_example_and_count(caplog):
    guard = PhantomGuard(media={IMG: 1}, mode=PhantomMode.DROP)
    with caplog.at_level(logging.WARNING, "nemo_rl_ext.guards"):
        rows = [guard.check(f"ex-{i}", ids) for i, ids in enumerate([[TEXT], [IMG, TEXT, IMG], [TEXT, TEXT]])]
    assert [r.keep for r in rows] == [True, False, True]
    assert len(caplog.records) == 1
    assert "'ex-1': 2 phantom media tokens at 0, 2; row dropped" in caplog.text
    assert guard.metrics()["guards/phantom_rows_dropped"] == 1
    assert guard.metrics()["guards/phantom_tokens"] == 2


def test_raise_mode_names_the_cause_and_the_cure():
    with pytest.raises(PhantomTokenError, match=r"'ex'.*1 phantom media token.*SafeEncoder.*census"):
        PhantomGuard(media=GRAMMAR, mode=PhantomMode.RAISE).check("ex", [IMG])


def test_text_only_vocabularies_are_inert():
    guard = PhantomGuard(media={}, mode=PhantomMode.NEUTRALISE)
    ids = [IMG] * 10
    assert guard.check("t", ids).token_ids is ids and guard.metrics()["guards/phantom_tokens"] == 0


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_type_dtype_and_the_callers_own_data_are_kept(kind):
    ids, mask = kind([TEXT, IMG]), kind([1, 1])
    row = neutralise().check("r", ids, mask)
    assert type(row.token_ids) is type(ids) and type(row.loss_mask) is type(mask)
    assert list(row.token_ids) == [TEXT, UNK] and list(row.loss_mask) == [0, 0]
    assert list(ids) == [TEXT, IMG] and list(mask) == [1, 1]
    if hasattr(ids, "dtype"):
        assert row.token_ids.dtype == ids.dtype and row.loss_mask.dtype == mask.dtype


@pytest.mark.parametrize("kind", [lambda x: x, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_a_batch_dimension_of_one_is_taken_and_kept(kind):
    flat = [TEXT, IMG] + run(3)
    ids, mask = kind([flat]), kind([[1] * len(flat)])
    media = RowMedia(num_runs=1)
    assert find_phantoms(ids, GRAMMAR, media).offsets.tolist() == [1]
    row = neutralise().check("r", ids, mask, media)
    assert type(row.token_ids) is type(ids) and np.shape(row.token_ids) == (1, len(flat))
    assert np.asarray(row.token_ids).tolist() == [[TEXT, UNK] + run(3)]
    assert np.asarray(row.loss_mask).tolist() == [[0] * len(flat)]
    assert row.media_mask.shape == (1, len(flat)) and row.media_mask.sum() == 3
    assert np.asarray(ids).tolist() == [flat] and np.asarray(mask).tolist() == [[1] * len(flat)]
    healthy = kind([run(3)])
    assert neutralise().check("r", healthy, None, media).token_ids is healthy
    empty = kind([[]])
    assert neutralise().check("r", empty).token_ids is empty


@pytest.mark.parametrize("shape", [(2, 3), (1, 1, 3), (), (0, 3)])
def test_ids_of_no_single_row_are_refused(shape):
    with pytest.raises(ValueError, match=r"one row, \[tokens\] or \[1, tokens\], got shape"):
        find_phantoms(torch.full(shape, IMG), GRAMMAR)


@pytest.mark.parametrize("replacement", [None, IMG, START, END, -1])
def test_a_replacement_that_is_media_itself_is_refused(replacement):
    with pytest.raises(ValueError, match="replacement_id that is no media token"):
        PhantomGuard(media=GRAMMAR, mode=PhantomMode.NEUTRALISE, replacement_id=replacement)


def test_placeholder_ranges_of_renderers_are_read_as_they_are():
    renderers = pytest.importorskip("renderers")
    placeholders = {"image": [renderers.PlaceholderRange(offset=1, length=4)], "video": []}
    assert RowMedia.from_placeholders(placeholders).ranges == [(1, 4)]
    assert RowMedia.from_placeholders({}) is None and RowMedia.from_placeholders(None) is None


def test_bad_questions_are_refused():
    with pytest.raises(ValueError, match="one of ranges, run_lengths or num_runs, got run_lengths, num_runs"):
        RowMedia(run_lengths=[1], num_runs=1)
    with pytest.raises(ValueError, match="needs its placeholder ranges, or a Grammar"):
        find_phantoms([IMG], {IMG: 1}, RowMedia(num_runs=1))


@given(st.lists(st.sampled_from([IMG, START, END, TEXT]), max_size=60), st.integers(0, 4))
def test_every_context_token_is_either_media_or_phantom(ids, num_runs):
    for media in (None, RowMedia(), RowMedia(num_runs=num_runs), RowMedia(run_lengths=[1] * num_runs)):
        report = find_phantoms(ids, GRAMMAR, media)
        both = sorted(report.offsets.tolist() + report.media_offsets.tolist())
        assert both == [i for i, t in enumerate(ids) if t == IMG]
        row = neutralise().check("r", ids, None, media)
        assert row.token_ids.count(IMG) == row.media_mask.sum()


@given(st.lists(st.integers(1, 3), max_size=7), st.data())
def test_length_matching_equals_brute_force(have, data):
    import itertools

    want = data.draw(st.lists(st.integers(1, 3), max_size=len(have)))
    ids = [t for n in have for t in [TEXT, *run(n)]]
    starts, position = [], 0
    for n in have:
        starts.append(position + 2)
        position += n + 3
    choices = [c for c in itertools.combinations(range(len(have)), len(want)) if [have[i] for i in c] == want]
    report = find_phantoms(ids, GRAMMAR, RowMedia(run_lengths=want))
    if len(choices) == 1:
        real = [starts[i] + k for i in choices[0] for k in range(have[i])]
        assert report.media_offsets.tolist() == real and report.num_unresolved == 0
    else:
        assert report.num_tokens == 0 and report.num_unresolved == len(have) - len(want)


def test_items_of_vllm_are_duck_typed():
    item = SimpleNamespace(offset=np.int64(3), length=np.int64(2))
    assert RowMedia.from_placeholders({"video": [item]}).ranges == [(3, 2)]
