# SPDX-License-Identifier: Apache-2.0
"""Every index of every clip, in any order, is the frame of vLLM's own loader; or the clip is refused by name."""

import numpy as np
import pytest

from nemo_rl_ext.media.errors import MediaDecodeError
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.video import load_video

POLICY = MediaPolicy(timeout_s=120)
DAMAGED = ("hole_", "noise_", "gap_", "short_")

# What the engine's loader itself cannot use, or uses to no purpose, though the files are healthy.
REFUSED = {
    "animation.apng": "counts no frames",
    "animation.webp": "counts no frames",
    "av1.mp4": "does not read its first frame (it says: Your platform doesn't support hardware accelerated AV1",
    "av1.webm": "does not read its first frame",
    "cut_open_gop.ts": "does not read its first frame",
    "ffv1.mkv": "FFV1",
    "fps_1500.mkv": "frames per second",
    "fps_1500.mp4": "frames per second",
    "fps_5000.mp4": "frames per second",
    "fps_30000.mp4": "frames per second",
    "h264_interlaced.mp4": "interlaced",
    "h264_interlaced.ts": "interlaced",
    "mpeg2_interlaced.ts": "interlaced",
    "one_frame.avi": "does not read its first frame",
    "one_frame.gif": "does not read its first frame",
    "one_frame.mkv": "does not read its first frame",
    "one_frame.mp4": "does not read its first frame",
    "one_frame.ts": "does not read its first frame",
    "one_frame.webm": "does not read its first frame",
    "plain.h264": "counts no frames",
    "size_changes.h264": "counts no frames",
    "size_changes.mjpeg": "counts no frames",
    "two_frames.ts": "cannot open it",
}


@pytest.fixture(scope="module")
def engine_load():
    """vLLM's own loader: `{index: frame}`, count and rate; None where it gives no frame."""
    registry = pytest.importorskip("vllm.multimodal.video").VIDEO_LOADER_REGISTRY

    def load(data, num_frames=-1):
        try:
            frames, metadata = registry.load("nemotron_vl").load_bytes(data, num_frames=num_frames)
        except Exception:
            return None
        if not len(frames):
            return None
        by_index = dict(zip(metadata["frames_indices"], frames, strict=True))
        return by_index, metadata["total_num_frames"], metadata["fps"]

    return load


@pytest.mark.engine
@pytest.mark.slow
def test_every_index_in_random_order_equals_the_engines_or_the_clip_is_refused(corpus, engine_load):
    rng = np.random.default_rng(0)
    refused, compared = {}, 0
    for name, path in corpus.items():
        expected = engine_load(path.read_bytes())
        indices = rng.permutation(list(expected[0]) if expected else [0])
        try:
            video = load_video(name, POLICY, frame_indices=indices, base_dir=path.parent, where="row 1")
        except MediaDecodeError as error:
            assert name in str(error) and "row 1" in str(error)
            refused[name] = str(error)
            continue
        assert expected is not None, f"{name}: the engine refuses it"
        by_index, total, fps = expected
        assert (video.total_num_frames, video.fps) == (total, fps), name
        for index, frame in zip(indices, video.frames, strict=True):
            np.testing.assert_array_equal(frame, by_index[index], err_msg=f"{name}, frame {index}")
            compared += 1
        alone = int(rng.choice(indices))
        one = load_video(name, POLICY, frame_indices=[alone], base_dir=path.parent)
        np.testing.assert_array_equal(one.frames[0], by_index[alone], err_msg=f"{name}, frame {alone} alone")
    healthy = {name: error for name, error in refused.items() if not name.startswith(DAMAGED)}
    assert set(healthy) == set(REFUSED)
    assert all(REFUSED[name] in error for name, error in healthy.items()), healthy
    assert compared > 3000
