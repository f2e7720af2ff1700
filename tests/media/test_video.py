# SPDX-License-Identifier: Apache-2.0
"""Real clips decode to the engine's frames; hanging, crashing and damaged ones to a named failure."""

import base64
import os
import pickle
import signal
import threading

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.media.decoding import DecoderFailure, DecoderProcess, decoder
from nemo_rl_ext.media.errors import MediaDecodeError
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.sampling import sample_frames
from nemo_rl_ext.media.video import load_frame_list, load_video, probe_video

pytest.importorskip("cv2")
POLICY = MediaPolicy(timeout_s=120)
SMALL, WIDE = "carphone_pristine.mp4", "bikes.mp4"


@pytest.fixture
def fresh_decoder():
    """No child is running yet."""
    decoder().close()
    return decoder()


def test_frames_of_a_real_clip(clips):
    video = load_video(SMALL, POLICY, num_frames=8, temporal_patch_size=2, base_dir=clips)
    assert video.frames.shape == (8, 144, 176, 3) and video.frames.dtype == np.uint8
    assert video.frame_indices == (0, 17, 34, 51, 68, 85, 102, 119) and video.size == (144, 176)
    assert (
        video.fps == pytest.approx(30000 / 1001)
        and video.total_num_frames == video.declared_num_frames == 120
    )
    assert video.timestamps[:2] == (0.0, 0.561)
    assert video.engine_metadata() == {
        "total_num_frames": 120,
        "fps": video.fps,
        "duration": pytest.approx(4.004),
        "video_backend": "opencv",
        "frames_indices": [0, 17, 34, 51, 68, 85, 102, 119],
        "do_sample_frames": False,
    }
    assert len({video.frames[i].tobytes() for i in range(8)}) == 8


def test_exactly_the_frames_asked_for(clips):
    every = load_video(SMALL, POLICY, num_frames=120, base_dir=clips)
    assert every.frame_indices == tuple(range(120))
    for frames in ((5,), (3, 4, 90), (0, 0), (119, 7)):
        some = load_video(SMALL, POLICY, frame_indices=frames, base_dir=clips)
        assert some.frame_indices == frames
        np.testing.assert_array_equal(some.frames, every.frames[list(frames)])
    assert every.content_hash != some.content_hash
    with pytest.raises(MediaDecodeError, match="frame 120 was asked for, but it has 120 frames"):
        load_video(SMALL, POLICY, frame_indices=(1, 120), base_dir=clips)
    with pytest.raises(ValueError, match="frame_indices"):
        load_video(SMALL, POLICY, frame_indices=(), base_dir=clips)


@pytest.mark.parametrize(
    "num_frames, patch, expected", [(1, 1, 1), (1, 2, 2), (5, 2, 4), (6, 4, 4), (200, 4, 120)]
)
def test_whole_tubelets(clips, num_frames, patch, expected):
    video = load_video(SMALL, POLICY, num_frames=num_frames, temporal_patch_size=patch, base_dir=clips)
    assert len(video.frames) == len(video.frame_indices) == expected


def test_probing_decodes_nothing_but_tells_the_size(clips):
    info = probe_video(WIDE, POLICY, base_dir=clips)
    assert (info.num_frames, info.fps, info.size) == (250, 25.0, (272, 640))


@pytest.mark.engine
def test_frames_indices_and_rate_equal_the_engines_own_decoder(clips, tmp_path, turned):
    registry = pytest.importorskip("vllm.multimodal.video").VIDEO_LOADER_REGISTRY
    combinations = 0
    for path in sorted(clips.glob("*.mp4")):
        large = path.stem == "bigbuckbunny"
        variants = {path.name: path.read_bytes()}
        for degrees in () if large else (90, 180, 270):
            variants[f"{path.stem}-{degrees}.mp4"] = turned(path.read_bytes(), degrees)
        for name, data in variants.items():
            (tmp_path / name).write_bytes(data)
            for num_frames in (4,) if large else (1, 2, 7):
                frames, metadata = registry.load("nemotron_vl").load_bytes(data, num_frames=num_frames)
                video = load_video(name, POLICY, num_frames=num_frames, style="uniform", base_dir=tmp_path)
                np.testing.assert_array_equal(video.frames, frames, err_msg=f"{name}, {num_frames} frames")
                assert list(video.frame_indices) == metadata["frames_indices"]
                assert (video.fps, video.total_num_frames) == (metadata["fps"], metadata["total_num_frames"])
                combinations += 1
    assert combinations > 30


def test_a_clip_that_is_turned_by_its_metadata(clips, tmp_path, turned):
    upright = load_video(SMALL, POLICY, num_frames=2, base_dir=clips)
    for degrees, quarter_turns in ((90, -1), (180, 2), (270, 1)):
        (tmp_path / "turned.mp4").write_bytes(turned((clips / SMALL).read_bytes(), degrees))
        video = load_video("turned.mp4", POLICY, num_frames=2, base_dir=tmp_path)
        np.testing.assert_array_equal(video.frames, np.rot90(upright.frames, quarter_turns, axes=(1, 2)))


def test_a_clip_that_promises_too_many_frames_is_sampled_over_those_it_has(clips, tmp_path, cut_short):
    (tmp_path / "cut.mp4").write_bytes(cut_short((clips / WIDE).read_bytes(), 0.6))
    video = load_video("cut.mp4", POLICY, num_frames=4, temporal_patch_size=2, base_dir=tmp_path)
    assert 100 < video.total_num_frames < video.declared_num_frames == 250
    assert video.frame_indices == sample_frames(video.total_num_frames, 4, temporal_patch_size=2)
    whole = load_video(WIDE, POLICY, frame_indices=video.frame_indices, base_dir=clips)
    np.testing.assert_array_equal(video.frames, whole.frames)
    with pytest.raises(MediaDecodeError, match="cannot be decoded, of"):
        load_video("cut.mp4", POLICY, frame_indices=(0, video.total_num_frames), base_dir=tmp_path)


def test_data_urls(clips):
    url = (
        "data:video/mp4;base64," + base64.b64encode((clips / "carphone_distorted.mp4").read_bytes()).decode()
    )
    video = load_video(url, POLICY, num_frames=3)
    same = load_video("carphone_distorted.mp4", POLICY, num_frames=3, base_dir=clips)
    assert video.content_hash == same.content_hash


def test_what_is_no_video_is_refused_by_name(clips, tmp_path):
    (tmp_path / "text.mp4").write_text("this is not a video")
    (tmp_path / "empty.mp4").write_bytes(b"")
    Image.new("RGB", (32, 32)).save(tmp_path / "picture.png")
    (tmp_path / "half.mp4").write_bytes((clips / SMALL).read_bytes()[:100_000])
    (tmp_path / "directory.mp4").mkdir()
    os.mkfifo(tmp_path / "pipe.mp4")
    names = ("text.mp4", "empty.mp4", "picture.png", "half.mp4", "directory.mp4", "pipe.mp4", "none.mp4")
    for name in names:
        with pytest.raises(MediaDecodeError) as caught:
            load_video(name, POLICY, base_dir=tmp_path, where="train.jsonl:4")
        message = str(caught.value)
        assert name in message and "train.jsonl:4" in message and "\n" not in message
        assert pickle.loads(pickle.dumps(caught.value)).args == (message,)
    with pytest.raises(MediaDecodeError, match="outside the media roots"):
        load_video(str(clips / SMALL), POLICY, base_dir=tmp_path)


def test_limits(clips):
    with pytest.raises(MediaDecodeError, match="144x176, over the limit of 25000 pixels"):
        load_video(SMALL, MediaPolicy(max_pixels=25_000, timeout_s=120), base_dir=clips)
    with pytest.raises(MediaDecodeError, match="bytes, over the limit"):
        load_video(SMALL, MediaPolicy(max_bytes=1000, timeout_s=120), base_dir=clips)


def test_a_decoder_that_hangs_is_replaced(clips, fresh_decoder):
    """The child is really stopped, as if a library slept for ever."""
    before = load_video(SMALL, POLICY, num_frames=2, base_dir=clips)
    stopped = fresh_decoder.pid
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(MediaDecodeError, match=r"row 7\).* no answer within 0.5 s"):
        load_video(SMALL, POLICY, num_frames=2, base_dir=clips, timeout_s=0.5, where="row 7")
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)
    after = load_video(SMALL, POLICY, num_frames=2, base_dir=clips)
    assert after.content_hash == before.content_hash and fresh_decoder.pid != stopped


def test_a_decoder_that_is_killed_from_outside_is_replaced_and_the_clip_tried_again(clips, fresh_decoder):
    load_video(SMALL, POLICY, num_frames=2, base_dir=clips)
    os.kill(fresh_decoder.pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, args=(fresh_decoder.pid, signal.SIGKILL))
    killer.start()
    assert load_video(SMALL, POLICY, num_frames=2, base_dir=clips).size == (144, 176)
    killer.join()
    assert load_video(SMALL, POLICY, num_frames=2, base_dir=clips).size == (144, 176)


def test_a_clip_that_ends_two_decoders_is_refused(clips, monkeypatch):
    process = DecoderProcess()
    monkeypatch.setattr("nemo_rl_ext.media.decoding.sys.executable", "/bin/false")
    with open(clips / SMALL, "rb") as clip, pytest.raises(DecoderFailure, match=r"died 2 times \(exit code"):
        process.request({"backend": "opencv"}, clip, 60)
    process.close()


def test_threads_share_one_child(clips):
    process, results = DecoderProcess(), []

    def work(frame):
        message = {
            "backend": "opencv",
            "max_pixels": 1 << 20,
            "probe": False,
            "num_frames": 1,
            "temporal_patch_size": 1,
            "style": "uniform",
            "frame_indices": [frame],
        }
        with open(clips / SMALL, "rb") as clip:
            results.append((frame, process.request(message, clip, 120)[1]))

    threads = [threading.Thread(target=work, args=(frame,)) for frame in range(0, 60, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.close()
    assert len(results) == 6
    for frame, frames in results:
        expected = load_video(SMALL, POLICY, frame_indices=[frame], base_dir=clips)
        np.testing.assert_array_equal(frames, expected.frames)


@pytest.mark.slow
def test_torchcodec_agrees_where_it_loads_and_says_so_where_not(clips):
    try:
        video = load_video(SMALL, POLICY, num_frames=4, backend="torchcodec", base_dir=clips)
    except ImportError as error:
        assert "torchcodec" in str(error) and "another video backend" in str(error)
        return
    expected = load_video(SMALL, POLICY, num_frames=4, base_dir=clips)
    assert video.frame_indices == expected.frame_indices and video.frames.shape == expected.frames.shape
    assert np.abs(video.frames.astype(int) - expected.frames).mean() < 3


def test_cached_frames_become_one_video(clips, tmp_path):
    video = load_video(SMALL, POLICY, num_frames=3, base_dir=clips)
    names = [f"frame{index}.png" for index in range(3)]
    for name, frame in zip(names, video.frames, strict=True):
        Image.fromarray(frame).save(tmp_path / name)
    cached = load_frame_list(names, POLICY, base_dir=tmp_path)
    assert (cached.frame_indices, cached.fps, cached.timestamps) == ((0, 1, 2), 1.0, (0.0, 1.0, 2.0))
    assert cached.content_hash == video.content_hash and cached.total_num_frames == 3
    timed = load_frame_list(
        names, POLICY, base_dir=tmp_path, frame_indices=video.frame_indices, fps=video.fps
    )
    assert timed.timestamps == video.timestamps and timed.total_num_frames == 120


def test_cached_frames_that_make_no_video(tmp_path):
    for name, size in (("a.png", (8, 6)), ("b.png", (6, 8))):
        Image.new("RGB", size).save(tmp_path / name)
    options = {"base_dir": tmp_path, "source": "clip", "where": "row 3"}
    for refs, extra, problem in (
        ([], {}, "lists no frames"),
        (["a.png", "b.png"], {}, r"frame 1 is \(8, 6\) and the first \(6, 8\)"),
        (["a.png"], {"fps": 2.0}, "together"),
        (["a.png", "a.png"], {"fps": 2.0, "frame_indices": [0]}, "2 frames, but 1 frame indices"),
        (["a.png", "a.png"], {"fps": 2.0, "frame_indices": [4, 3]}, "backwards"),
        (["a.png"], {"fps": 30000.0, "frame_indices": [0]}, "30000 frames per second, expected more than 0"),
        (["a.png"], {"fps": float("nan"), "frame_indices": [0]}, "nan frames per second"),
        (["missing.png"], {}, "no such file"),
    ):
        with pytest.raises(MediaDecodeError, match=problem) as caught:
            load_frame_list(refs, POLICY, **options, **extra)
        assert "row 3" in str(caught.value)
