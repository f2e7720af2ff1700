# SPDX-License-Identifier: Apache-2.0
"""How the tests drive NeMo-RL: a recipe, its data, the NemoGym actor, the collector, the trainer's flattening."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import gym_edge
import ray
from omegaconf import OmegaConf

PATCH = 16
VIDEO_RECIPE = (
    "examples/configs/recipes/vlm/vlm_grpo-nemotron-omni-30ba3b-16n8g-megatron-tp4ep4-async-gym-video.v1.yaml"
)
IMAGE_RECIPE = (
    "examples/configs/recipes/vlm/"
    "vlm_grpo-nemotron-super-omni-120ba12b-16n8g-megatron-tp8ep16cp2-async-gym.v1.yaml"
)


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


def image_recipe(root, checkpoint, rows, *, dedup, aligned=True, generations=2, repeat=20):
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
            f"++data.train.repeat={repeat}",
        ],
    )


def video_recipe(root, checkpoint, rows, *overrides):
    """NeMo-RL's static video recipe, five frames of at most 64 patches."""
    return load_recipe(
        root,
        VIDEO_RECIPE,
        [
            f"policy.model_name={checkpoint}",
            f"policy.tokenizer.name={checkpoint}",
            "policy.generation.vllm_cfg.video.num_frames=5",
            "data.default.video_target_num_patches=64",
            f"data.train.data_path={rows}",
            f"data.validation.data_path={rows}",
            "++data.default.min_generation_tokens=8",
            "~policy.tokenizer.chat_template_kwargs",
            *overrides,
        ],
    )


def runtime_env():
    return {"py_executable": sys.executable, "env_vars": {**os.environ, "VIRTUAL_ENV": sys.prefix}}


def said(text):
    """How often Ray's workers of this head wrote a text to their standard error."""
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    return sum(path.read_text(errors="replace").count(text) for path in logs.glob("worker-*.err"))


class Generation:
    def __init__(self, config):
        self.cfg = config.policy["generation"]


def start_actor(config, tokenizer, name, monkeypatch, base_url="http://edge"):
    """NeMo-RL's own spin-up; only the class that it finds under the name is answered by the edge."""
    import nemo_rl.environments.nemo_gym as nemo_gym
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    monkeypatch.setitem(ACTOR_ENVIRONMENT_REGISTRY, "nemo_rl.environments.nemo_gym.NemoGym", sys.executable)
    monkeypatch.setattr(nemo_gym, "NemoGym", gym_edge.edge_actor(name))
    return nemo_gym.spinup_nemo_gym_actor(
        config.env,
        [base_url],
        "policy",
        tokenizer=tokenizer,
        enable_router_replay=False,
        routed_experts_dtype="int16",
        use_fastokens=False,
    )


def prepare(config, monkeypatch, actor, base_url="http://edge"):
    """NeMo-RL's set-up of a Gym run: processor, training rows and the NemoGym actor."""
    import nemo_rl.algorithms.utils as tokenizers
    import nemo_rl.environments.nemo_gym as nemo_gym
    from nemo_rl.data.utils import setup_response_data

    processor = tokenizers.get_tokenizer(config.policy["tokenizer"], get_processor=True)
    nemo_gym.setup_nemo_gym_config(config, processor.tokenizer)
    train, _ = setup_response_data(processor, config.data, env_configs=None)
    return processor, train, start_actor(config, processor.tokenizer, actor, monkeypatch, base_url)


@contextlib.contextmanager
def collecting(config, monkeypatch, *, actor="EdgeAlignedNemoGym", base_url="http://edge"):
    """NeMo-RL's NemoGym actor, collector and replay buffer, and a call that starts the collection."""
    from nemo_rl.algorithms.async_utils import AsyncTrajectoryCollector, ReplayBuffer
    from nemo_rl.data.collate_fn import rl_collate_fn
    from torchdata.stateful_dataloader import StatefulDataLoader

    processor, train, gym = prepare(config, monkeypatch, actor, base_url)
    buffer = ReplayBuffer.options(runtime_env=runtime_env()).remote(
        max_size=8, drop_incomplete_targets_on_restore=False
    )
    collector = AsyncTrajectoryCollector.options(runtime_env=runtime_env()).remote(
        policy_generation=Generation(config),
        tokenizer=processor.tokenizer,
        task_to_env={"nemo_gym": gym},
        master_config=config,
        replay_buffer=buffer,
        start_step=0,
        processor=processor,
    )
    loader = StatefulDataLoader(
        train,
        batch_size=config.grpo.num_prompts_per_step,
        shuffle=False,
        collate_fn=rl_collate_fn,
        drop_last=True,
        num_workers=0,
    )
    ray.get(collector.set_weight_version.remote(0))
    try:
        yield gym, collector, buffer, lambda: collector.start_collection.remote(loader)
    finally:
        for handle in (collector, buffer, gym):
            ray.kill(handle)


def collect(config, monkeypatch, *, groups=2, **edge):
    """Trajectories of one training step, through NeMo-RL's collector and replay buffer."""
    with collecting(config, monkeypatch, **edge) as (_, collector, buffer, start):
        start()
        # As NeMo-RL's trainer waits: groups of a later step may come before the last one of this. Four processes import
        # NeMo-RL first, which takes minutes on a busy machine: the test's timeout ends this.
        while True:
            ray.get(collector.check_health.remote())
            sample = ray.get(
                buffer.sample.remote(num_prompt_groups=groups, current_weight_version=0, max_age_steps=1)
            )
            if sample is not None:
                return sample["trajectories"]
            time.sleep(0.5)


def rollout_in_driver(
    config, processor, train, gym, *, generations=2, honour_flags=True, first=0, tables=False
):
    """NeMo-RL's synchronous rollout of two rows, as training without a collector and validation run it."""
    from nemo_rl.data.collate_fn import rl_collate_fn
    from nemo_rl.experience.rollouts import attach_initial_nemo_gym_image_payloads, run_nemo_gym_rollout_sync

    dedup = config.grpo.deduplicate_multimodal_data
    batch = rl_collate_fn([train[first], train[first + 1]])
    if dedup:
        attach_initial_nemo_gym_image_payloads(batch, processor, env_config=config.env)
    return run_nemo_gym_rollout_sync(
        policy_generation=Generation(config),
        input_batch=batch.repeat_interleave(generations, share_immutable_media=dedup),
        tokenizer=processor.tokenizer,
        task_to_env={"nemo_gym": gym},
        generation_config={**config.policy["generation"], "stop_token_ids": None, "stop_strings": None},
        log_full_result_tables=tables,
        max_seq_len=config.policy["max_total_sequence_length"],
        mask_env_flagged_samples=honour_flags,
        deduplicate_multimodal_data=dedup,
    )


def engine_recipe(root, directory, model, images, *, evidence="runs", **fields):
    """A recipe of two prompts, one per list of image sizes, whose tokenizer is the engine's; `fields` join the rows."""
    import conftest

    checkpoint = conftest.write_checkpoint(directory / "trainer", tokenizer_of=model)
    rows = [
        gym_edge.image_row(urls(sizes, 1 + 9 * index), [], **{"id": f"row-{index}", **fields})
        for index, sizes in enumerate(images)
    ]
    config = image_recipe(root, checkpoint, write_rows(directory / "rows.jsonl", rows), dedup=True)
    config.grpo.media_alignment["evidence"] = evidence
    return config


def play(config, monkeypatch, base_url):
    """One step's trajectories, answered by a real engine: every context token of the batch has its feature.

    Returns the images' sizes of every rollout, the features, the alignment metrics' sums and NeMo-RL's own metrics.
    """
    trajectories = collect(config, monkeypatch, base_url=base_url)
    logs, flat = training_batch(trajectories)
    media = flat.get_multimodal_dict(as_tensors=True)
    # The engine's tokenizer gives `<image>` the id that the edge's made-up prompts use.
    assert placeholders(flat) == features(media)
    # The ban reached the engine: this policy samples `<image>` every few tokens without it.
    assert not any((message["token_ids"] == gym_edge.CONTEXT).any() for log in logs for message in log[1:])
    metrics = [trajectory["rollout_metrics"] for trajectory in trajectories]

    def total(name):
        return sum(entry[f"alignment/{name}"] for entry in metrics)

    return sorted(log[0]["imgs_sizes"].as_tensor().tolist() for log in logs), features(media), total, metrics


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


def video_row(directory, *, frames=5, height=160, width=320, runs=((15, 15, 15),)):
    """A row whose static video is a list of cached frames, as NeMo-RL's video recipes keep them."""
    content = [{"type": "input_text", "text": "look"}]
    for index in range(frames):
        path = directory / f"frame-{index}.png"
        gym_edge.picture(height, width, index).save(path)
        content.append(
            {
                "type": "input_image",
                "image_url": str(path),
                "detail": "auto",
                "_is_video_frame": True,
                "_video_source": "clip.mp4",
            }
        )
    return {
        "agent_ref": {"name": "agent"},
        "id": "video",
        "edge_runs": [list(run) for run in runs],
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
    }
