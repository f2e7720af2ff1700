# SPDX-License-Identifier: Apache-2.0
"""Recipe -> data set-up -> NemoGym actor -> collector -> replay buffer -> training batch, in real Ray processes."""

from __future__ import annotations

import gym_edge
import pytest
import ray
import torch
from driving import (
    collect,
    features,
    image_recipe,
    placeholders,
    prepare,
    rollout_in_driver,
    training_batch,
    urls,
    write_rows,
)

from nemo_rl_ext.rollout.stored import StoredTensor

# The rows' (height, width) and, per generation, the runs that the engine writes: 50 tokens per image and 300 are what
# the trainer's processor gives on its own, 18 and 120 what an engine gives whose budget the images share.
OVER_BUDGET = {"sizes": [(160, 320)] * 3, "runs": [[50, 50, 50], [18, 18, 18]]}
SINGLE = {"sizes": [(480, 640)], "runs": [[300], [120]]}


def over_budget_and_infeasible():
    """Two prompts: of their four rollouts two match, one is repaired and one cannot be explained."""
    return [
        gym_edge.image_row(urls(OVER_BUDGET["sizes"]), OVER_BUDGET["runs"], id="over-budget"),
        gym_edge.image_row(urls([(160, 320)], 7), [[50], [49]], id="infeasible"),
    ]


@pytest.fixture
def rows(tmp_path):
    return write_rows(
        tmp_path / "rows.jsonl",
        [
            gym_edge.image_row(urls(OVER_BUDGET["sizes"]), OVER_BUDGET["runs"], id="over-budget"),
            gym_edge.image_row(urls(SINGLE["sizes"], 9), SINGLE["runs"], id="single"),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("dedup", [False, True], ids=["each-its-own", "deduplicated"])
def test_batch_has_exactly_the_rollouts_features(
    dedup, rows, ray_head, installed, nemo_rl_root, checkpoint, monkeypatch
):
    config = image_recipe(nemo_rl_root, checkpoint, rows, dedup=dedup)
    trajectories = collect(config, monkeypatch)
    logs, flat = training_batch(trajectories)
    media = flat.get_multimodal_dict(as_tensors=True)

    # Rows arrive in completion order; each carries exactly its own runs' features.
    assert placeholders(flat) == features(media) == 150 + 54 + 300 + 120
    for log in logs:
        own = features({"imgs_sizes": log[0]["imgs_sizes"].as_tensor()})
        assert own == int((log[0]["token_ids"] == gym_edge.CONTEXT).sum())
    assert len(media["pixel_values"]) == len(media["imgs_sizes"]) == len(media["num_frames"]) == 8
    # No mark and no record of ours is left, and every message is a plain dict.
    assert all(type(message) is dict for log in logs for message in log)
    assert not [key for log in logs for message in log for key in message if key.startswith("_")]

    metrics = [trajectory["rollout_metrics"] for trajectory in trajectories]
    assert sum(entry["alignment/rows"] for entry in metrics) == 4
    assert sum(entry["alignment/media_repaired"] for entry in metrics) == 4
    assert sum(entry["alignment/media_matched"] for entry in metrics) == 4
    assert sum(entry["alignment/rows_masked"] for entry in metrics) == 0
    assert sum(entry["alignment/reason/resized"] for entry in metrics) == 4
    assert all("alignment/reason/truncated_run" in entry for entry in metrics)


@pytest.mark.slow
def test_without_the_extension_the_counts_disagree(rows, ray_head, nemo_rl_root, checkpoint, monkeypatch):
    config = image_recipe(nemo_rl_root, checkpoint, rows, dedup=False, aligned=False)
    _, flat = training_batch(collect(config, monkeypatch, actor="EdgeNemoGym"))
    media = flat.get_multimodal_dict(as_tensors=True)
    assert placeholders(flat) == 150 + 54 + 300 + 120
    assert features(media) == 2 * 150 + 2 * 300


@pytest.mark.slow
def test_matching_rows_share_one_set_of_static_tensors(
    tmp_path, ray_head, installed, nemo_rl_root, checkpoint, monkeypatch
):
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [
            gym_edge.image_row(urls([(160, 320)]), [[50], [50], [18], [18]], id="shared"),
            gym_edge.image_row(urls([(480, 640)], 5), [[300]], id="all-matched"),
        ],
    )
    config = image_recipe(nemo_rl_root, checkpoint, rows, dedup=True, generations=4)
    trajectories = collect(config, monkeypatch)
    found = []
    for trajectory in trajectories:
        packed = [log[0]["pixel_values"] for log in trajectory["batch"]["message_log"]]
        together = type(packed[0]).concat(packed)
        assert len(together) == 4 and all(value.deduplication_enabled for value in packed)
        stored = [tensor for tensor in together.tensors if isinstance(tensor, StoredTensor)]
        found.append((len(together.tensors), len(stored)))
        for tensor in stored:
            # No pixel came with the rollouts; it is in the dtype that the policy is trained in.
            assert tensor.dtype is torch.bfloat16 and torch.cat([tensor]).shape == tensor.shape
    # One physical tensor for all static rows, and one reference for the two that were repaired alike.
    assert sorted(found) == [(1, 0), (2, 1)]


@pytest.mark.slow
def test_a_row_that_nothing_explains_stays_in_its_group_with_zero_loss(
    tmp_path, ray_head, installed, nemo_rl_root, checkpoint, monkeypatch
):
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [
            gym_edge.image_row(urls([(160, 320)]), [[50], [49]], id="infeasible"),
            gym_edge.image_row(urls([(160, 320)], 3), [[50], [50, 50]], id="one-run-too-many"),
        ],
    )
    from nemo_rl.algorithms.grpo import _apply_mask_sample_filter
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    trajectories = collect(image_recipe(nemo_rl_root, checkpoint, rows, dedup=True), monkeypatch)
    logs, flat = training_batch(trajectories)
    assert placeholders(flat) == features(flat.get_multimodal_dict(as_tensors=True))
    batch = BatchedDataDict.from_batches([trajectory["batch"] for trajectory in trajectories])
    assert len(logs) == batch.size == 4
    assert _apply_mask_sample_filter(batch) == 2
    assert sorted(batch["loss_multiplier"].tolist()) == [0.0, 0.0, 1.0, 1.0]
    metrics = [trajectory["rollout_metrics"] for trajectory in trajectories]
    assert sum(entry["alignment/rows_masked"] for entry in metrics) == 2
    assert sum(entry["alignment/reason/infeasible_length"] for entry in metrics) == 1
    assert sum(entry["alignment/reason/run_count"] for entry in metrics) == 1


@pytest.mark.slow
def test_tool_images_and_sampled_media_tokens(
    tmp_path, ray_head, installed, nemo_rl_root, checkpoint, monkeypatch
):
    (tool_url,) = urls([(480, 640)], 4)
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [
            gym_edge.image_row(
                urls([(160, 320)]), [[50]], id="tool", edge_tool={"url": tool_url, "runs": [120]}
            ),
            gym_edge.image_row(urls([(160, 320)], 3), [[50]], id="sampled", edge_sampled=[11, 5, 12]),
        ],
    )
    trajectories = collect(image_recipe(nemo_rl_root, checkpoint, rows, dedup=True), monkeypatch)
    logs, flat = training_batch(trajectories)
    media = flat.get_multimodal_dict(as_tensors=True)
    assert placeholders(flat) == features(media) == 2 * (50 + 120) + 2 * (50 + 1)
    metrics = [trajectory["rollout_metrics"] for trajectory in trajectories]
    assert sum(entry["alignment/rows_masked"] for entry in metrics) == 2
    assert sum(entry["alignment/reason/sampled_context"] for entry in metrics) == 2
    assert torch.isfinite(media["pixel_values"]).all()


@pytest.mark.slow
def test_rollouts_in_the_driver_are_aligned_too(
    tmp_path, ray_head, installed, nemo_rl_root, checkpoint, monkeypatch
):
    """Synchronous training and all validation collect in the driver, which unpickles the records itself."""
    rows = write_rows(tmp_path / "rows.jsonl", over_budget_and_infeasible())
    config = image_recipe(nemo_rl_root, checkpoint, rows, dedup=True)
    processor, train, gym = prepare(config, monkeypatch, "EdgeAlignedNemoGym")
    try:
        honoured = rollout_in_driver(config, processor, train, gym)
        ignored = rollout_in_driver(config, processor, train, gym, honour_flags=False)
    finally:
        ray.kill(gym)
    for result in (honoured, ignored):
        _, flat = training_batch([{"batch": result.final_batch}])
        assert placeholders(flat) == features(flat.get_multimodal_dict(as_tensors=True)) == 150 + 54 + 50 + 49
        assert result.rollout_metrics["alignment/rows"] == 4
        assert result.rollout_metrics["alignment/rows_masked"] == 1
    assert honoured.final_batch["mask_sample"].tolist() == [False, False, False, True]
    assert honoured.final_batch["loss_multiplier"].tolist() == [1.0, 1.0, 1.0, 1.0]
    # NeMo-RL was told to ignore flags: the neutral row is zeroed where the batch says how much a row counts.
    assert "mask_sample" not in ignored.final_batch
    assert ignored.final_batch["loss_multiplier"].tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.slow
def test_what_nemo_rls_own_collection_stores_can_be_inspected(
    tmp_path, ray_head, installed, nemo_rl_root, checkpoint, monkeypatch
):
    """NeMo-RL pops the token ids of what it logs and keeps their text."""
    from nemo_rl_ext.media.policy import MediaPolicy
    from nemo_rl_ext.report.inspection import InspectConfig, Inspector

    rows = write_rows(tmp_path / "rows.jsonl", over_budget_and_infeasible())
    config = image_recipe(nemo_rl_root, checkpoint, rows, dedup=False)
    processor, train, gym = prepare(config, monkeypatch, "EdgeAlignedNemoGym")
    try:
        metrics = rollout_in_driver(config, processor, train, gym, tables=True).rollout_metrics
    finally:
        ray.kill(gym)
    # As `collect_trajectories` of NeMo-RL's example writes its file.
    lines = [entry[0] for key, table in metrics.items() if "full_result" in key for entry in table.data]
    stored = tmp_path / "trajectory_collection.jsonl"
    stored.write_text("".join(line + "\n" for line in lines))
    assert len(lines) == 4 and "prompt_token_ids" not in stored.read_text()
    settings = InspectConfig(model_dir=checkpoint, policy=MediaPolicy(roots=(tmp_path,)), base_dir=tmp_path)
    results = list(Inspector(settings).rows(stored))
    assert sorted(result.outcome for result in results) == ["masked", "matched", "matched", "repaired"]
    (repaired,) = [result for result in results if result.outcome == "repaired"]
    assert repaired.turns[0].found == (18, 18, 18)


@pytest.mark.slow
def test_a_refused_verdict_crosses_as_nemo_rls_data_failure(
    tmp_path, ray_head, installed, nemo_rl_root, checkpoint, monkeypatch
):
    from nemo_rl.experience.failures import FailureClass, classify_rollout_failure

    row = gym_edge.image_row(urls([(160, 320)]), [[49]], id="infeasible")
    rows = write_rows(tmp_path / "rows.jsonl", [row, row | {"id": "twin"}])
    config = image_recipe(nemo_rl_root, checkpoint, rows, dedup=False)
    config.grpo.media_alignment["on_unalignable"] = "raise"
    processor, train, gym = prepare(config, monkeypatch, "EdgeAlignedNemoGym")
    try:
        with pytest.raises(Exception, match="RolloutDataFailure") as failure:
            rollout_in_driver(config, processor, train, gym)
    finally:
        ray.kill(gym)
    assert classify_rollout_failure(failure.value) is FailureClass.DATA
    for fact in (
        "row 'infeasible",
        "turn 0",
        "static runs are [50]",
        "1 placeholder run [49]",
        "infeasible_length",
    ):
        assert fact in str(failure.value)
