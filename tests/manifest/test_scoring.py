# SPDX-License-Identifier: Apache-2.0
"""A run on a manifest that nothing can score would train on zero reward in silence."""

import pytest

from nemo_rl_ext.manifest.loading import ManifestError, load_manifest
from nemo_rl_ext.manifest.scoring import own_score_can_hit, require_answers, score

GYM = {"agent_ref": {"name": "sav_tracks_simple_agent"}}


def load(write_manifest, make_row, *keys):
    return load_manifest(
        write_manifest([make_row("?", **({"verifier_metadata": {}} | entry)) for entry in keys])
    )


def answer(value):
    return {"verifier_metadata": {"answer": value}}


def test_no_answers_are_refused_and_one_is_enough(write_manifest, make_row):
    for own_score in (True, False):
        with pytest.raises(ManifestError, match="every reward would be 0; give rows an answer"):
            require_answers(load(write_manifest, make_row, {}, answer("")), own_score=own_score)
        require_answers(load(write_manifest, make_row, {}, answer("b")), own_score=own_score)
        require_answers(load(write_manifest, make_row, {}, GYM), own_score=own_score)


def test_answers_that_the_own_score_never_reaches(write_manifest, make_row):
    rows = load(write_manifest, make_row, answer("a spoon"), answer(3))
    with pytest.raises(ManifestError, match="no row's answer is a single letter.*found 'a spoon'"):
        require_answers(rows, own_score=True)
    require_answers(rows, own_score=False)


@pytest.mark.parametrize("value", ["a", "é", "A", "ab", "", " ", 1, None])
def test_what_can_hit_is_what_the_score_reaches(write_manifest, make_row, value):
    row = load(write_manifest, make_row, answer(value))[0]
    assert own_score_can_hit(row) == any(
        score(row, text) > 0 for text in ("a", "é", " A", "ab", "", "1", "None")
    )
