# SPDX-License-Identifier: Apache-2.0
"""Frames are chosen, timed and named as NeMo-RL and the engine do it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_ext.align.timestamps import (
    frame_duration_ms,
    frame_indices,
    read_label,
    timestamps,
    tubelet_texts,
)
from nemo_rl_ext.media.sampling import num_sampled_frames, sample_frames

counts = st.integers(1, 600)


@pytest.mark.parametrize(
    "total, requested, patch, frames",
    [
        (100, 4, 1, (0, 33, 66, 99)),
        (100, 4, 2, (0, 33, 66, 99)),
        (100, 5, 2, (0, 33, 66, 99)),  # the request leaves no room to round up
        (7, 16, 2, (0, 1, 2, 4, 5, 6)),  # neither does the clip: six of its seven frames
        (7, 16, 1, (0, 1, 2, 3, 4, 5, 6)),
        (1, 8, 1, (0,)),
        (1, 8, 2, (0, 0)),  # a clip shorter than a tubelet repeats its frames
        (3, 8, 4, (0, 1, 1, 2)),
        (100, 1, 1, (0,)),
        (100, 1, 2, (0, 99)),
        (5, 2, 2, (0, 4)),
        (4, 3, 1, (0, 2, 3)),  # 1.5 rounds to even
    ],
)
def test_nemotron_vl_sampling(total, requested, patch, frames):
    assert sample_frames(total, requested, temporal_patch_size=patch) == frames


@given(total=counts, requested=counts, patch=st.integers(1, 4))
def test_sampled_frames_are_whole_tubelets_in_order(total, requested, patch):
    frames = sample_frames(total, requested, temporal_patch_size=patch)
    assert len(frames) == num_sampled_frames(requested, total, patch)
    assert len(frames) % patch == 0 and len(frames) <= max(requested, patch)
    assert list(frames) == sorted(frames) and 0 <= frames[0] <= frames[-1] < total
    if len(frames) <= total:
        assert len(set(frames)) == len(frames)
    if len(frames) > 1:
        assert (frames[0], frames[-1]) == (0, total - 1)


def test_uniform_sampling_rounds_down():
    assert sample_frames(120, 8, style="uniform") == (0, 17, 34, 51, 68, 85, 102, 119)
    assert sample_frames(10, 4, style="uniform") == (0, 3, 6, 9)
    assert sample_frames(11, 4, style="uniform") == (0, 3, 6, 10)
    assert sample_frames(3, 8, style="uniform", temporal_patch_size=2) == (0, 1, 2)


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0)])
def test_nothing_to_sample(arguments):
    with pytest.raises(ValueError, match="at least one frame"):
        sample_frames(*arguments)
    with pytest.raises(ValueError, match="nemotron_vl, uniform"):
        sample_frames(4, 4, style="random")


def test_times_count_whole_milliseconds():
    """The engine truncates 1000/29.97 ms to 33 ms, so that frame 119 is said to be at 3.93 s and not at 3.97 s."""
    assert frame_duration_ms(30000 / 1001) == 33
    assert timestamps((0, 1, 119), 30000 / 1001) == (0.0, 0.033, 3.927)
    for fps in (0.0, -1.0, float("nan"), float("inf"), 1001.0):
        with pytest.raises(ValueError, match="frame rate"):
            frame_duration_ms(fps)


def test_tubelet_texts():
    assert tubelet_texts((0, 12, 24, 36, 49), 25.0, 2) == (
        "Frame 1 sampled at 0.00 seconds and frame 2 sampled at 0.48 seconds: ",
        "\nFrame 3 sampled at 0.96 seconds and frame 4 sampled at 1.44 seconds: ",
        "\nFrame 5 sampled at 1.96 seconds: ",
    )
    assert tubelet_texts((0, 5), 2.0, 1) == (
        "Frame 1 sampled at 0.00 seconds: ",
        "\nFrame 2 sampled at 2.50 seconds: ",
    )


@given(total=counts, requested=st.integers(1, 40), patch=st.integers(1, 4), fps=st.floats(0.2, 99.0))
def test_alignment_reads_the_frames_back_from_the_text(total, requested, patch, fps):
    """Up to 100 frames/s the hundredths of a second in the text tell the frame; above, the sampler's word does."""
    frames = sample_frames(total, requested, temporal_patch_size=patch)
    labels = [read_label(text) for text in tubelet_texts(frames, fps, patch)]
    assert [number for label in labels for number in label.numbers] == list(range(1, len(frames) + 1))
    times = [time for label in labels for time in label.times]
    assert frame_indices(times, fps, hint=frames) == tuple(frames)


@pytest.mark.engine
def test_texts_equal_the_engines():
    processors = pytest.importorskip("vllm.transformers_utils.processors.nano_nemotron_vl")
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = {symbol: index for index, symbol in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    rng = np.random.default_rng(0)
    for _ in range(200):
        total, fps = (
            int(rng.integers(1, 400)),
            float(rng.choice([1.0, 2.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0])),
        )
        patch = int(rng.choice([1, 2, 4]))
        frames = sample_frames(total, int(rng.integers(1, 20)), style="uniform")
        texts = tubelet_texts(frames, fps, patch)
        details = processors.NanoNemotronVLProcessor.get_video_repl(
            tokens_per_frame=[0] * len(texts),
            frames_indices=list(frames),
            frame_duration_ms=int(1000.0 / fps),
            tokenizer=tokenizer,
            img_start_token_ids=tokenizer.encode("["),
            img_end_token_ids=tokenizer.encode("]"),
            img_context_token_ids=tokenizer.encode("*"),
            video_temporal_patch_size=patch,
        )
        assert tokenizer.decode(details.full) == "".join(text + "[]" for text in texts)


@pytest.mark.nemo_rl
def test_sampling_equals_nemo_rl():
    upstream = pytest.importorskip("nemo_rl.models.generation.vllm.video_utils")
    rng = np.random.default_rng(0)
    for _ in range(5000):
        total, requested, patch = (int(rng.integers(1, high)) for high in (400, 64, 5))
        fps = float(rng.choice([1.0, 2.0, 23.976, 25.0, 29.97, 30.0, 60.0]))
        expected = upstream._torchcodec_sample_indices(
            total_frames=total,
            fps=fps,
            requested_num_frames=requested,
            temporal_patch_size=patch,
            sampling_style="nemotron_vl",
        )
        assert list(sample_frames(total, requested, temporal_patch_size=patch, fps=fps)) == expected
