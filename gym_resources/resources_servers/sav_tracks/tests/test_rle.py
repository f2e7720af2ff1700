# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from resources_servers.sav_tracks.rle import MaskError, decode, encode


def random_mask(rng):
    height, width = rng.integers(1, 40, 2)
    if rng.random() < 0.5:
        return rng.random((height, width)) < rng.random()
    mask = np.zeros((height, width), dtype=bool)
    top, left = rng.integers(0, height), rng.integers(0, width)
    mask[top : top + rng.integers(1, 30), left : left + rng.integers(1, 30)] = True
    return mask


def test_decoding_gives_back_what_was_encoded():
    rng = np.random.default_rng(0)
    for _ in range(300):
        mask = random_mask(rng)
        decoded = decode(encode(mask), max_pixels=10_000)
        assert np.array_equal(decoded.dense(), mask)
        assert decoded.area == mask.sum()


def test_uncompressed_counts_are_read():
    decoded = decode({"size": [2, 3], "counts": [1, 2, 3]}, max_pixels=6)
    assert decoded.dense().tolist() == [[False, True, False], [True, False, False]]


def test_questions_without_a_dense_mask_agree_with_the_dense_mask():
    rng = np.random.default_rng(1)
    for _ in range(300):
        mask = random_mask(rng)
        decoded = decode(encode(mask), max_pixels=10_000)
        rows, columns = np.indices(mask.shape)
        assert np.array_equal(decoded.contains(rows, columns), mask)
        if mask.any():
            ys, xs = np.nonzero(mask)
            assert decoded.bounds() == (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
        else:
            assert decoded.bounds() is None


@pytest.mark.parametrize(
    ("rle", "words"),
    [
        ("abc", "expected an object"),
        ({"size": [2], "counts": "0"}, "'size' must be"),
        ({"size": [2, True], "counts": "0"}, "'size' must be"),
        ({"size": [2000, 2000], "counts": "0"}, "smaller --mask-side"),
        ({"size": [2, 3], "counts": None}, "must be a string"),
        ({"size": [2, 3], "counts": ""}, "is empty or holds a character"),
        ({"size": [2, 3], "counts": "\u00e9"}, "does not use"),
        ({"size": [2, 3], "counts": "~"}, "does not use"),
        ({"size": [2, 3], "counts": "P"}, "cut in the middle"),
        ({"size": [2, 3], "counts": "P" * 20 + "0"}, "too long"),
        ({"size": [2, 3], "counts": [3, 4]}, "cover 7 pixels"),
        ({"size": [2, 3], "counts": [7, -1]}, "longer than the frame"),
        ({"size": [2, 3], "counts": [10**30]}, "no run length"),
        ({"size": [2, 3], "counts": []}, "is empty"),
    ],
)
def test_a_broken_mask_says_what_is_wrong(rle, words):
    with pytest.raises(MaskError, match=words):
        decode(rle, max_pixels=100)
