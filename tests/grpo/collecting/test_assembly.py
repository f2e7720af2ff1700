# SPDX-License-Identifier: Apache-2.0
"""From what an engine wrote to rollouts, through a real aligner; the engine's ids are written by hand."""

import logging

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.align.verdict import MediaAlignmentError, Reason, Verdict
from nemo_rl_ext.grpo.collecting.assembly import AlignmentOptions, GroupAssembly
from nemo_rl_ext.grpo.collecting.player import Conversation
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.aligner import AlignerConfig, RolloutAligner
from nemo_rl_ext.rollout.metrics import AlignmentMetrics
from nemo_rl_ext.rollout.segments import EngineTurn

STATIC, RESIZED = 252, 165
"""Tokens of an image of 480 x 640 alone, and where the engine gives it less."""


@pytest.fixture(scope="module")
def aligner(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    Image.new("RGB", (640, 480), (9, 90, 200)).save(folder / "cup.png")
    return RolloutAligner(
        AlignerConfig(
            model_dir=tiny_checkpoint,
            media_policy=MediaPolicy(roots=(folder,)),
            base_dir=folder,
            render_static=True,
        )
    )


@pytest.fixture
def rollout_of(aligner):
    def make(run, *, prevent):
        grammar = aligner.family.grammar
        ids = [20, grammar.start_id, *[grammar.context_id] * run, grammar.end_id, 21]
        media = (MediaSource(ref="cup.png"),)
        turn = EngineTurn(
            prompt_token_ids=np.array(ids, np.int32),
            token_ids=np.array([22], np.int32),
            logprobs=np.zeros(1, np.float32),
            num_media=1,
            weight_versions=(0,),
        )
        conversation = Conversation(
            row=ManifestRow.from_json({"responses_create_params": {"input": "which?"}, "id": "r1"}),
            media=[media],
            static=aligner.static([media]),
            prompt=turn.prompt_token_ids,
            turns=[turn],
        )
        options = AlignmentOptions(
            enabled=True, share_static=True, max_model_len=512, ordered=True, prevent=prevent
        )
        assembly = GroupAssembly([conversation], options, aligner.family.grammars)
        (rollout,) = assembly.rollouts(aligner.align(assembly.requests), lambda _: ("l", 1.0))
        return rollout

    return make


def num_features(rollout):
    return sum(
        message["pixel_values"].as_tensor().shape[0] // 4
        for message in rollout.segments[0].message_log
        if "pixel_values" in message
    )


def test_a_resized_image_is_repaired_and_where_that_is_to_be_prevented_its_row_is_masked(rollout_of):
    repaired, refused = (rollout_of(RESIZED, prevent=prevent) for prevent in (False, True))
    assert not repaired.masked and repaired.reasons == (Reason.RESIZED,)
    assert refused.masked and refused.reasons == (Reason.PREVENTION_FAILED,)
    assert not refused.repaired_segments and refused.aligned[0].report.media[0].verdict is Verdict.UNALIGNABLE
    assert num_features(repaired) == num_features(refused) == RESIZED
    matched = rollout_of(STATIC, prevent=True)
    assert not matched.masked and matched.reasons == () and num_features(matched) == STATIC


def test_it_is_named_at_once_and_counted_or_raised_as_the_configuration_says(rollout_of, caplog):
    refused = rollout_of(RESIZED, prevent=True)
    metrics = AlignmentMetrics()
    with caplog.at_level(logging.WARNING, logger="nemo_rl_ext"):
        assert metrics.add_row(refused.aligned, masked=refused.masked)
    assert "first prevention_failed" in caplog.text and "28x36 -> 22x30" in caplog.text
    counted = metrics.flush()
    assert counted["alignment/rows_masked"] == counted["alignment/media_unalignable"] == 1
    assert counted["alignment/media_repaired"] == 0
    with pytest.raises(MediaAlignmentError, match="prevention_failed"):
        AlignmentMetrics(on_unalignable="raise").add_row(refused.aligned, masked=refused.masked)
