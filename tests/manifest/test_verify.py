# SPDX-License-Identifier: Apache-2.0
"""A broken picture or clip stops a run before it starts, by file, line and field."""

import numpy as np
import pytest

from nemo_rl_ext.manifest.loading import ManifestError, load_manifest
from nemo_rl_ext.manifest.verify import verify_media

cv2 = pytest.importorskip("cv2")


@pytest.fixture
def clip(tmp_path):
    path = tmp_path / "clip.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 24.0, (64, 48))
    for value in range(12):
        writer.write(np.full((48, 64, 3), 10 * value, np.uint8))
    writer.release()
    return path


def video(name):
    return {"type": "input_video", "video_url": name}


def frame(name):
    return {"type": "input_image", "image_url": name, "_is_video_frame": True, "_video_source": "v"}


def test_whole_media_pass(write_manifest, make_row, clip):
    rows = [
        make_row("a.png", video("clip.mp4"), "?"),
        make_row(frame("a.png"), frame("a.png"), "?"),
        make_row("?"),
    ]
    verify_media(load_manifest(write_manifest(rows)))


@pytest.mark.parametrize("part", ["b.png", frame("b.png"), video("clip.mp4")])
def test_a_file_that_does_not_decode_is_named_with_its_first_line(
    write_manifest, make_row, clip, part, tmp_path
):
    rows = [make_row("a.png", "?"), make_row("?", part), make_row(part, "?")]
    path = write_manifest(rows)
    name = part if isinstance(part, str) else part.get("video_url") or part["image_url"]
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 3])
    with pytest.raises(ManifestError) as caught:
        verify_media(load_manifest(path))
    text = str(caught.value)
    assert "1 media file cannot be used" in text
    assert f"{path}:2: responses_create_params.input.0.content.1: " in text
    assert name in text


def test_one_file_used_as_picture_and_as_clip_is_judged_as_each(write_manifest, make_row, clip):
    rows = [make_row(video("clip.mp4"), "?"), make_row({"type": "input_image", "image_url": "clip.mp4"}, "?")]
    with pytest.raises(ManifestError, match=r"rows.jsonl:2: .*clip.mp4"):
        verify_media(load_manifest(write_manifest(rows)))
