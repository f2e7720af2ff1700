# SPDX-License-Identifier: Apache-2.0
"""The demo's rows need their pixels, are balanced, fit the engine, and are the same every time."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.manifest import demo
from nemo_rl_ext.manifest.demo import build_demo_manifest
from nemo_rl_ext.manifest.demo_clips import VIDEOS
from nemo_rl_ext.manifest.demo_layout import CYCLE, MAX_MODEL_LEN, MOVING, RESIZED, TILER, plan_rows
from nemo_rl_ext.manifest.demo_pictures import KINDS, PHOTOGRAPHS, Picture, encode, render
from nemo_rl_ext.manifest.loading import load_manifest
from nemo_rl_ext.manifest.row_media import media_by_turn
from nemo_rl_ext.manifest.scoring import score
from nemo_rl_ext.manifest.verify import verify_media
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaReader

for package in ("skimage", "skvideo", "cv2"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Two cycles of training rows and one of validation rows."""
    return build_demo_manifest(tmp_path_factory.mktemp("demo"), num_rows=2 * len(CYCLE), seed=0)


@pytest.fixture(scope="module")
def reader(built):
    return MediaReader(
        policy=load_manifest(built[0]).policy,
        base_dir=built[0].parent,
        num_frames=4,
        frames_per_tubelet=2,
        backend="opencv",
    )


@pytest.fixture(scope="module")
def rows(built, reader):
    """`[(row, [decoded pixels, ...]), ...]` of the training rows with pictures alone."""
    pictures = [row for row in load_manifest(built[0]) if shape(row) not in (*MOVING, "text")]
    return [
        (row, [reader.decode(source)[1] for turn in media_by_turn(row) for source in turn])
        for row in pictures
    ]


@pytest.fixture(scope="module")
def clips(built, reader):
    """`[(row, frames [frames, height, width, 3] as they are sampled), ...]` of the rows that ask about a clip."""
    moving = [row for row in load_manifest(built[0]) if shape(row) in MOVING]
    return [(row, reader.decode(media_by_turn(row)[-1][-1])[1]) for row in moving]


def shape(row):
    return row.verifier_metadata["shape"]


def brighter(pixels):
    middle = pixels.shape[1] // 2
    left, right = pixels[:, :middle].mean(), pixels[:, -middle:].mean()
    return ("l" if left > right else "r"), abs(left - right)


def test_the_named_picture_answers_the_question(rows):
    for row, pictures in rows:
        lit = row.verifier_metadata["lit"]
        answer, contrast = brighter(pictures[lit])
        assert answer == row.verifier_metadata["answer"] and contrast > 50, row.row_id
        for index, pixels in enumerate(pictures):
            if index != lit:
                assert brighter(pixels)[1] < 3, row.row_id


def test_swapped_or_transposed_pixels_do_not(rows):
    """Transposed, the cue is gone; those of another row's picture agree with the answer by chance."""
    lit = [
        (row.verifier_metadata["answer"], pictures[row.verifier_metadata["lit"]]) for row, pictures in rows
    ]
    for _, pixels in lit:
        assert brighter(pixels.transpose(1, 0, 2))[1] < 25
    agreement = [answer == brighter(pixels)[0] for (answer, _), (_, pixels) in pairwise(lit)]
    assert 0.25 < np.mean(agreement) < 0.75


def moves_to(frames):
    """Where the light of a clip goes, from its first and last frame."""
    (first, strength), (last, _) = brighter(frames[0]), brighter(frames[-1])
    assert first != last and strength > 50
    return last


def test_a_clip_answers_by_its_motion_and_backwards_it_answers_wrong(clips):
    assert {shape(row) for row, _ in clips} == set(MOVING)
    for row, frames in clips:
        assert len(frames) == (2 if shape(row) == "short_clip" else 4), row.row_id
        assert moves_to(frames) == row.verifier_metadata["answer"] != moves_to(frames[::-1]), row.row_id


def test_another_rows_clip_agrees_with_the_answer_by_chance(clips):
    agreement = [
        row.verifier_metadata["answer"] == moves_to(frames) for (row, _), (_, frames) in pairwise(clips)
    ]
    assert 0.2 < np.mean(agreement) < 0.8


def test_clips_come_as_files_as_frame_lists_and_as_a_tools_result(built):
    by_shape = {shape(row): row for row in load_manifest(built[0])}
    assert [ref.kind for ref in by_shape["clip"].media_refs()] == ["video"]
    frames = by_shape["frames"].media_refs()
    assert [ref.kind for ref in frames] == ["frame"] * 4 and frames[0].frame_index == 0 and frames[0].fps
    assert by_shape["short_clip"].num_frames == 2
    assert [ref.kind for ref in by_shape["picture_and_clip"].media_refs()] == ["image", "video"]
    assert [(ref.turn, ref.kind) for ref in by_shape["tool_clip"].media_refs()] == [
        (0, "image"),
        (1, "video"),
    ]


def test_text_rows_carry_their_answer(built):
    texts = [row for row in load_manifest(built[0]) if shape(row) == "text"]
    assert texts and not any(row.media_refs() for row in texts)
    for row in texts:
        assert row.messages()[0].parts[-1].text == row.verifier_metadata["answer"] + "?"


def test_nothing_but_the_media_tells_the_answer():
    """Answers are balanced within each shape of row; the text before them never differs by answer."""
    plans = plan_rows("train", 4 * len(CYCLE), np.random.default_rng(0))
    counts = Counter((plan.shape, plan.answer) for plan in plans)
    shapes = {plan.shape for plan in plans}
    assert shapes == {*CYCLE, "overlong"}
    for name in shapes:
        assert abs(counts[name, "l"] - counts[name, "r"]) <= 1, counts
    assert sum(counts[name, "l"] for name in shapes) == len(plans) / 2


def test_few_training_rows_outgrow_the_context_and_no_held_out_one():
    plans = plan_rows("train", 240, np.random.default_rng(0))
    assert [index for index, plan in enumerate(plans) if plan.shape == "overlong"] == [60, 180]
    held_out = plan_rows("validation", 240, np.random.default_rng(0))
    assert not any(plan.shape == "overlong" for plan in held_out)


def test_an_overlong_row_fits_at_first_and_not_with_its_tools_result(tmp_path):
    """The byte-level tokenizer makes at least one token of every byte."""
    build_demo_manifest(tmp_path, num_rows=61, num_validation_rows=2, seed=0)
    row = load_manifest(tmp_path / "train.jsonl")[60]
    assert shape(row) == "overlong" and row.num_turns == 2
    assert len(row.messages(1)[0].parts[0].text) > MAX_MODEL_LEN


def test_one_whole_picture_is_as_bright_whichever_half_is_lit():
    for kind in KINDS:
        levels = []
        for lit in "lr":
            spec = Picture(photograph="coffee.png", size=(90, 121), kind=kind, lit=lit, crop=(0.3, 0.5, 0.5))
            levels.append(load_image(encode(spec)[0], MediaPolicy()).pixels.mean())
        assert abs(levels[0] - levels[1]) < 3, kind


def test_every_kind_shows_what_was_rendered():
    for kind in KINDS:
        spec = Picture(photograph="chelsea.png", size=(80, 120), kind=kind, lit="r", crop=(0.5, 0.5, 0.5))
        pixels = load_image(encode(spec)[0], MediaPolicy()).pixels
        assert pixels.shape == (80, 120, 3)
        inside = np.s_[10:-10, 10:-10]
        difference = np.abs(pixels[inside].mean(-1) - render(spec)[inside].mean(-1)).mean()
        assert difference < 6, (kind, difference)


def test_decoding_unlike_the_engine_shows_another_picture():
    """The odd kinds are there to be noticed: what a naive decoder sees has the wrong answer or another size."""
    import io

    naive = {}
    for kind in ("turned_jpeg", "sideways_jpeg", "transparent_png"):
        spec = Picture(photograph="chelsea.png", size=(80, 120), kind=kind, lit="r", crop=(0.5, 0.5, 0.5))
        naive[kind] = np.asarray(Image.open(io.BytesIO(encode(spec)[0])).convert("RGB"))
    assert brighter(naive["turned_jpeg"])[0] == "l"
    assert naive["sideways_jpeg"].shape == (120, 80, 3)
    assert naive["transparent_png"][0, 0].max() == 0


def test_rows_fit_the_engine_and_a_good_share_is_over_its_budget(rows):
    resized, several_grids = set(), set()
    for row, pictures in rows:
        sizes = [pixels.shape[:2] for pixels in pictures]
        grids = TILER.joint_grids(sizes, MAX_MODEL_LEN - 4)
        tokens = [grid.num_tokens() for grid in grids]
        assert sum(tokens) + 20 < MAX_MODEL_LEN
        if any(grid != TILER.static_grid(size) for grid, size in zip(grids, sizes, strict=True)):
            resized.add(row.verifier_metadata["shape"])
        if any(len(TILER.feasible_grids(size, n)) > 1 for size, n in zip(sizes, tokens, strict=True)):
            several_grids.add(row.verifier_metadata["shape"])
    assert resized == set(RESIZED)
    assert "square" in several_grids
    share = sum(shape(row) in resized for row, _ in rows) / (2 * len(CYCLE))
    assert share == sum(shape in RESIZED for shape in CYCLE) / len(CYCLE) >= 0.15


def test_two_turn_rows_bring_their_last_media_late(built):
    late = [row for row in load_manifest(built[0]) if row.turns]
    assert len(late) == 6
    for row in late:
        assert row.num_turns == 2 and row.messages(1)[0].role == "tool"
        assert {media.turn for media in row.media_refs()} == {0, 1}


def test_validation_shows_other_photographs_and_videos(built):
    for sources in (PHOTOGRAPHS, VIDEOS):
        assert not set(sources["train"]) & set(sources["validation"])
    train, validation = (load_manifest(path) for path in built)
    assert (len(train), len(validation)) == (2 * len(CYCLE), len(CYCLE))
    assert not {row.row_id for row in train} & {row.row_id for row in validation}


def tree(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_same_every_time_and_another_for_another_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build_demo_manifest(tmp_path / name, num_rows=13, seed=seed)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert (tmp_path / "a/train.jsonl").read_bytes() != (tmp_path / "c/train.jsonl").read_bytes()


def test_rebuilt_only_when_something_differs(tmp_path, monkeypatch):
    train, _ = build_demo_manifest(tmp_path, num_rows=4, seed=0)
    (tmp_path / "checkpoint").mkdir()
    before = train.stat().st_mtime_ns, tree(tmp_path)
    monkeypatch.setattr(demo, "plan_rows", None)  # a rebuild would call it
    build_demo_manifest(tmp_path, num_rows=4, seed=0)
    assert (train.stat().st_mtime_ns, tree(tmp_path)) == before
    with pytest.raises(TypeError):
        build_demo_manifest(tmp_path, num_rows=4, seed=1)
    assert tree(tmp_path) == before[1], "a build that fails leaves what was there"
    monkeypatch.undo()
    build_demo_manifest(tmp_path, num_rows=4, seed=1)
    assert (tmp_path / "checkpoint").is_dir()
    assert len(list(tmp_path.glob("demo-media-*"))) == 1 and not list(tmp_path.glob(".demo-*"))
    load_manifest(train)
    train.unlink()
    build_demo_manifest(tmp_path, num_rows=4, seed=1)
    assert len(load_manifest(train)) == 4


def test_too_few_rows(tmp_path):
    with pytest.raises(ValueError, match="at least two train rows"):
        build_demo_manifest(tmp_path, num_rows=1, seed=0)


@pytest.mark.parametrize(
    "text, reward",
    [
        ("l", 1.0),
        (" l", 1.0),
        ("left", 1.0),
        ("r", 0.0),
        ("", 0.0),
        ("  ", 0.0),
        ("L", 0.0),
        (None, 0.0),
        (3, 0.0),
    ],
)
def test_score(rows, text, reward):
    row = next(row for row, _ in rows if row.verifier_metadata["answer"] == "l")
    assert score(row, text) == reward
    assert score({"verifier_metadata": {"answer": "l"}}, text) == reward


@pytest.mark.parametrize(
    "row", [None, {}, {"verifier_metadata": None}, {"verifier_metadata": {"answer": ""}}, 3]
)
def test_score_never_raises(row):
    assert score(row, "l") == 0.0 and score(row, "") == 0.0


def test_paths_are_relative_so_that_the_directory_can_move(built, tmp_path):
    for line in built[0].read_text().splitlines():
        for part in json.loads(line)["responses_create_params"]["input"][0]["content"]:
            assert not (part.get("image_url") or part.get("video_url") or "").startswith("/")
    moved = tmp_path / "moved"
    import shutil

    shutil.copytree(built[0].parent, moved)
    manifest = load_manifest(moved / "train.jsonl")
    assert len(manifest) == 2 * len(CYCLE)
    verify_media(manifest)
