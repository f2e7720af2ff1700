# SPDX-License-Identifier: Apache-2.0
"""Clips whose engine used other frames, another frame grid, or both: tensors equal NeMo-RL's own for those frames."""

import numpy as np
import pytest
import torch
from conftest import write_checkpoint
from driving import collect, features, training_batch, urls, video_recipe, video_row, write_rows
from gym_edge import CONTEXT, image_row, picture
from nemo_rl.environments.nemotron_utils import process_nemotron_video_frames
from nemo_rl.models.generation.vllm.config import materialize_vllm_video_config
from nemo_rl.models.generation.vllm.video_utils import build_cached_video_frame_data_url

from nemo_rl_ext.align.families.family import Layout
from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.integration.aligner import NemoRLAligner, NemoRLAlignerConfig, NemoRLTurnRequest
from nemo_rl_ext.integration.clips import ClipSettings, clip_references
from nemo_rl_ext.integration.processor import load_processor
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.models.tokenizer import save_byte_tokenizer

SIZE = (160, 320)
NUM_FRAMES = 5
SETTINGS = ClipSettings(
    num_frames=NUM_FRAMES,
    temporal_patch_size=2,
    sampling_style="nemotron_vl",
    target_num_patches=64,
    maintain_aspect_ratio=True,
)

# What the engine did otherwise than the trainer: (frames, target of patches).
EVERY = tuple(range(NUM_FRAMES))
CASES = {
    "the same": (EVERY, 64),
    "other frames": ((0, 1, 2, 4), 64),
    "another grid": (EVERY, 32),
    "both": ((0, 2, 3), 32),
}


@pytest.fixture(scope="module")
def clip_checkpoint(tmp_path_factory):
    """A checkpoint whose tokenizer knows every byte: the engine's text says which frames a tubelet holds."""
    directory = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(directory / "tokenizer")
    return write_checkpoint(directory / "trainer", tokenizer_of=directory / "tokenizer")


@pytest.fixture(scope="module")
def clip_processor(clip_checkpoint):
    return load_processor({"name": str(clip_checkpoint), "chat_template": "default"})


def in_nemo_rl(processor, frames, target):
    """NeMo-RL's own ids and tensors of these frames of the clip."""
    content = [
        {
            "type": "image",
            "image": picture(*SIZE, index),
            "_is_video_frame": True,
            "_video_source": "clip",
            "_video_frame_index": index,
            "_video_fps": 1.0,
        }
        for index in frames
    ]
    return process_nemotron_video_frames(
        processor,
        [{"role": "user", "content": content}],
        template_kwargs={},
        temporal_patch_size=2,
        target_num_patches=target,
        maintain_aspect_ratio=True,
    )


@pytest.fixture
def reference(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_RL_VIDEO_MEDIA_ROOT", str(tmp_path))
    paths = [tmp_path / f"frame-{index}.png" for index in EVERY]
    for index, path in enumerate(paths):
        picture(*SIZE, index).save(path)
    return build_cached_video_frame_data_url([str(path) for path in paths])


@pytest.fixture
def aligner(clip_checkpoint, tmp_path):
    return NemoRLAligner(
        NemoRLAlignerConfig(
            model_dir=clip_checkpoint,
            media_policy=MediaPolicy(roots=(tmp_path,)),
            layout=Layout.REMOTE,
            dtype=torch.float32,
            trust_remote_code=True,
            tokenizer_config={"name": str(clip_checkpoint), "chat_template": "default"},
            clips=SETTINGS,
        )
    )


def turn(reference, ids):
    source = MediaSource(ref=reference, kind="video", where="row clip")
    return NemoRLTurnRequest(row_id="clip", turn=0, token_ids=np.asarray(ids), media=(source,))


@pytest.mark.parametrize("case", CASES)
def test_a_clip_is_made_again_as_nemo_rl_makes_it(case, aligner, reference, clip_processor):
    frames, target = CASES[case]
    own = in_nemo_rl(clip_processor, frames, target)
    (aligned,) = aligner.align([turn(reference, own["input_ids"][0])])
    (item,) = aligned.report.media
    if case == "the same":
        assert item.verdict is Verdict.MATCHED and not aligned.changed and aligned.tensors is None
        return
    assert item.verdict is Verdict.REPAIRED, str(aligned.report)
    values = aligned.tensors.values
    assert values.keys() == {"pixel_values", "imgs_sizes", "num_frames"}
    assert torch.equal(values["pixel_values"], own["pixel_values"])
    assert torch.equal(values["imgs_sizes"], own["imgs_sizes"])
    assert values["num_frames"].tolist() == [len(frames)]


def test_a_frame_that_the_cache_does_not_hold_is_named(aligner, reference, clip_processor):
    ids = in_nemo_rl(clip_processor, (0, 1, 7), 64)["input_ids"][0]
    (aligned,) = aligner.align([turn(reference, ids)])
    assert aligned.report.neutral and aligned.report.reasons() == (Reason.FRAME_TIMES,)


def test_a_clip_outside_the_media_root_is_neutral_and_named(aligner, reference, clip_processor, monkeypatch):
    monkeypatch.setenv("NEMO_RL_VIDEO_MEDIA_ROOT", "/nowhere")
    (aligned,) = aligner.align([turn(reference, in_nemo_rl(clip_processor, EVERY, 64)["input_ids"][0])])
    assert aligned.report.neutral and aligned.report.reasons() == (Reason.DECODE_FAILED,)
    assert "NEMO_RL_VIDEO_MEDIA_ROOT" in str(aligned.report)


def test_references_are_found_in_every_form():
    row = {
        "responses_create_params": {
            "input": [
                {"content": [{"type": "input_video", "video_url": {"url": "file:///a.mp4"}}]},
                {"content": [{"type": "video", "video": "/b.mp4"}, {"type": "input_text", "text": "x"}]},
                {"content": "plain"},
            ]
        }
    }
    assert clip_references(row) == ("file:///a.mp4", "/b.mp4")


@pytest.mark.slow
def test_clips_through_actor_collector_buffer_and_batch(
    tmp_path, ray_head, installed, nemo_rl_root, clip_checkpoint, clip_processor, monkeypatch
):
    """Four clips as the engine may have seen them, beside images and text, in packed micro-batches."""
    monkeypatch.setenv("NEMO_RL_VIDEO_MEDIA_ROOT", str(tmp_path))
    own = {case: in_nemo_rl(clip_processor, *what) for case, what in CASES.items()}

    def ids(text, num_tokens):
        text += "<image>" * num_tokens + "</img>" * bool(num_tokens)
        return clip_processor.tokenizer(text)["input_ids"]

    clip = video_row(tmp_path, frames=NUM_FRAMES, height=SIZE[0], width=SIZE[1])
    clip["edge_prompts"] = [made["input_ids"][0].tolist() for made in own.values()]
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [
            clip,
            image_row(urls([SIZE]), [], id="image", edge_prompts=[ids("<img>", 50), ids("<img>", 18)]),
            image_row([], [], id="text", edge_prompts=[ids("no image", 0)]),
        ],
    )
    config = video_recipe(
        nemo_rl_root,
        clip_checkpoint,
        rows,
        "grpo.num_prompts_per_step=3",
        "grpo.num_generations_per_prompt=4",
        "++grpo.media_alignment.enabled=true",
        "++grpo.media_alignment.num_aligners=1",
        "logger.wandb_enabled=false",
        "++data.train.repeat=20",
    )
    materialize_vllm_video_config(config.policy, config.data)
    trajectories = collect(config, monkeypatch, groups=3)
    logs, flat = training_batch(trajectories)
    metrics = [trajectory["rollout_metrics"] for trajectory in trajectories]
    assert sum(entry.get("alignment/rows_masked", 0) for entry in metrics) == 0
    found = {}
    for log in logs:
        for case, made in own.items():
            if torch.equal(log[0]["token_ids"], made["input_ids"][0]):
                found[case] = log[0]
    assert found.keys() == own.keys()
    for case, made in own.items():
        pixels = found[case]["pixel_values"].as_tensor()
        # Repaired ones are in the policy's dtype already, bit for bit as NeMo-RL would cast them.
        assert torch.equal(pixels, made["pixel_values"].to(pixels.dtype)), case
        assert found[case]["num_frames"].as_tensor().tolist() == [len(CASES[case][0])]

    for parallel in (1, 2, 4):
        size = len(logs) // parallel
        for start in range(0, len(logs), size):
            shard = flat.slice(start, start + size)
            media = shard.get_multimodal_dict(as_tensors=True)
            counts = media["num_frames"].tolist() if media.get("num_frames") is not None else []
            sizes = media["imgs_sizes"].tolist() if counts else []
            assert num_tokens(counts, sizes) == int((shard["token_ids"] == CONTEXT).sum())


def num_tokens(counts, sizes):
    """Features of images and of clips' tubelets of two frames."""
    total = 0
    for count in counts:
        total += (count + 1) // 2 * features({"imgs_sizes": torch.tensor(sizes[:1])})
        sizes = sizes[count:]
    return total
