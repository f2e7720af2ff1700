# SPDX-License-Identifier: Apache-2.0
"""What is said of clips that are odd: which are used, which are refused, and in which words."""

import json
import os

import numpy as np
import pytest

from nemo_rl_ext.manifest.check import check_manifest
from nemo_rl_ext.manifest.measuring import CheckConfig
from nemo_rl_ext.media.errors import MediaDecodeError
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.video import load_video, probe_video

POLICY = MediaPolicy(timeout_s=120)
pytestmark = pytest.mark.slow


def _numbers(corpus, number, name, **options):
    video = load_video(name, POLICY, base_dir=corpus[name].parent, **options)
    return video, [number(frame) for frame in video.frames]


@pytest.mark.parametrize(
    "name, total, first",
    [
        ("plain.mp4", 40, 0),
        ("cut.mp4", 99, 21),
        ("cut_bframes.mp4", 99, 21),
        ("cut.mov", 99, 21),
        ("cut.mkv", 120, 0),
        ("cut_open_gop.mp4", 16, 24),
        ("open_gop.mp4", 40, 0),
        ("one_gop_bframes.mp4", 120, 0),
        ("wmv2.wmv", 40, 0),
        ("mpeg4.avi", 40, 0),
        ("vp9.webm", 40, 0),
        ("hevc_10bit.mp4", 40, 0),
        ("animation.gif", 40, 0),
        ("audio_first.mp4", 40, 0),
        ("fragmented.mp4", 40, 0),
    ],
)
def test_an_index_is_one_picture_in_every_order_of_access(corpus, number, name, total, first):
    order = np.random.default_rng(1).permutation(total)
    video, numbers = _numbers(corpus, number, name, frame_indices=order)
    assert numbers == [first + index for index in order] and video.total_num_frames == total
    for index in (total - 1, 0, total // 2):
        assert _numbers(corpus, number, name, frame_indices=[index])[1] == [first + index]


def test_a_transport_stream_is_used_as_the_engine_uses_it(corpus, number):
    """vLLM's loader looks at the stream's end first, which costs it the frames before the second keyframe."""
    video, numbers = _numbers(corpus, number, "plain.ts", num_frames=4, style="uniform")
    assert (video.total_num_frames, video.declared_num_frames) == (28, 40)
    assert numbers == [12, 21, 30, 39]
    assert "only 28 of the 40 frames" in video.remarks()[0]


@pytest.mark.parametrize(
    "name, share",
    [("short_front_one_gop.mp4", 0.5), ("short_plain.mkv", 0.5), ("short_front_plain.mp4", 0.5)],
)
def test_a_file_that_was_cut_off_is_sampled_over_what_it_holds(corpus, number, name, share):
    video, numbers = _numbers(corpus, number, name, num_frames=4)
    assert share * video.declared_num_frames < video.total_num_frames <= video.declared_num_frames
    assert numbers == list(video.frame_indices) and numbers[-1] == video.total_num_frames - 1


@pytest.mark.parametrize("name", ["hole_one_gop.mp4", "hole_plain.mkv", "hole_mpeg4.avi", "noise_plain.mp4"])
def test_damage_in_mid_clip_is_refused_and_measured(corpus, name):
    with pytest.raises(
        MediaDecodeError, match=r"damaged: from frame \d+ on, \d+ of its \d+ frames cannot be trusted"
    ):
        load_video(name, POLICY, num_frames=8, base_dir=corpus[name].parent, where="row 3")


def test_frames_before_the_damage_are_used(corpus, number):
    video, numbers = _numbers(corpus, number, "hole_one_gop.mp4", frame_indices=[40, 3, 20])
    assert numbers == [40, 3, 20] and video.total_num_frames == 120


@pytest.mark.parametrize("name", ["fps_30000.mp4", "fps_5000.mp4"])
def test_a_rate_that_no_clip_has_is_a_fault_of_the_file(corpus, name):
    for use in (load_video, probe_video):
        with pytest.raises(MediaDecodeError, match=rf"{name}.*row 9.*000 frames per second"):
            use(name, POLICY, base_dir=corpus[name].parent, where="row 9")


def test_check_names_file_and_line_of_every_clip(corpus, tmp_path):
    names = [
        "plain.mp4",
        "fps_30000.mp4",
        "variable.mp4",
        "hole_plain.mkv",
        "plain.ts",
        "plain.avi",
        "one_frame.mp4",
    ]
    for name in names:
        os.symlink(corpus[name], tmp_path / name)
    rows = [
        {
            "responses_create_params": {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_video", "video_url": name},
                            {"type": "input_text", "text": "Which?"},
                        ],
                    }
                ]
            },
            "verifier_metadata": {"answer": "a"},
        }
        for name in names
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = MediaPolicy(roots=(tmp_path, corpus["plain.mp4"].parent), timeout_s=120)
    report = check_manifest(tmp_path / "rows.jsonl", CheckConfig(policy=policy))
    assert {fault.line for fault in report.faults} == {2, 4, 7}, report.faults
    faults = {fault.line: fault.problem for fault in report.faults}
    assert (
        "30000 frames per second" in faults[2]
        and "damaged" in faults[4]
        and "give it as an image" in faults[7]
    )
    warnings = {fault.line: fault.problem for fault in report.warnings if fault.kind == "clip"}
    assert "average rate of 11.11" in warnings[3]
    assert "only 28 of the 40" in warnings[5]
    assert 1 not in warnings
    assert report.num_rows == 4
