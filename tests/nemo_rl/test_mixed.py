# SPDX-License-Identifier: Apache-2.0
"""Video, images and text in one training batch, through NeMo-RL's actor, collector and replay buffer."""

import gym_edge
import pytest
import torch
from driving import collect, training_batch, urls, video_recipe, video_row, write_rows
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.vllm.config import materialize_vllm_video_config


def num_features(log):
    """Features of one row: per image, and per tubelet of two frames."""
    total = 0
    for message in log:
        if "imgs_sizes" not in message:
            continue
        sizes = message["imgs_sizes"].as_tensor().tolist()
        for frames in message["num_frames"].as_tensor().tolist():
            height, width = sizes[0]
            total += (frames + 1) // 2 * height * width // (16 * 16 * 4)
            sizes = sizes[frames:]
    return total


@pytest.mark.slow
def test_a_mixed_batch_is_aligned_slices_and_packs(
    tmp_path, ray_head, installed, nemo_rl_root, checkpoint, monkeypatch
):
    monkeypatch.setenv("NEMO_RL_VIDEO_MEDIA_ROOT", str(tmp_path))
    rows = write_rows(
        tmp_path / "mixed.jsonl",
        [
            # The engine sampled one frame pair fewer in every second rollout.
            video_row(tmp_path, runs=([15, 15, 15], [15, 15])),
            gym_edge.image_row(urls([(160, 320)]), [[50], [18]], id="image"),
            # A literal media token in a row without media is NeMo-RL's own business.
            gym_edge.image_row([], [[], [1]], id="text"),
        ],
    )
    config = video_recipe(
        nemo_rl_root,
        checkpoint,
        rows,
        "grpo.num_prompts_per_step=3",
        "grpo.num_generations_per_prompt=2",
        "++grpo.media_alignment.enabled=true",
        "++grpo.media_alignment.num_aligners=1",
        "logger.wandb_enabled=false",
        "++data.train.repeat=20",
    )
    materialize_vllm_video_config(config.policy, config.data)
    trajectories = collect(config, monkeypatch, groups=3)
    logs, flat = training_batch(trajectories)
    assert len(logs) == 6

    seen = []
    for log in logs:
        found = int((log[0]["token_ids"] == gym_edge.CONTEXT).sum())
        if "imgs_sizes" in log[0]:
            assert num_features(log) == found
        seen.append((found, log[0]["num_frames"].as_tensor().tolist() if "num_frames" in log[0] else None))
    assert sorted(seen, key=str) == sorted(
        [(45, [5]), (30, [1, 1]), (50, [1]), (18, [1]), (0, None), (1, None)], key=str
    )

    batch = BatchedDataDict.from_batches([trajectory["batch"] for trajectory in trajectories])
    assert int(batch["mask_sample"].sum()) == 1
    metrics = [trajectory["rollout_metrics"] for trajectory in trajectories]
    assert sum(entry.get("alignment/reason/tubelet_count", 0) for entry in metrics) == 1
    assert sum(entry.get("alignment/rows", 0) for entry in metrics) == 4

    # What the trainer does next: shards by row, then one tensor per key.
    keys = ("pixel_values", "imgs_sizes", "num_frames")
    counts = [flat[key].logical_segment_counts_by_row() for key in keys]
    assert counts[0] == counts[1] == counts[2] and sorted(counts[0]) == [0, 0, 1, 1, 1, 1]
    whole = flat.get_multimodal_dict(as_tensors=True)
    shards = [flat.slice(start, start + 2).get_multimodal_dict(as_tensors=True) for start in (0, 2, 4)]
    for key in keys[1:]:
        parts = [shard[key] for shard in shards if shard.get(key) is not None]
        assert torch.equal(torch.cat(parts), whole[key])
    assert whole["pixel_values"].dtype == torch.float32
    assert len(whole["pixel_values"]) == len(whole["imgs_sizes"]) == int(whole["num_frames"].sum())
