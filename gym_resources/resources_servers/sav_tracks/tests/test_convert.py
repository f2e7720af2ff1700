# SPDX-License-Identifier: Apache-2.0
import base64
import io
import json

import numpy as np
import pytest
from resources_servers.sav_tracks import convert, synthetic, validate
from resources_servers.sav_tracks.annotation import (
    AnnotationError,
    grid_box,
    read_annotation,
    sample_entries,
    shrink,
)
from resources_servers.sav_tracks.rle import decode, encode
from resources_servers.sav_tracks.scoring import score_answer
from resources_servers.sav_tracks.truth import read_truth

decord = pytest.importorskip("decord", reason="the converter reads videos with decord (pip install decord2)")
cv2 = pytest.importorskip("cv2", reason="the synthetic set is written with OpenCV")
Image = pytest.importorskip("PIL.Image", reason="frames are written with Pillow")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two synthetic SA-V videos over a moving gradient."""
    base = tmp_path_factory.mktemp("sav")
    ramp = np.add.outer(np.arange(96), np.arange(128)).astype(np.uint8)
    synthetic._write_video(
        base / "clip.mp4", np.stack([np.dstack([np.roll(ramp, i, 1)] * 3) for i in range(30)])
    )
    arguments = [
        "--num-videos",
        "2",
        "--num-frames",
        "24",
        "--height",
        "96",
        "--clip",
        str(base / "clip.mp4"),
    ]
    assert synthetic.main([str(base / "set"), *arguments]) == 0
    return base / "set"


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def convert_to(folder, out, *arguments):
    assert convert.main([str(folder), "--out", str(out), *arguments]) == 0
    return rows_of(out)


def truth_answer(metadata, key="box"):
    tracks = []
    for item in metadata["objects"]:
        frames = []
        for frame, box in enumerate(item["boxes"]):
            if box is None:
                frames.append({"frame": frame, "visible": False})
            elif key == "box":
                frames.append({"frame": frame, "box": box})
            else:
                frames.append({"frame": frame, "point": [(box[0] + box[2]) // 2, (box[1] + box[3]) // 2]})
        tracks.append({"id": item["id"], "frames": frames})
    return json.dumps({"tracks": tracks})


@pytest.mark.parametrize("task", ["box", "pt", "ref"])
def test_rows_score_one_for_their_own_truth(folder, tmp_path, task):
    rows = convert_to(folder, tmp_path / "rows.jsonl", "--task", task, "--names", str(folder / "names.json"))
    assert len(rows) == 2
    for row in rows:
        metadata = row["verifier_metadata"]
        score = score_answer(truth_answer(metadata, "point" if task == "pt" else "box"), metadata)
        assert score.reward == 1.0, metadata["row_id"]
    assert any(None in item["boxes"] for row in rows for item in row["verifier_metadata"]["objects"])


def test_frame_rows_show_the_annotated_frames(folder, tmp_path):
    row = convert_to(folder, tmp_path / "rows.jsonl", "--task", "box", "--num-frames", "3")[0]
    content = row["responses_create_params"]["input"][0]["content"]
    images = [part for part in content if part["type"] == "input_image"]
    assert [part["image_url"].rpartition("/")[2] for part in images] == [
        "00000.jpg",
        "00008.jpg",
        "00020.jpg",
    ]
    assert all(part["detail"] == "auto" for part in images)
    texts = [part["text"] for part in content if part["type"] == "input_text"]
    assert texts[:3] == ["Frame 0:", "Frame 1:", "Frame 2:"]
    # the painted object is where its box says
    item = next(item for item in row["verifier_metadata"]["objects"] if item["id"] == "0")
    names = json.loads((folder / "names.json").read_text())["syn_000000"]
    picture = np.asarray(Image.open(images[1]["image_url"]).convert("RGB")).astype(int)
    x1, y1, x2, y2 = item["boxes"][1]
    middle = picture[(y1 + y2) * picture.shape[0] // 2000, (x1 + x2) * picture.shape[1] // 2000]
    colour = np.array(synthetic._COLOURS[names["0"].split()[0]])
    assert np.abs(middle - colour).max() < 60


def test_objects_without_names_are_introduced_by_a_box_that_is_not_scored(folder, tmp_path):
    row = convert_to(folder, tmp_path / "rows.jsonl", "--task", "box")[0]
    text = row["responses_create_params"]["input"][0]["content"][-1]["text"]
    for item in row["verifier_metadata"]["objects"]:
        shown = item["prompt_frame"]
        assert f"the object inside the box {item['boxes'][shown]} of frame {shown}" in text


def test_inline_rows_carry_their_pictures_and_are_made_smaller_on_request(folder, tmp_path):
    row = convert_to(
        folder, tmp_path / "r.jsonl", "--task", "ref", "--media", "inline", "--frame-side", "64"
    )[0]
    url = next(p for p in row["responses_create_params"]["input"][0]["content"] if p["type"] == "input_image")
    head, data = url["image_url"].split(",", 1)
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (64, 48)
    assert not (tmp_path / "r_frames").exists()


def test_video_rows_name_the_file_and_the_times(folder, tmp_path):
    row = convert_to(folder, tmp_path / "r.jsonl", "--task", "pt", "--media", "video", "--num-frames", "2")[0]
    video, text = row["responses_create_params"]["input"][0]["content"]
    assert video == {"type": "input_video", "video_url": str((folder / "syn_000000.mp4").resolve())}
    assert text["text"].startswith("Frames of this video: 0 at 0.00 s, 1 at 0.83 s.\n")


def test_masks_can_be_left_out_and_are_made_smaller(folder, tmp_path):
    bare = convert_to(folder, tmp_path / "a.jsonl", "--task", "box", "--mask-side", "0")[0]
    assert all("masks" not in item for item in bare["verifier_metadata"]["objects"])
    small = convert_to(folder, tmp_path / "b.jsonl", "--task", "box", "--mask-side", "32")[0]
    assert read_truth(small["verifier_metadata"]).objects[0].masks[0].width == 32


def test_a_thin_object_survives_shrinking_and_a_small_mask_keeps_its_size():
    thin = np.zeros((100, 200), dtype=bool)
    thin[7, 3] = True
    mask = decode(encode(thin), max_pixels=100_000)
    assert np.argwhere(shrink(mask, 20)).tolist() == [[0, 0]]
    assert shrink(mask, 400).shape == (100, 200)
    assert grid_box(mask) == [15, 70, 20, 80]


def test_a_box_is_never_empty_on_the_grid():
    edge = np.zeros((4000, 4000), dtype=bool)
    edge[3999, 3999] = True
    assert grid_box(decode(encode(edge), max_pixels=1 << 24)) == [999, 999, 1000, 1000]


def test_entries_are_spread_over_the_video():
    assert sample_entries(6, 3) == [0, 2, 5]
    assert sample_entries(2, 8) == [0, 1]
    assert sample_entries(9, 1) == [0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not readable as JSON"),
        ("[]", "expected 'masklet'"),
        ('{"masklet": []}', "expected 'masklet'"),
        ('{"masklet": [[{}], []]}', "every frame must list the same objects"),
        ('{"masklet": [[{}, {}]], "masklet_id": [1, 1]}', "one unique id per object"),
        ('{"masklet": [[{}]], "video_id": "v"}', r"masklet\[0\]\[0\]: 'size' must be"),
    ],
)
def test_a_broken_annotation_is_named(tmp_path, content, words):
    path = tmp_path / "v_manual.json"
    path.write_text(content)
    with pytest.raises(AnnotationError, match=words):
        read_annotation(path).mask(0, 0)


def test_a_folder_that_cannot_be_converted_leaves_no_file(folder, tmp_path, capsys):
    broken = tmp_path / "set"
    broken.mkdir()
    out = tmp_path / "rows.jsonl"

    def fails():
        with pytest.raises(SystemExit) as caught:
            convert.main([str(broken), "--out", str(out), "--task", "box"])
        assert caught.value.code == 2 and not list(tmp_path.glob("rows.jsonl*"))
        return capsys.readouterr().err

    assert "no *_manual.json" in fails()
    annotation = broken / "syn_000000_manual.json"
    annotation.write_text((folder / annotation.name).read_text())
    assert "syn_000000.mp4 does not exist" in fails()
    frames = np.zeros((3, 96, 128, 3), dtype=np.uint8)
    synthetic._write_video(broken / "syn_000000.mp4", frames)
    assert "the annotation reaches frame 20 but the video has 3 frames" in fails()


def test_a_video_without_a_usable_object_gives_no_row(folder, tmp_path, caplog):
    empty = {"size": [96, 128], "counts": [96 * 128]}
    path = tmp_path / "v_manual.json"
    path.write_text(json.dumps({"video_id": "v", "masklet": [[empty], [empty]]}))
    assert convert.main([str(tmp_path), "--out", str(tmp_path / "r.jsonl"), "--task", "box"]) == 0
    assert "no row made" in caplog.text and rows_of(tmp_path / "r.jsonl") == []


def test_the_validator_names_file_line_and_row(folder, tmp_path, capsys):
    rows = convert_to(folder, tmp_path / "rows.jsonl", "--task", "box", "--media", "video")
    other = {"agent_ref": {"name": "other_agent"}, "verifier_metadata": None}
    manifest = tmp_path / "mixed.jsonl"
    manifest.write_text("\n".join(map(json.dumps, [other, *rows])) + "\n\n")
    assert validate.main([str(manifest)]) == 0
    assert "2 rows can be scored" in capsys.readouterr().out
    rows[1]["verifier_metadata"]["objects"][0]["boxes"][0] = [1, 2, 3]
    manifest.write_text("\n".join(map(json.dumps, [other, *rows])))
    with pytest.raises(
        validate.RowError, match=r"mixed.jsonl:3: row 'syn_000001_manual_box': objects\[0\].boxes\[0\]"
    ):
        validate.validate_file(manifest)
    with pytest.raises(SystemExit) as caught:
        validate.main([str(manifest)])
    assert caught.value.code == 2 and "mixed.jsonl:3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "rows.jsonl:1: not JSON"),
        ("3", "rows.jsonl:1: expected an object"),
        ("{}", "row without verifier_metadata: verifier_metadata: expected an object"),
        ('{"agent_ref": {"name": "x"}}', "no row for sav_tracks_simple_agent"),
    ],
)
def test_the_validator_refuses_what_is_no_manifest(tmp_path, content, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(validate.RowError, match=words):
        validate.validate_file(path)


def test_the_background_can_be_drawn_and_the_seed_decides_it(tmp_path):
    sets = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        arguments = ["--num-videos", "1", "--num-frames", "8", "--height", "64", "--seed", seed]
        assert synthetic.main([str(tmp_path / name), *arguments]) == 0
        sets.append((tmp_path / name / "syn_000000_manual.json").read_text())
        reader = decord.VideoReader(str(tmp_path / name / "syn_000000.mp4"))
        assert reader[0].shape == (64, 112, 3) and len(reader) == 8
    assert sets[0] == sets[1] != sets[2]


def test_a_missing_clip_is_an_error(tmp_path):
    with pytest.raises(SystemExit) as caught:
        synthetic.main([str(tmp_path / "out"), "--clip", str(tmp_path / "missing.mp4")])
    assert caught.value.code == 2
    with pytest.raises(RuntimeError, match="cannot write MP4"):
        synthetic._write_video(tmp_path / "missing" / "x.mp4", np.zeros((1, 16, 16, 3), dtype=np.uint8))
