# SPDX-License-Identifier: Apache-2.0
"""Fuzzed turns through `align_turn` and transformers' real forward, whose count check must never fire."""

from collections import Counter

import numpy as np
import pytest
import torch

from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import align_turn
from nemo_rl_ext.align.verdict import Reason

pytestmark = pytest.mark.engine

NUM_TURNS, PER_FORWARD = 10_000, 100
SIDES = (8, 17, 32, 40, 64, 65, 96, 100, 130)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint

    return build_tiny_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "tiny", min_num_patches=4, max_num_patches=64
    )


def random_media(rng, case):
    def item(index):
        size = (int(rng.choice(SIDES)), int(rng.choice(SIDES)))
        value = int(rng.integers(0, 256))

        def load():
            if rng.random() < 0.02:
                raise ValueError("the file ends early")
            return np.full((1, *size, 3), value, np.uint8)

        return MediaItem(size=size, source=f"{case}-{index}.png", load=load)

    return [item(index) for index in range(rng.integers(0, 4))]


def damage(ids, rng, grammar):
    """Cut, splice, duplicate, insert or delete, as broken rollouts do."""
    begin, end = sorted(rng.integers(0, len(ids) + 1, 2).tolist())
    kind = rng.integers(0, 7)
    if kind == 0:
        return ids[:end]
    if kind == 1:
        return ids[begin:]
    if kind == 2:
        return ids[:begin] + ids[end:]
    if kind == 3:
        return ids + ids[begin:end]
    if kind == 4:
        return ids[end:] + ids[begin:end] + ids[:begin]
    tokens = [grammar.start_id, grammar.context_id, grammar.end_id, 30]
    if kind == 5:
        return ids[:begin] + rng.choice(tokens, rng.integers(1, 6)).tolist() + ids[begin:]
    return rng.choice(tokens, rng.integers(1, 40)).tolist()


def test_no_fuzzed_turn_fails_the_forwards_count_check_and_none_is_lost(model_dir):
    from nemo_rl_ext.grpo.training.batch import PolicyRow, collate
    from nemo_rl_ext.grpo.training.policy import Policy

    rng = np.random.default_rng(2)
    family = NemotronFamily.from_pretrained(model_dir, layout=Layout.NATIVE)
    policy = Policy.from_pretrained(model_dir)
    outcomes: Counter[str] = Counter()
    reasons: Counter[Reason] = Counter()
    forwarded = 0
    for first in range(0, NUM_TURNS, PER_FORWARD):
        rows = []
        for case in range(first, first + PER_FORWARD):
            items = random_media(rng, case)
            ids = [20, 21]
            for item, static in zip(items, family.static_grids(items), strict=True):
                choices = [static.num_tokens(), family.tiler.grid(item.size, 16).num_tokens()]
                ids += [6, *[5] * int(rng.choice(choices)), 7, 22]
            if rng.random() < 0.7:
                ids = damage(ids, rng, family.grammar)
            ids = [*ids, 23]
            aligned = align_turn(np.array(ids), items, family=family, row_id=str(case))
            outcomes[
                "neutral" if aligned.report.neutral else "repaired" if aligned.report.repaired else "matched"
            ] += 1
            reasons.update(aligned.report.reasons())
            if aligned.report.neutral:
                assert aligned.report.reasons(), "a neutral row must say why"
            values = aligned.tensors.values if aligned.tensors is not None else None
            media = () if values is None else (values,)
            rows.append(PolicyRow(token_ids=ids, media=media))
        with torch.no_grad():
            logprobs = policy.forward_logprobs(collate(rows, pad_token_id=0))
        assert torch.isfinite(logprobs).all()
        forwarded += logprobs.shape[0]
    assert forwarded == NUM_TURNS == sum(outcomes.values())
    assert min(outcomes.values()) > 500
    assert {
        Reason.RESIZED,
        Reason.RUN_COUNT,
        Reason.TRUNCATED_RUN,
        Reason.BARE_CONTEXT,
        Reason.INFEASIBLE_LENGTH,
        Reason.EMPTY_RUN,
        Reason.AMBIGUOUS_GRID,
        Reason.DECODE_FAILED,
    } <= set(reasons)
    print(dict(outcomes), {reason.value: count for reason, count in reasons.most_common()})
