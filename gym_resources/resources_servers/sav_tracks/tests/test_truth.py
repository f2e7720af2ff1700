# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
from resources_servers.sav_tracks.truth import GroundTruthError, Task, TruthCache, read_truth

BOX = [100, 200, 300, 600]


def test_a_good_row_is_read(make_row):
    row = make_row("pt", {"a": [BOX, None], "b": [BOX, BOX]}, names={"a": "dog", "b": "cat"})
    row["objects"][1]["prompt_frame"] = 0
    truth = read_truth(row)
    assert truth.task is Task.PT and truth.num_frames == 2
    first, second = truth.objects
    assert (first.id, first.name) == ("a", "dog")
    assert first.visible.tolist() == [True, False]
    assert second.scored.tolist() == [False, True]
    assert first.masks[0].area == 20 * 20 and first.masks[1] is None


def replace(row, path, value):
    target = row
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["task"], "mask", "task: expected one of box, pt, ref"),
        (["task"], ["box"], "task: expected one of"),
        (["num_frames"], 0, "num_frames: expected 1 to 512"),
        (["num_frames"], True, "num_frames"),
        (["objects"], [], r"objects: expected a list of 1 to 64, got \[\]"),
        (["objects"], {}, "objects: expected a list"),
        (["objects", 0], 7, r"objects\[0\]: expected an object, got int"),
        (["objects", 0, "id"], " ", r"objects\[0\].id: expected a non-empty string"),
        (["objects", 0, "id"], "b", "ids must be unique"),
        (["objects", 0, "name"], 7, r"objects\[0\].name: expected a string"),
        (["objects", 0, "boxes"], [BOX], r"objects\[0\].boxes: expected a list of 2, got a list of 1"),
        (["objects", 0, "boxes", 0], [1, 2, 3], r"boxes\[0\]: expected four integers"),
        (["objects", 0, "boxes", 0], [1, 2, 3, 4.5], r"boxes\[0\]: expected four integers"),
        (["objects", 0, "boxes", 0], [1, 2, 3, 1001], r"boxes\[0\]: expected four integers"),
        (["objects", 0, "boxes", 0], [5, 2, 3, 4], "x1 < x2"),
        (["objects", 0, "boxes", 0], None, "the mask is not empty, but boxes"),
        (["objects", 0, "boxes"], [None, None], "the mask is not empty"),
        (["objects", 0, "masks", 0], None, "the mask is empty, but boxes"),
        (
            ["objects", 0, "masks", 0],
            {"size": [2, 2], "counts": [3]},
            r"objects\[0\].masks\[0\]: the runs cover",
        ),
        (["objects", 0, "masks"], None, "task pt needs one mask per frame"),
        (["objects", 0, "prompt_frame"], 2, "prompt_frame: expected 0 to 1"),
        (["objects", 0, "prompt_frame"], "0", "prompt_frame: expected 0 to 1"),
        (["objects", 0, "prompt_frame"], 0, "visible in no scored frame"),
    ],
)
def test_a_bad_row_says_which_field(make_row, path, value, words):
    row = make_row("pt", {"a": [BOX, None], "b": [BOX, BOX]})
    replace(row, path, value)
    with pytest.raises(GroundTruthError, match=words):
        read_truth(row)


def test_metadata_that_is_no_object_and_rows_that_are_too_large_are_refused(make_row):
    with pytest.raises(GroundTruthError, match="expected an object, got list"):
        read_truth([])
    row = make_row("box", {str(i): [BOX] * 200 for i in range(30)}, masks=False)
    with pytest.raises(GroundTruthError, match="more than 4096 places"):
        read_truth(row)


def test_masks_of_one_row_have_one_size(make_row):
    row = make_row("box", {"a": [BOX, BOX]})
    row["objects"][0]["masks"][1] = {"size": [2, 2], "counts": [1, 3]}
    with pytest.raises(
        GroundTruthError, match=r"all masks of a row must have one size, got \[\(2, 2\), \(50, 100\)\]"
    ):
        read_truth(row)


def test_an_all_zero_mask_is_absence(make_row):
    row = make_row("box", {"a": [BOX, None]})
    row["objects"][0]["masks"][1] = {"size": [50, 100], "counts": [5000]}
    assert read_truth(row).objects[0].masks[1] is None


def test_the_cache_decodes_each_content_once(make_row):
    cache = TruthCache()
    row = make_row("box", {"a": [BOX]})
    assert cache.get(row) is cache.get(copy.deepcopy(row))
    changed = make_row("box", {"a": [[0, 0, 10, 20]]})
    assert changed["row_id"] == row["row_id"]
    assert cache.get(changed) is not cache.get(row)
    assert (cache.num_misses, cache.num_hits, len(cache)) == (2, 2, 2)


def test_the_cache_forgets_the_oldest_within_its_bytes(make_row):
    rows = [make_row("box", {"a": [[0, 0, 10 * i, 20]]}, masks=False) for i in range(1, 6)]
    size = read_truth(rows[0]).num_bytes
    cache = TruthCache(max_bytes=2 * size)
    for row in rows:
        cache.get(row)
    assert len(cache) == 2 and cache.num_bytes == 2 * size
    cache.get(rows[4])
    assert cache.num_hits == 1
    assert len(TruthCache(max_bytes=0)._rows) == 0


def test_the_cache_refuses_what_is_not_json():
    with pytest.raises(GroundTruthError, match="not JSON"):
        TruthCache().get({"task": object()})
