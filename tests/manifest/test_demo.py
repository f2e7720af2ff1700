# SPDX-License-Identifier: Apache-2.0
"""The demo's rows need their pixels, are balanced, fit the engine, and are the same every time."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.manifest import demo
from nemo_rl_ext.manifest.demo import TILER, build_demo_manifest, score
from nemo_rl_ext.manifest.demo_pictures import KINDS, PHOTOGRAPHS, Picture, encode, render
from nemo_rl_ext.manifest.loading import load_manifest
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.sources import MediaPolicy

pytest.importorskip("skimage")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Two cycles of training rows and one of validation rows."""
    return build_demo_manifest(tmp_path_factory.mktemp("demo"), num_rows=40, seed=0)


@pytest.fixture(scope="module")
def rows(built):
    """`[(row, [decoded picture, ...]), ...]` of the training manifest."""
    manifest = load_manifest(built[0])
    load = lambda media: load_image(media.ref, manifest.policy, base_dir=manifest.base_dir).pixels  # noqa: E731
    return [(row, [load(media) for media in row.media_refs()]) for row in manifest]


def brighter(pixels):
    middle = pixels.shape[1] // 2
    left, right = pixels[:, :middle].mean(), pixels[:, -middle:].mean()
    return ("l" if left > right else "r"), abs(left - right)


def test_the_named_picture_answers_the_question(rows):
    for row, pictures in rows:
        lit = row.verifier_metadata["image"]
        answer, contrast = brighter(pictures[lit])
        assert answer == row.verifier_metadata["answer"] and contrast > 50, row.row_id
        for index, pixels in enumerate(pictures):
            if index != lit:
                assert brighter(pixels)[1] < 3, row.row_id


def test_swapped_or_transposed_pixels_do_not(rows):
    """Transposed, the cue is gone; those of another row's picture agree with the answer by chance."""
    lit = [
        (row.verifier_metadata["answer"], pictures[row.verifier_metadata["image"]]) for row, pictures in rows
    ]
    for _, pixels in lit:
        assert brighter(pixels.transpose(1, 0, 2))[1] < 25
    agreement = [answer == brighter(pixels)[0] for (answer, _), (_, pixels) in pairwise(lit)]
    assert 0.25 < np.mean(agreement) < 0.75


def test_nothing_but_the_pixels_tells_the_answer(rows):
    """Answers are balanced within each shape of row; the text before them never differs by answer."""
    counts = Counter((row.verifier_metadata["shape"], row.verifier_metadata["answer"]) for row, _ in rows)
    shapes = {shape for shape, _ in counts}
    assert shapes == {"one", "odd", "two", "many", "square", "tool", "tool_many"}
    for shape in shapes:
        assert abs(counts[shape, "l"] - counts[shape, "r"]) <= 1, counts
    assert sum(counts[shape, "l"] for shape in shapes) == len(rows) / 2


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
        grids = TILER.joint_grids(sizes, demo.MAX_MODEL_LEN - 4)
        tokens = [grid.num_tokens() for grid in grids]
        assert sum(tokens) + 20 < demo.MAX_MODEL_LEN
        if any(grid != TILER.static_grid(size) for grid, size in zip(grids, sizes, strict=True)):
            resized.add(row.verifier_metadata["shape"])
        if any(len(TILER.feasible_grids(size, n)) > 1 for size, n in zip(sizes, tokens, strict=True)):
            several_grids.add(row.verifier_metadata["shape"])
    assert resized == {"many", "square", "tool_many"}
    assert "square" in several_grids
    share = sum(row.verifier_metadata["shape"] in resized for row, _ in rows) / len(rows)
    assert share == 0.25


def test_two_turn_rows_bring_their_last_pictures_late(rows):
    late = [row for row, _ in rows if row.turns]
    assert len(late) == 6
    for row in late:
        assert row.num_turns == 2 and row.messages(1)[0].role == "tool"
        assert {media.turn for media in row.media_refs()} == {0, 1}


def test_validation_shows_other_photographs(built):
    assert not set(PHOTOGRAPHS["train"]) & set(PHOTOGRAPHS["validation"])
    train, validation = (load_manifest(path) for path in built)
    assert (len(train), len(validation)) == (40, 20)
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
    monkeypatch.setattr(demo, "_plan_rows", None)  # a rebuild would call it
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
            assert not part.get("image_url", "").startswith("/")
    moved = tmp_path / "moved"
    import shutil

    shutil.copytree(built[0].parent, moved)
    assert len(load_manifest(moved / "train.jsonl")) == 40
