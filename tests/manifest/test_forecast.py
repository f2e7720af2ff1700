# SPDX-License-Identifier: Apache-2.0
"""Forecasts agree with the engine's arithmetic and with what was measured on it."""

import numpy as np
import pytest

from nemo_rl_ext.align.families.registry import default_family
from nemo_rl_ext.align.grids import DynamicTiler
from nemo_rl_ext.align.video_grids import VideoTiler
from nemo_rl_ext.manifest.forecast import EngineModel, Measured, engine_from_checkpoint, forecast
from nemo_rl_ext.manifest.rows import ManifestRow

TINY = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=16, max_num_patches=1024)
FAMILY = default_family(min_num_patches=16, max_num_patches=1024)


def images(*sizes, turn=0):
    return [Measured(kind="image", turn=turn, size=size) for size in sizes]


@pytest.fixture
def row(make_row):
    return ManifestRow.from_json(make_row("?", id="r"), line=1)


@pytest.fixture
def two_turns(make_row):
    return ManifestRow.from_json(make_row("?", id="r", turns=[[{"role": "tool", "content": "here"}]]), line=1)


def test_images_that_share_a_small_context(row):
    """Measured on vLLM 0.32.0: three images of 736 static tokens get [165, 144, 144] in a context of 512."""
    found = forecast(
        row, images((480, 640), (1024, 300), (1024, 300)), EngineModel(family=FAMILY, max_model_len=512)
    )
    assert found.image_runs == (165, 144, 144)
    assert found.static_runs == (252, 232, 232)
    assert (found.num_resized, found.num_changing, found.fits) == (3, 0, True)
    assert found.pressure == pytest.approx(716 / 508)
    assert found.sequence_tokens == 453 + found.text_tokens


def test_the_crash_row(row):
    """Sixteen 2400x1080 frames as images: 40800 tokens alone, 32160 under a context of 32768."""
    found = forecast(row, images(*[(1080, 2400)] * 16), EngineModel())
    assert sum(found.static_runs) == 40800 and sum(found.image_runs) == 32160
    assert found.num_resized == 16 and found.fits


def test_a_later_turn_changes_earlier_images(two_turns):
    engine = EngineModel(family=FAMILY, max_model_len=512, max_new_tokens=4)
    media = images((480, 640)) + images((1024, 300), (1024, 300), turn=1)
    found = forecast(two_turns, media, engine)
    assert found.image_runs == (165, 144, 144) and found.num_changing == 1
    alone = forecast(two_turns, images((480, 640), turn=1), engine)
    assert (alone.num_changing, alone.num_resized) == (0, 0)


def test_rows_that_do_not_fit(row):
    big = images((512, 512), (512, 512))
    assert forecast(row, big, EngineModel(family=FAMILY, max_model_len=512)).fits
    assert not forecast(row, big, EngineModel(family=FAMILY, max_model_len=512, max_new_tokens=20)).fits
    assert forecast(row, big, EngineModel(family=FAMILY, max_model_len=600, max_new_tokens=20)).fits


def test_clips_have_one_run_per_tubelet(make_row):
    row = ManifestRow.from_json(make_row("?", num_frames=6))
    clip = Measured(kind="video", turn=0, size=(144, 176), num_frames=120, fps=29.97)
    clips = default_family(video=VideoTiler(16, 2, 64, True, 2))
    found = forecast(row, [clip], EngineModel(family=clips))
    assert found.video_runs == (12, 12, 12) and found.num_videos == 1 and found.image_runs == ()
    cached = Measured(kind="video", turn=0, size=(144, 176), num_frames=5, is_sampled=True)
    assert forecast(row, [cached], EngineModel(family=clips)).video_runs == (12, 12, 12)


def test_ambiguous_images_are_counted(row):
    found = forecast(
        row, images((398, 375), (595, 593), (694, 708)), EngineModel(family=FAMILY, max_model_len=512)
    )
    assert found.num_ambiguous >= 1
    assert forecast(row, images((480, 640)), EngineModel(family=FAMILY)).num_ambiguous == 0


def test_text_alone(row):
    found = forecast(row, [], EngineModel(max_model_len=64))
    assert (found.image_runs, found.video_runs, found.pressure, found.fits) == ((), (), 0.0, True)
    assert 0 < found.sequence_tokens == found.text_tokens < 64


@pytest.mark.engine
def test_video_grids_equal_the_engines():
    processors = pytest.importorskip("vllm.transformers_utils.processors.nano_nemotron_vl")
    rng = np.random.default_rng(0)
    for _ in range(5000):
        width, height = (int(side) for side in rng.integers(1, 3000, 2))
        target, keep = int(rng.integers(1, 4096)), bool(rng.integers(2))
        expected = processors.get_video_target_size_and_feature_size(
            orig_w=width,
            orig_h=height,
            target_patches=target,
            maintain_aspect_ratio=keep,
            patch_size=16,
            downsample_ratio=0.5,
        )
        grid = VideoTiler(16, 2, target, keep).grid((height, width))
        assert (grid.width * 16, grid.height * 16, grid.num_tokens()) == expected


def test_text_is_counted_with_the_checkpoints_tokenizer(tiny_checkpoint, tmp_path, two_turns):
    engine = engine_from_checkpoint(tiny_checkpoint, max_model_len=512)
    assert engine.sizer == TINY and engine.family.frames_per_tubelet() == 2
    found = forecast(two_turns, images((480, 640)), engine)
    # One byte per token: role headers, questions and ends of turns, and the two wrappers of the image.
    prompt = "?user\n??\n?assistant\n" + "?\n" + "?tool\nhere?\n?assistant\n"
    assert found.text_tokens == len(prompt) + 2
    with pytest.raises(ValueError):
        engine_from_checkpoint(tmp_path)
