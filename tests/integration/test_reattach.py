# SPDX-License-Identifier: Apache-2.0
"""Static media, marks, static checks and metrics where rollouts are collected."""

import pickle
import sys

import pytest
import torch

from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration.in_process import install_in_process, is_wrapped, uninstall
from nemo_rl_ext.integration.neutral import NeutralMedia
from nemo_rl_ext.integration.rollout_result import RECORD_KEY
from nemo_rl_ext.integration.static_check import check_static_turn
from nemo_rl_ext.integration.travelling_record import TravellingRecord
from nemo_rl_ext.rollout.packed import pack
from nemo_rl_ext.rollout.provenance import ROLLOUT_MATCHED_MEDIA_KEY


@pytest.fixture(autouse=True)
def hooks(nemo_rl_shapes):
    install_in_process()


@pytest.fixture
def rollouts():
    return sys.modules["nemo_rl.experience.rollouts"]


def media(height, width, *, frames=1, fill=0.0):
    values = {
        "pixel_values": torch.full((frames, 3, height, width), fill),
        "imgs_sizes": torch.tensor([[height, width]] * frames, dtype=torch.int32),
        "num_frames": torch.tensor([frames]),
    }
    return {key: pack(key, value) for key, value in values.items()}


def source(**tensors):
    return [{"role": "user", "token_ids": torch.tensor([1]), **tensors}]


@pytest.fixture
def rollout(family, rows):
    def make(runs, *, marked=None, has_video=False, settings=None, one_size=False):
        user = {"role": "user", "token_ids": torch.tensor(rows.prompt(runs))}
        if marked:
            user |= marked | {ROLLOUT_MATCHED_MEDIA_KEY: True}
        log = [user, {"role": "assistant", "token_ids": torch.tensor([11])}]
        record = TravellingRecord(
            row_id="r",
            reports=(),
            num_changed=int(bool(marked)),
            bytes_shipped=0,
            has_video=has_video,
            neutral_media=NeutralMedia(family=family, counters=("num_patches",), one_size=one_size),
            temporal_patch_size=2,
            settings=settings or MediaAlignmentConfig(enabled=True),
        )
        result = {
            "message_log": log,
            "input_message_log": log[:1],
            "full_result": {},
            RECORD_KEY: record,
        }
        return pickle.loads(pickle.dumps(result))

    return make


def reattach(rollouts, result, static):
    rollouts._reattach_static_multimodal_payloads_to_result(result, static)
    return result["message_log"][0]


def test_an_unmarked_turn_gets_the_static_tensors_by_reference(rollout, rollouts):
    static, result = media(64, 96), rollout([6])
    assert reattach(rollouts, result, source(**static))["pixel_values"] is static["pixel_values"]
    assert "instance_config" not in result["full_result"]
    assert result[RECORD_KEY].reports[0].found == (6,)


def test_a_marked_turn_keeps_its_own_and_loses_the_mark_in_both_views(rollout, rollouts):
    result = rollout([4], marked=media(64, 64, fill=2.0))
    extra = {"num_patches": pack("num_patches", torch.ones(1))}
    message = reattach(rollouts, result, source(**media(64, 96), **extra))
    assert message is result["input_message_log"][0]
    assert float(message["pixel_values"].as_tensor().max()) == 2.0
    assert ROLLOUT_MATCHED_MEDIA_KEY not in message and "num_patches" not in message
    assert not result[RECORD_KEY].neutral
    # Consumed once: another pass attaches the static tensors, which do not fit these runs, and masks the row.
    reattach(rollouts, result, source(**media(64, 96)))
    assert result["full_result"]["instance_config"]["mask_sample"] is True


def test_the_single_controller_visits_the_shared_message_twice(rollout):
    manager = sys.modules["nemo_rl.experience.rollout_manager"]
    first, second = rollout([4], marked=media(64, 64)), rollout([6])
    static, prompt = source(**media(64, 96)), first["input_message_log"]
    manager.attach_static_multimodal_payload(prompt, static)
    assert prompt[0][ROLLOUT_MATCHED_MEDIA_KEY]
    for result in (first, second):
        manager.attach_static_multimodal_payload(result["message_log"], static)
    assert [r["message_log"][0]["imgs_sizes"].as_tensor().tolist() for r in (first, second)] == [
        [[64, 64]],
        [[64, 96]],
    ]
    assert not any(ROLLOUT_MATCHED_MEDIA_KEY in message for message in prompt)


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([6, 6], "tubelet_count"),
        ([6, 6, 4], "frame_grid"),
        ([18, 0, 0], "pruned_video"),
        ([6, 6, 6, 6], "tubelet_count"),
    ],
)
def test_a_static_video_that_does_not_fit_becomes_neutral_and_says_why(rollout, rollouts, runs, reason):
    result = rollout(runs, has_video=True)
    message = reattach(rollouts, result, source(**media(64, 96, frames=5)))
    assert sum(h * w for h, w in message["imgs_sizes"].as_tensor().tolist()) // (16 * 16 * 4) == sum(runs)
    assert result["full_result"]["instance_config"]["mask_sample"] is True
    (report,) = result[RECORD_KEY].reports
    assert report.neutral and report.reason.value == reason
    assert "row 'r', turn 0" in str(report) and "5 frames of 64x96" in str(report)


def test_static_images_that_do_not_fit_become_neutral(rollout, rollouts):
    for runs, reason in (([5], Reason.INFEASIBLE_LENGTH), ([6, 6], Reason.RUN_COUNT)):
        result = rollout(runs)
        reattach(rollouts, result, source(**media(64, 96)))
        assert result[RECORD_KEY].reports[0].reason is reason


def test_a_row_of_one_size_is_neutral_as_a_whole(rollout, rollouts):
    result = rollout([50, 18], one_size=True)
    reattach(rollouts, result, source(**media(64, 96)))
    sizes = result["message_log"][0]["imgs_sizes"].as_tensor().tolist()
    assert len(set(map(tuple, sizes))) == 1 and sum(h * w for h, w in sizes) // 1024 == 68
    assert "num_patches" in result["message_log"][0]


@pytest.mark.parametrize("action", ["on_unalignable", "on_ambiguous"])
def test_a_mismatch_is_raised_where_the_recipe_wants_it(rollout, rollouts, action, nemo_rl_shapes):
    from nemo_rl.experience.failures import RolloutDataFailure

    settings = MediaAlignmentConfig(**{action: "raise"})
    result = rollout([6, 6], has_video=True, settings=settings)
    if action == "on_ambiguous":
        # Static tensors that do not fit are unalignable, never ambiguous.
        reattach(rollouts, result, source(**media(64, 96, frames=5)))
        assert result[RECORD_KEY].neutral
        return
    with pytest.raises(RolloutDataFailure) as failure:
        reattach(rollouts, result, source(**media(64, 96, frames=5)))
    story = str(failure.value)
    assert "2 placeholder runs [6, 6] (12 context tokens)" in story and "[3x6] (18 features)" in story
    assert "first differing run: 2" in story and "5 frames of 64x96" in story


def test_a_cut_run_is_named_as_one(rollout, rollouts):
    result = rollout([6])
    result["message_log"][0]["token_ids"] = result["message_log"][0]["token_ids"][:-3]
    reattach(rollouts, result, source(**media(64, 96)))
    assert result[RECORD_KEY].reports[0].reason is Reason.TRUNCATED_RUN


def test_a_turn_without_media_is_left_alone(rollout, rollouts, family, rows):
    message = {"token_ids": torch.tensor(rows.prompt([3]))}
    assert check_static_turn(message, family=family, temporal_patch_size=2, row_id="r", turn=0) is None
    result = rollout([3])
    reattach(rollouts, result, source())
    assert result[RECORD_KEY].reports == ()


def test_unpickling_a_record_installs_the_hooks(rollout, rollouts):
    uninstall()
    assert not is_wrapped(rollouts._postprocess_single_nemo_gym_group)
    rollout([6])
    assert is_wrapped(rollouts._postprocess_single_nemo_gym_group)


def group(rollouts, results, **options):
    return rollouts._postprocess_single_nemo_gym_group([{}] * len(results), results, **options)


def test_a_group_gets_metrics_and_its_records_are_taken_out(rollout, rollouts):
    results = [rollout([6]), rollout([5])]
    for result in results:
        reattach(rollouts, result, source(**media(64, 96)))
    made = group(rollouts, results)
    assert made.rollout_metrics["alignment/rows"] == 2
    assert made.rollout_metrics["alignment/rows_masked"] == 1
    assert made.rollout_metrics["alignment/reason/infeasible_length"] == 1
    assert made.rollout_metrics["alignment/reason/truncated_run"] == 0
    assert made.final_batch["loss_multiplier"].tolist() == [1.0, 1.0]
    assert not any(RECORD_KEY in result for result in results)
    assert group(rollouts, [{}]).rollout_metrics == {}


def test_neutral_rows_are_zeroed_in_the_batch_where_flags_are_ignored(rollout, rollouts):
    results = [rollout([6]), rollout([5])]
    for result in results:
        reattach(rollouts, result, source(**media(64, 96)))
    made = group(rollouts, results, mask_env_flagged_samples=False)
    assert made.final_batch["loss_multiplier"].tolist() == [1.0, 0.0]


def test_too_many_masked_rows_stop_the_run_as_a_data_failure(rollout, rollouts, nemo_rl_shapes):
    from nemo_rl.experience.failures import RolloutDataFailure

    settings = MediaAlignmentConfig(enabled=True, masked_window=2, max_masked_fraction=0.4)
    results = [rollout([5], settings=settings) for _ in range(2)]
    for result in results:
        reattach(rollouts, result, source(**media(64, 96)))
    with pytest.raises(RolloutDataFailure, match="infeasible_length"):
        group(rollouts, results)
