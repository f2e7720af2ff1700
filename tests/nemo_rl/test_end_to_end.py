# SPDX-License-Identifier: Apache-2.0
"""Recipe -> data set-up -> NemoGym actor -> collector -> replay buffer -> training batch, in real Ray processes."""

from __future__ import annotations

import json
import os
import sys
import time

import gym_edge
import pytest
import ray
import torch
from omegaconf import OmegaConf

PATCH = 16
IMAGE_RECIPE = (
    "examples/configs/recipes/vlm/"
    "vlm_grpo-nemotron-super-omni-120ba12b-16n8g-megatron-tp8ep16cp2-async-gym.v1.yaml"
)

# The rows' (height, width) and, per generation, the runs that the engine writes. The first row is over budget three
# times over: three images that the trainer alone would make 170, 170 and 300 tokens long.
OVER_BUDGET = {"sizes": [(160, 320)] * 3, "runs": [[50, 50, 50], [18, 18, 18]]}
SINGLE = {"sizes": [(480, 640)], "runs": [[300], [120]]}


def urls(sizes, seed=0):
    from nemo_rl.data.multimodal_utils import image_to_data_url

    return [image_to_data_url(gym_edge.picture(h, w, seed + i)) for i, (h, w) in enumerate(sizes)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_recipe(root, name, overrides):
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers

    register_omegaconf_resolvers()
    recipe = parse_hydra_overrides(load_config(root / name), overrides)
    return MasterConfig(**OmegaConf.to_container(recipe, resolve=True))


def image_recipe(root, checkpoint, rows, *, dedup, aligned=True, generations=2):
    return load_recipe(
        root,
        IMAGE_RECIPE,
        [
            "grpo.num_prompts_per_step=2",
            f"grpo.num_generations_per_prompt={generations}",
            f"++grpo.deduplicate_multimodal_data={str(dedup).lower()}",
            f"++grpo.media_alignment.enabled={str(aligned).lower()}",
            "++grpo.media_alignment.num_aligners=1",
            f"policy.model_name={checkpoint}",
            f"policy.tokenizer.name={checkpoint}",
            "policy.tokenizer.chat_template=default",
            "logger.wandb_enabled=false",
            f"data.train.data_path={rows}",
            f"data.validation.data_path={rows}",
            "++data.train.repeat=20",
        ],
    )


def runtime_env():
    return {"py_executable": sys.executable, "env_vars": {**os.environ, "VIRTUAL_ENV": sys.prefix}}


class Generation:
    def __init__(self, config):
        self.cfg = config.policy["generation"]


def start_actor(config, tokenizer, name, monkeypatch):
    """NeMo-RL's own spin-up; only the class that it finds under the name is answered by the edge."""
    import nemo_rl.environments.nemo_gym as nemo_gym
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    monkeypatch.setitem(ACTOR_ENVIRONMENT_REGISTRY, "nemo_rl.environments.nemo_gym.NemoGym", sys.executable)
    monkeypatch.setattr(nemo_gym, "NemoGym", gym_edge.edge_actor(name))
    return nemo_gym.spinup_nemo_gym_actor(
        config.env,
        ["http://edge"],
        "policy",
        tokenizer=tokenizer,
        enable_router_replay=False,
        routed_experts_dtype="int16",
        use_fastokens=False,
    )


def collect(config, monkeypatch, *, actor="EdgeAlignedNemoGym", groups=2):
    """Trajectories of one training step, through NeMo-RL's collector and replay buffer."""
    import nemo_rl.algorithms.utils as tokenizers
    import nemo_rl.environments.nemo_gym as nemo_gym
    from nemo_rl.algorithms.async_utils import AsyncTrajectoryCollector, ReplayBuffer
    from nemo_rl.data.collate_fn import rl_collate_fn
    from nemo_rl.data.utils import setup_response_data
    from torchdata.stateful_dataloader import StatefulDataLoader

    processor = tokenizers.get_tokenizer(config.policy["tokenizer"], get_processor=True)
    tokenizer = processor.tokenizer
    nemo_gym.setup_nemo_gym_config(config, tokenizer)
    train, _ = setup_response_data(processor, config.data, env_configs=None)
    gym = start_actor(config, tokenizer, actor, monkeypatch)
    buffer = ReplayBuffer.options(runtime_env=runtime_env()).remote(
        max_size=8, drop_incomplete_targets_on_restore=False
    )
    collector = AsyncTrajectoryCollector.options(runtime_env=runtime_env()).remote(
        policy_generation=Generation(config),
        tokenizer=tokenizer,
        task_to_env={"nemo_gym": gym},
        master_config=config,
        replay_buffer=buffer,
        start_step=0,
        processor=processor,
    )
    loader = StatefulDataLoader(
        train, batch_size=2, shuffle=False, collate_fn=rl_collate_fn, drop_last=True, num_workers=0
    )
    ray.get(collector.set_weight_version.remote(0))
    collector.start_collection.remote(loader)
    try:
        for _ in range(240):
            if ray.get(buffer.size.remote()) >= groups:
                break
            status = ray.get(collector.get_status.remote())
            assert not status["errored"], status["error"]
            time.sleep(0.5)
        sample = ray.get(
            buffer.sample.remote(num_prompt_groups=groups, current_weight_version=0, max_age_steps=1)
        )
        assert sample is not None, ray.get(collector.get_status.remote())
        return sample["trajectories"]
    finally:
        for handle in (collector, buffer, gym):
            ray.kill(handle)


def training_batch(trajectories):
    """Flattened exactly as NeMo-RL's trainer does it."""
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message

    logs = [log for trajectory in trajectories for log in trajectory["batch"]["message_log"]]
    ignored = ("is_invalid_tool_call", "has_malformed_thinking")
    logs = [[{k: v for k, v in message.items() if k not in ignored} for message in log] for log in logs]
    flat, _ = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": 0})
    return logs, flat


def features(media):
    return sum((h // PATCH) * (w // PATCH) // 4 for h, w in media["imgs_sizes"].tolist())


def placeholders(flat):
    return int((flat["token_ids"] == gym_edge.CONTEXT).sum())


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
    for trajectory in trajectories:
        packed = [log[0]["pixel_values"] for log in trajectory["batch"]["message_log"]]
        together = type(packed[0]).concat(packed)
        static = [value for value in packed if value.deduplication_enabled]
        assert len(together) == 4
        # One physical tensor for all static rows; a repaired row has its own.
        assert len(together.tensors) == (1 if len(static) == 4 else 1 + (4 - len(static)))
        assert len({id(value.tensors[0]) for value in static}) <= 1 or len(static) in (2, 4)
    counts = sorted(
        sum(log[0]["pixel_values"].deduplication_enabled for log in t["batch"]["message_log"])
        for t in trajectories
    )
    assert counts == [2, 4]


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
    assert sum(entry["alignment/reason/bare_context"] for entry in metrics) == 2
    assert torch.isfinite(media["pixel_values"]).all()
