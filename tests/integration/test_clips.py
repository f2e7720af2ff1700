# SPDX-License-Identifier: Apache-2.0
"""Clips: a recipe's settings, references in rows, and reading through NeMo-RL's functions (here their shapes)."""

import asyncio
import base64
import dataclasses
import sys

import numpy as np
import pytest

from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration import clips
from nemo_rl_ext.integration.actor_alignment import ActorAlignment
from nemo_rl_ext.integration.aligner import NemoRLAligner
from nemo_rl_ext.integration.clips import CACHED_FRAMES, ClipReader, ClipSettings, can_read, clip_references
from nemo_rl_ext.integration.neutral import NeutralMedia
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.models.tokenizer import build_byte_tokenizer

SETTINGS = ClipSettings(
    num_frames=5,
    temporal_patch_size=2,
    sampling_style="nemotron_vl",
    target_num_patches=64,
    maintain_aspect_ratio=True,
)


def cached(count):
    return CACHED_FRAMES + base64.b64encode(str(count).encode()).decode()


def row_of(reference):
    part = {"type": "input_video", "video_url": {"url": reference}}
    return {"_rowidx": 0, "responses_create_params": {"input": [{"role": "user", "content": [part]}]}}


def test_settings_come_from_the_materialised_recipe_and_a_data_set_may_have_its_own():
    video = {"num_frames": 5, "temporal_patch_size": 2, "sampling_style": "nemotron_vl"}
    recipe = {
        "policy": {"generation": {"vllm_cfg": {"video": video}}},
        "data": {
            "default": {"video_target_num_patches": 64, "video_maintain_aspect_ratio": True},
            "train": {},
        },
    }
    assert ClipSettings.of(recipe) == SETTINGS
    recipe["data"]["train"]["video_target_num_patches"] = 128
    assert ClipSettings.of(recipe).target_num_patches == 128
    del recipe["data"]["default"]["video_maintain_aspect_ratio"]
    assert ClipSettings.of(recipe) is None


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
    assert clip_references({"responses_create_params": {"input": "plain"}}) == ()


def test_only_files_need_a_decoder(monkeypatch):
    monkeypatch.setattr(clips, "can_decode_files", lambda: False)
    assert can_read(cached(3)) and not can_read("file:///a.mp4")


@pytest.mark.parametrize("reference", [cached(5), "file:///clip.mp4"], ids=["cached frames", "a file"])
def test_a_clip_is_read_as_nemo_rl_reads_it(nemo_rl_shapes, reference):
    item = ClipReader(SETTINGS, 16).measure(MediaSource(ref=reference, kind="video", where="row r"))
    assert (item.size, item.frame_indices, item.fps) == ((160, 320), (0, 1, 2, 3, 4), 1.0)
    assert item.pixels()[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    fewer = dataclasses.replace(item, frame_indices=(1, 3))
    assert np.array_equal(fewer.pixels()[:, 0, 0, 0], [1, 3])
    if reference != "file:///clip.mp4":
        with pytest.raises(ValueError, match=r"frames \[7\], which the cached list does not hold"):
            dataclasses.replace(item, frame_indices=(1, 7)).pixels()


@pytest.mark.parametrize(
    "reference", [CACHED_FRAMES + base64.b64encode(b"none").decode(), "file:///other.mp4"]
)
def test_a_clip_that_cannot_be_read_says_so(nemo_rl_shapes, reference):
    item = ClipReader(SETTINGS, 16).measure(MediaSource(ref=reference, kind="video", where="row r"))
    assert item.error.startswith("row r: ")


@pytest.fixture
def byte_processor(processor):
    """The processor with a tokenizer of bytes, whose text says which frames a tubelet holds."""
    return type(processor)(processor.image_processor, build_byte_tokenizer())


@pytest.fixture
def plan(nemo_rl_shapes, byte_processor, aligner, pool, rows, monkeypatch):
    """A plan of one clip, whose engine wrote tubelets of this many tokens."""
    utils = sys.modules["nemo_rl.algorithms.utils"]
    monkeypatch.setattr(utils, "get_tokenizer", lambda config, get_processor=False: byte_processor)
    pool.aligner = NemoRLAligner(dataclasses.replace(aligner.config, clips=SETTINGS))
    alignment = ActorAlignment(
        neutral=NeutralMedia(family=pool.aligner.family, counters=("num_patches",)),
        pool=pool,
        settings=MediaAlignmentConfig(),
        repairs_clips=True,
    )

    def make(reference, lengths, frames=(0, 1, 2, 3, 4), labelled=True):
        text, listed = "look ", list(enumerate(frames, 1))
        for length in lengths:
            pair, listed = listed[:2], listed[2:]
            label = " and ".join(
                f"{'f' if place else 'F'}rame {number} sampled at {frame}.00 seconds"
                for place, (number, frame) in enumerate(pair)
            )
            text += f"{label}: " * labelled + f"<img>{'<image>' * length}</img>\n"
        row = row_of(reference)
        result = rows.result(row, [])
        result["response"]["output"][0]["prompt_token_ids"] = byte_processor.tokenizer(text)["input_ids"]
        return asyncio.run(alignment.plan(row, result, static_attached=False))

    return make


def test_a_clip_that_matches_ships_nothing(plan):
    found = plan(cached(5), [15, 15, 15])
    assert found.user[0].report.media[0].verdict is Verdict.MATCHED
    assert not found.user[0].changed and found.user[0].tensors is None and found.record.bytes_shipped == 0


@pytest.mark.parametrize(
    ("lengths", "frames"), [([8, 8, 8], (0, 1, 2, 3, 4)), ([15, 15], (0, 2, 3)), ([8, 8], (0, 2, 3))]
)
def test_a_clip_on_another_grid_or_of_other_frames_is_repaired(plan, lengths, frames):
    (turn,) = plan(cached(5), lengths, frames).user
    assert turn.changed and turn.report.repaired, str(turn.report)
    # NeMo-RL's own tensors of a clip have no counters.
    assert turn.tensors.values.keys() == {"pixel_values", "imgs_sizes", "num_frames"}
    assert turn.tensors.values["num_frames"].tolist() == [len(frames)]


def test_a_clip_that_nothing_explains_is_neutral_without_counters(plan):
    (turn,) = plan(cached(5), [15, 14, 15]).user
    assert turn.report.neutral and turn.report.reasons() == (Reason.FRAME_GRID,)
    assert "num_patches" not in turn.tensors.values


def test_a_prompt_that_names_no_frames_is_left_to_the_comparison(plan):
    assert plan(cached(5), [15, 15, 15], labelled=False).user == (None,)


def test_a_clip_too_large_to_travel_is_neutral_and_says_so(plan, monkeypatch):
    monkeypatch.setattr(clips, "MAX_CLIP_BYTES", 400_000)
    (turn,) = plan(cached(5), [8, 8, 8]).user
    assert turn.report.neutral and "that a repaired clip may send with a rollout" in str(turn.report)


def test_a_clip_that_cannot_be_read_here_is_left_to_the_comparison(plan, monkeypatch):
    monkeypatch.setattr(clips, "can_decode_files", lambda: False)
    assert plan("file:///clip.mp4", [15, 15, 15]).user == (None,)
