# SPDX-License-Identifier: Apache-2.0
"""The lockstep planner: the same towers on every rank in every micro-batch, with no row lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_ext.guards.lockstep import dummy_pixels, plan_lockstep, zero_weighted

T, I, V, IV = (), ("image",), ("video",), ("image", "video")  # noqa: E741


def check(rows, size, plan):
    """Every tower that runs in a micro-batch has real or dummy media on every rank."""
    for rank, (order, dummies) in enumerate(zip(plan.order, plan.dummies, strict=True)):
        assert sorted(order) == list(range(len(rows[rank])))
        for step, towers in enumerate(plan.towers):
            here = {k for i in order[step * size : (step + 1) * size] for k in rows[rank][i]}
            assert here | dummies[step] == towers and not here & dummies[step]


def test_ordering_alone_is_enough_when_every_rank_has_the_rows():
    rows = [[T, I, T, I], [I, I, T, T]]
    plan = plan_lockstep(rows, micro_batch_size=1)
    check(rows, 1, plan)
    assert plan.num_lacking_before == 2 and plan.num_dummies == 0 and plan.reordered


def test_given_order_is_kept_when_it_is_in_step():
    rows = [[I, T, IV], [I, T, IV]]
    plan = plan_lockstep(rows, micro_batch_size=1)
    assert plan.order == ((0, 1, 2), (0, 1, 2)) and plan.num_dummies == 0 and not plan.reordered
    assert plan.towers == (frozenset(I), frozenset(), frozenset(IV))


def test_a_rank_without_any_image_gets_dummies_and_as_few_as_possible():
    rows = [[I, T, I, T], [T, T, T, T]]
    plan = plan_lockstep(rows, micro_batch_size=2)
    check(rows, 2, plan)
    assert plan.num_lacking_before == 2 and plan.num_dummies == 1
    assert plan.dummies[1] == (frozenset(I), frozenset())


def test_several_modalities_without_reordering():
    rows = [[I, V], [T, IV]]
    plan = plan_lockstep(rows, micro_batch_size=1, reorder=False)
    assert plan.order == ((0, 1), (0, 1))
    assert plan.dummies == ((frozenset(), frozenset(I)), (frozenset(I), frozenset()))


def test_inverse_restores_the_callers_order():
    plan = plan_lockstep([[T, I, T, I], [I, I, T, T]], micro_batch_size=1)
    for rank in range(2):
        results = [f"row {i}" for i in plan.order[rank]]
        assert [results[place] for place in plan.inverse(rank)] == [f"row {i}" for i in range(4)]


def test_ranks_with_fewer_rows_are_refused():
    with pytest.raises(ValueError, match=r"same number of rows on every rank, got \[2, 1\]"):
        plan_lockstep([[T, I], [T]], micro_batch_size=1)
    with pytest.raises(ValueError, match="micro_batch_size must be at least 1"):
        plan_lockstep([[T]], micro_batch_size=0)


def test_empty_batches_and_ragged_last_micro_batches():
    assert plan_lockstep([[], []], micro_batch_size=4).num_dummies == 0
    rows = [[T, I, T], [I, T, T]]
    check(rows, 2, plan_lockstep(rows, micro_batch_size=2))


KINDS = st.sampled_from([T, I, V, IV])


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.data())
def test_any_batch_is_in_step_and_never_worse_than_given(ranks, num_rows, size, data):
    rows = [[data.draw(KINDS) for _ in range(num_rows)] for _ in range(ranks)]
    plan = plan_lockstep(rows, micro_batch_size=size)
    check(rows, size, plan)
    assert plan.num_dummies <= plan.num_lacking_before
    assert plan == plan_lockstep(rows, micro_batch_size=size)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_one_modality_needs_no_dummy_whenever_some_order_needs_none(ranks, num_steps, size, data):
    rows = [[data.draw(st.sampled_from([T, I])) for _ in range(num_steps * size)] for _ in range(ranks)]
    counts = [sum(row == I for row in rank) for rank in rows]
    possible = any(all(s <= n <= s * size for n in counts) for s in range(num_steps + 1))
    assert (plan_lockstep(rows, micro_batch_size=size).num_dummies == 0) == possible


def test_zero_weighted_changes_no_value_and_gives_zero_gradients():
    tower, head = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
    hidden = torch.randn(3, 2)
    out = zero_weighted(head(hidden), tower(torch.ones(5, 4)), tower(torch.zeros(1, 4)))
    assert torch.equal(out, head(hidden))
    out.sum().backward()
    assert (tower.weight.grad == 0).all() and (head.weight.grad == hidden.sum(0)).all()


def test_dummy_pixels_are_the_smallest_item():
    like = torch.zeros(1, dtype=torch.bfloat16)
    pixels = dummy_pixels(patch_size=16, merge_size=2, like=like, num_frames=2)
    assert pixels.shape == (2, 3, 32, 32) and pixels.dtype == torch.bfloat16
