# SPDX-License-Identifier: Apache-2.0
"""Clips on the real engine: what it saw is what training encodes, also when clips of many sizes meet in one step."""

import json

import numpy as np
import pytest
import torch
from rich.console import Console

pytestmark = pytest.mark.engine

SIZES = ((96, 128), (128, 96), (90, 120), (112, 112), (80, 160))


@pytest.fixture(scope="module")
def inputs(make_inputs):
    """One cycle of the demo's rows, the overlong one included."""
    return make_inputs(61, 24)


def clip_of(size, count, seed):
    """Smooth seeded frames, as an engine input and as an item of alignment."""
    from nemo_rl_ext.align.items import MediaItem
    from nemo_rl_ext.grpo.engine.requests import VideoInput

    coarse = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    rows, columns = (np.arange(side) * 4 // side for side in size)
    frames = np.ascontiguousarray(coarse[:, rows][:, :, columns])
    indices = tuple(range(0, 5 * count, 5))
    metadata = {
        "total_num_frames": 5 * count,
        "fps": 24.0,
        "duration": 5 * count / 24.0,
        "video_backend": "opencv",
        "frames_indices": list(indices),
        "do_sample_frames": False,
    }
    item = MediaItem(
        kind="video",
        size=size,
        source=f"clip-{seed}",
        load=lambda wanted: frames[[indices.index(index) for index in wanted]],
        frame_indices=indices,
        fps=24.0,
        total_frames=5 * count,
    )
    return VideoInput(frames=frames, metadata=metadata), item


def test_clips_of_many_sizes_in_one_step_are_each_seen_as_they_are(inputs):
    """vLLM pads the clips of one step to the largest frame; encoded so, log-probs are off by 1e-2 and more."""
    from transformers import AutoTokenizer

    from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
    from nemo_rl_ext.align.turn import align_turn
    from nemo_rl_ext.grpo.engine.config import EngineConfig
    from nemo_rl_ext.grpo.engine.requests import GenerationRequest
    from nemo_rl_ext.grpo.engine.vllm_engine import VllmEngine
    from nemo_rl_ext.grpo.training.batch import PolicyRow, collate
    from nemo_rl_ext.grpo.training.policy import Policy

    model = str(inputs.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    prompt = np.array(tokenizer("<video>\n?", add_special_tokens=False).input_ids)
    clips = [
        clip_of(size, count, seed)
        for seed, (size, count) in enumerate(zip(SIZES, (4, 4, 2, 3, 5), strict=True))
    ]
    engine = VllmEngine(EngineConfig(model=model, precision="float32", hf_overrides={"vit_hidden_size": 32}))
    try:
        names = [
            engine.add(
                GenerationRequest(
                    prompt_token_ids=prompt, videos=(video,), max_new_tokens=3, seed=1, ignore_eos=True
                )
            )
            for video, _ in clips
        ]
        results = {}
        while engine.num_running:
            results.update(engine.step())
    finally:
        engine.shutdown()
    family = NemotronFamily.from_pretrained(model, layout=Layout.NATIVE)
    policy = Policy.from_pretrained(model)
    for name, (_, item) in zip(names, clips, strict=True):
        result = results[name]
        (output,) = result.outputs
        aligned = align_turn(result.prompt_token_ids, [item], family=family)
        assert not aligned.report.neutral, str(aligned.report)
        ids = np.concatenate((result.prompt_token_ids, output.token_ids))
        row = PolicyRow(token_ids=ids, media=(aligned.tensors.values,))
        with torch.no_grad():
            ours = policy.forward_logprobs(collate([row], pad_token_id=0))[0, -len(output.token_ids) :]
        assert np.abs(ours.numpy() - output.logprobs).max() < 5e-4, item.size


def test_mixed_batches_train_with_every_modality_counted_and_the_overlong_row_named(
    inputs, tmp_path, cluster
):
    from nemo_rl_ext.grpo.config import load_config
    from nemo_rl_ext.grpo.loop import run_grpo
    from nemo_rl_ext.manifest.demo_layout import CYCLE, MOVING

    rows = (inputs.folder / "train.jsonl").read_text().splitlines()
    manifest = inputs.folder / "mixed.jsonl"
    manifest.write_text("".join(rows[index] + "\n" for index in (*range(24), 60)))
    num_clips = sum(shape in MOVING for shape in CYCLE[:24])
    config = load_config(
        inputs.config,
        [
            *inputs.overrides(tmp_path / "run"),
            f"data.train.data_path={manifest}",
            "data.shuffle=false",
            "logger.report_enabled=false",
            "checkpointing.enabled=false",
            "policy.generation.vllm_cfg.precision=float32",
            "grpo.max_num_steps=2",
            "grpo.num_prompts_per_step=25",
            "grpo.num_generations_per_prompt=2",
        ],
    )
    run_grpo(config, console=Console(quiet=True))
    first, last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for record in (first, last):
        assert record["alignment/rows"] == 50
        assert record["alignment/rows_masked"] == 0 and record["alignment/reason/context_outgrown"] == 2
        assert record["alignment/video_matched"] == 2 * num_clips > 0
        assert record["alignment/image_repaired"] > 0
        assert record["alignment/image_unalignable"] == record["alignment/video_unalignable"] == 0
        assert record["alignment/logprob_gap_video_max"] < 5e-4
        assert record["alignment/logprob_gap_matched_max"] < 5e-4
    assert {"eval/accuracy", "eval/accuracy_image", "eval/accuracy_text", "eval/accuracy_video"} <= set(last)
    (occurrence,) = [
        json.loads(line)
        for line in (tmp_path / "run" / "offences.jsonl").read_text().splitlines()
        if json.loads(line)["reason"] == "context_outgrown"
    ]
    assert "train-00060" in occurrence["story"] and "mixed.jsonl:25" in occurrence["story"]
    assert "maximum context length" in occurrence["story"]
