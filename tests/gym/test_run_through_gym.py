# SPDX-License-Identifier: Apache-2.0
"""The embedded run with its rollouts and rewards from NeMo-Gym: agent, model server and verifier over HTTP."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("GYM_VENV", ROOT / ".venv-gym"))

pytestmark = [
    pytest.mark.gym,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (VENV / "bin" / "gym").exists(),
        reason=f"no NeMo-Gym environment in {VENV}; build it with: make gym",
    ),
]


def test_two_steps_through_gym_are_aligned_and_rewarded_as_in_process(tiny_checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    from nemo_rl_ext.grpo.collecting.collector import Collector
    from nemo_rl_ext.grpo.collecting.gym import in_process_scorer
    from nemo_rl_ext.grpo.collecting.rollouts import PromptGroup
    from nemo_rl_ext.grpo.config import load_config
    from nemo_rl_ext.grpo.loop import run_grpo

    rows = [
        json.loads(line)
        for line in (ROOT / "gym_resources/resources_servers/sav_tracks/data/example.jsonl")
        .read_text()
        .splitlines()
    ]
    manifest = tmp_path / "rows.jsonl"
    manifest.write_text(
        "".join(
            json.dumps(
                row | {"agent_ref": {"type": "responses_api_agents", "name": "sav_tracks_simple_agent"}}
            )
            + "\n"
            for row in rows
        )
    )
    config = load_config(
        ROOT / "configs" / "embedded_async.yaml",
        [
            f"policy.model_name={tiny_checkpoint}",
            "policy.build_tiny_checkpoint=false",
            f"data.train.data_path={manifest}",
            "data.validation=null",
            "data.build_demo_manifest=false",
            f"logger.log_dir={tmp_path}/run",
            "logger.report_enabled=false",
            "grpo.max_num_steps=2",
            "grpo.num_prompts_per_step=2",
            "grpo.num_generations_per_prompt=2",
            "grpo.media_alignment.max_masked_fraction=1.0",
            "checkpointing.enabled=false",
            "policy.max_total_sequence_length=2048",
            "policy.generation.max_new_tokens=16",
            "policy.generation.allowed_tokens=null",
            "policy.generation.vllm_cfg.limit_mm_per_prompt.image=16",
            "env.should_use_nemo_gym=true",
            f"env.nemo_gym.venv={VENV}",
            f"env.nemo_gym.root={ROOT}/gym_resources",
            "env.nemo_gym.config_paths=[resources_servers/sav_tracks/configs/sav_tracks.yaml]",
        ],
    )
    collected: list[PromptGroup] = []
    collect = Collector.collect

    def remember(self, *args, **kwargs):
        collected.extend(groups := collect(self, *args, **kwargs))
        return groups

    monkeypatch.setattr(Collector, "collect", remember)
    last = run_grpo(config, console=Console(quiet=True))
    assert last["alignment/rows"] == 4
    assert last["alignment/media_matched"] + last["alignment/media_repaired"] > 0
    assert last["alignment/rows_masked"] == 0
    assert last["train/num_tokens"] > 0
    scorer = in_process_scorer("sav_tracks_simple_agent", ROOT / "gym_resources")
    rollouts = [(group.row, rollout) for group in collected for rollout in group.rollouts]
    assert len(rollouts) >= 8
    for row, rollout in rollouts:
        assert rollout.reward == pytest.approx(scorer(rollout.text, row.verifier_metadata)["reward"])


def test_turns_of_several_tokens_with_a_picture_in_each_are_aligned_turn_by_turn(tiny_checkpoint, tmp_path):
    """configs/embedded_gym.yaml, two steps of it: a tool that returns an image, re-sized earlier turns, two updates."""
    pytest.importorskip("vllm")
    from nemo_rl_ext.grpo.config import load_config
    from nemo_rl_ext.grpo.loop import run_grpo

    config = load_config(
        ROOT / "configs" / "embedded_gym.yaml",
        [
            f"policy.model_name={tiny_checkpoint}",
            "policy.build_tiny_checkpoint=false",
            f"data.train.data_path={ROOT}/gym_resources/responses_api_agents/second_look/data/example.jsonl",
            f"logger.log_dir={tmp_path}/run",
            "logger.report_enabled=false",
            "grpo.max_num_steps=2",
            "checkpointing.enabled=false",
            f"env.nemo_gym.venv={VENV}",
            f"env.nemo_gym.root={ROOT}/gym_resources",
        ],
    )
    run_grpo(config, console=Console(quiet=True))
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["alignment/rows"] == 32 and record["alignment/rows_masked"] == 0
        assert record["train/mean_gen_tokens_per_sample"] > 16
        assert record["train/num_sequences"] > record["train/num_rollouts"]
        assert record["alignment/media_matched"] > 2 * 32, (
            "the pictures of later turns are known from the result alone"
        )
        assert record["alignment/reason/context_outgrown"] > 0
        assert record["train/weight_age"] <= 1
        assert record["alignment/logprob_gap_share"] > 0.5
        assert record["alignment/logprob_gap_matched_mean"] < 0.02
        assert record["train/is_oob_ratio"] < 0.5
    # A step's second update meets the clip.
    assert max(record["train/clip_fraction"] for record in records) > 0
    assert min(record["train/groups_without_variance"] for record in records) < 1
