# SPDX-License-Identifier: Apache-2.0
"""The reattach of static media in NeMo-RL's own functions, with and without marks."""

import pickle

import gym_edge
import pytest
import torch
from nemo_rl.data.multimodal_utils import PackedTensor
from nemo_rl.experience import rollout_manager, rollouts

from nemo_rl_ext.align.families.nemotron import NemotronFamily
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration.in_process import install_in_process, is_wrapped, uninstall
from nemo_rl_ext.integration.neutral import NeutralMedia
from nemo_rl_ext.integration.rollout_result import RECORD_KEY
from nemo_rl_ext.integration.static_check import check_static_turn
from nemo_rl_ext.integration.travelling_record import TravellingRecord
from nemo_rl_ext.rollout.provenance import ROLLOUT_MATCHED_MEDIA_KEY


@pytest.fixture(autouse=True)
def hooks():
    install_in_process()
    yield
    uninstall()


@pytest.fixture(scope="module")
def family():
    import tiny_processor

    processor = tiny_processor.NemotronH_Nano_Omni_Reasoning_V3Processor(
        tiny_processor.TinyOmniImageProcessor(), tiny_processor.make_tokenizer()
    )
    return NemotronFamily.from_processor(processor)


def media(height, width, *, frames=1, items=1, fill=0.0):
    count = frames * items
    return {
        "pixel_values": PackedTensor(
            torch.full((count, 3, height, width), fill), 0, pad_to_max_shape=True
        ).enable_deduplication(),
        "imgs_sizes": PackedTensor(
            torch.tensor([[height, width]] * count, dtype=torch.int32), 0
        ).enable_deduplication(),
        "num_frames": PackedTensor(
            torch.tensor([frames] * items, dtype=torch.int32), 0
        ).enable_deduplication(),
    }


def rollout(runs, family, *, marked=None, has_video=False):
    user = {"role": "user", "content": "", "token_ids": torch.tensor(gym_edge.prompt_ids(runs))}
    if marked:
        user |= marked | {ROLLOUT_MATCHED_MEDIA_KEY: True}
    answer = {"role": "assistant", "content": "", "token_ids": torch.tensor([11, 12])}
    log = [user, answer]
    record = TravellingRecord(
        row_id="r",
        reports=(),
        num_changed=int(bool(marked)),
        bytes_shipped=0,
        has_video=has_video,
        neutral_media=NeutralMedia(family=family),
        temporal_patch_size=2,
        settings=MediaAlignmentConfig(enabled=True),
    )
    result = {
        "message_log": log,
        "input_message_log": log[:1],
        "full_result": {"reward": 1.0},
        RECORD_KEY: record,
    }
    return pickle.loads(pickle.dumps(result))


def source(**tensors):
    return [{"role": "user", "content": "", "token_ids": torch.tensor([1]), **tensors}]


def test_an_unmarked_turn_gets_the_static_tensors_by_reference(family):
    static = media(64, 96)
    result = rollout([6], family)
    rollouts._reattach_static_multimodal_payloads_to_result(result, source(**static))
    assert result["message_log"][0]["pixel_values"] is static["pixel_values"]
    assert "instance_config" not in result["full_result"]
    assert result[RECORD_KEY].reports[0].found == (6,)


def test_a_marked_turn_keeps_its_own_and_loses_the_mark_in_both_views(family):
    own = media(64, 64, fill=2.0)
    result = rollout([4], family, marked=own)
    assert result["input_message_log"][0] is result["message_log"][0]
    rollouts._reattach_static_multimodal_payloads_to_result(result, source(**media(64, 96)))
    for view in ("input_message_log", "message_log"):
        message = result[view][0]
        assert message["imgs_sizes"].as_tensor().tolist() == [[64, 64]]
        assert float(message["pixel_values"].as_tensor().max()) == 2.0
        assert ROLLOUT_MATCHED_MEDIA_KEY not in message
    # Consumed once: another pass attaches the static tensors, which do not fit these runs, and masks the row.
    assert "instance_config" not in result["full_result"]
    rollouts._reattach_static_multimodal_payloads_to_result(result, source(**media(64, 96)))
    assert result["full_result"]["instance_config"]["mask_sample"] is True


def test_a_stale_key_of_the_static_tensors_is_not_left_behind(family):
    extra = {"num_patches": PackedTensor(torch.ones(1, dtype=torch.int64), 0)}
    result = rollout([4], family, marked=media(64, 64))
    rollouts._reattach_static_multimodal_payloads_to_result(result, source(**media(64, 96), **extra))
    assert "num_patches" not in result["message_log"][0]


def test_fewer_turns_than_the_prompt_are_refused_as_before(family):
    with pytest.raises(ValueError, match="fewer user turns"):
        rollouts._reattach_static_multimodal_payloads_to_result(rollout([4], family), source() * 2)


def test_the_single_controller_visits_the_shared_message_twice(family):
    own, static = media(64, 64, fill=2.0), source(**media(64, 96))
    first, second = rollout([4], family, marked=own), rollout([6], family)
    prompt = first["input_message_log"]
    rollout_manager.attach_static_multimodal_payload(prompt, static)
    assert prompt[0][ROLLOUT_MATCHED_MEDIA_KEY]
    for result in (first, second):
        rollout_manager.attach_static_multimodal_payload(result["message_log"], static)
    assert prompt[0]["imgs_sizes"].as_tensor().tolist() == [[64, 64]]
    assert second["message_log"][0]["imgs_sizes"].as_tensor().tolist() == [[64, 96]]
    assert not any(
        ROLLOUT_MATCHED_MEDIA_KEY in message for r in (first, second) for message in r["message_log"]
    )


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([6, 6], "tubelet_count"),
        ([6, 6, 4], "frame_grid"),
        ([18, 0, 0], "pruned_video"),
        ([6, 6, 6, 6], "tubelet_count"),
    ],
)
def test_a_static_video_that_does_not_fit_becomes_neutral_and_says_why(family, runs, reason, caplog):
    result = rollout(runs, family, has_video=True)
    rollouts._reattach_static_multimodal_payloads_to_result(result, source(**media(64, 96, frames=5)))
    message = result["message_log"][0]
    features = sum(h * w for h, w in message["imgs_sizes"].as_tensor().tolist()) // (16 * 16 * 4)
    assert features == sum(runs)
    assert result["full_result"]["instance_config"]["mask_sample"] is True
    (report,) = result[RECORD_KEY].reports
    assert report.neutral and report.reason.value == reason
    text = str(report)
    assert "row 'r', turn 0" in text and "5 frames of 64x96" in text and "static runs are [3x6]" in text


def test_a_static_video_that_fits_is_kept(family):
    static = media(64, 96, frames=5)
    result = rollout([6, 6, 6], family, has_video=True)
    rollouts._reattach_static_multimodal_payloads_to_result(result, source(**static))
    assert result["message_log"][0]["pixel_values"] is static["pixel_values"]
    assert "instance_config" not in result["full_result"]


def test_a_turn_without_media_is_left_to_nemo_rl(family):
    message = {"role": "user", "token_ids": torch.tensor(gym_edge.prompt_ids([3]))}
    assert check_static_turn(message, family=family, temporal_patch_size=2, row_id="r", turn=0) is None


def test_unpickling_a_record_installs_the_hooks(family):
    uninstall()
    assert not is_wrapped(rollouts._reattach_static_multimodal_payloads_to_result)
    rollout([6], family)
    assert is_wrapped(rollouts._reattach_static_multimodal_payloads_to_result)
    assert is_wrapped(rollouts._postprocess_single_nemo_gym_group)


def test_nemo_rls_own_aggregation_averages_and_ours_adds_sums():
    from nemo_rl.algorithms.grpo import aggregate_rollout_metrics

    from nemo_rl_ext.integration.reattach import with_sums

    groups = {"alignment/rows": [2.0, 4.0], "alignment/media_repaired": [0.0, 3.0], "reward/max": [1.0, 3.0]}
    own = aggregate_rollout_metrics(groups)
    found = with_sums(aggregate_rollout_metrics)(groups)
    assert own == {"alignment/rows": 3.0, "alignment/media_repaired": 1.5, "reward/max": 3.0}
    assert found == own | {"alignment/rows/sum": 6.0, "alignment/media_repaired/sum": 3.0}
