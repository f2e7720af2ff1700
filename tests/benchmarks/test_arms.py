# SPDX-License-Identifier: Apache-2.0
"""Wrong pixels with right counts: every arm trains without an error, and the log-prob gap tells them apart."""

import json

import pytest

from benchmarks import arms

pytestmark = pytest.mark.engine


def test_the_gap_tells_right_pixels_from_wrong_ones_at_once(tmp_path, monkeypatch, capsys, cluster):
    monkeypatch.setattr(arms, "TRAIN_ROWS", 48)
    monkeypatch.setattr(arms, "VALIDATION_ROWS", 12)
    results = arms.main(["--steps", "1", "--seeds", "1", "--json", str(tmp_path / "arms.json")])
    assert json.loads((tmp_path / "arms.json").read_text()) == results
    gaps = {arm: seeds[0]["gap_max"] for arm, seeds in results.items()}
    assert set(gaps) == set(arms.ARMS["image"])
    assert gaps["aligned"] < 1e-3
    assert all(gap > 10 * gaps["aligned"] for arm, gap in gaps.items() if arm != "aligned"), gaps
    assert "| aligned |" in capsys.readouterr().out


def test_an_unknown_arm_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        arms.main(["--arms", "mirrored"])
    assert "transposed" in capsys.readouterr().err
