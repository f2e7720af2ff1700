# SPDX-License-Identifier: Apache-2.0
"""What not looking earns: the README's table, and how the baselines stand to each other."""

import json
from pathlib import Path

import pytest
from resources_servers.sav_tracks import baselines

README = Path(__file__).parents[1] / "README.md"
LEFT, RIGHT = [0, 0, 400, 500], [500, 500, 900, 1000]


def test_each_baseline_answers_as_it_says(make_row):
    row = make_row("box", {"1": [LEFT, RIGHT, None]})
    still = {**row, "objects": [{**row["objects"][0], "prompt_frame": 0}]}
    found = baselines.baselines([row])
    assert found["oracle"]["reward"] == 1.0 and found["empty"]["reward"] == 0.0
    assert found["absent"] == {"accuracy": 0.0, "format": 1.0, "reward": 0.1}
    assert found["whole"]["accuracy"] == pytest.approx(0.2 * 2 / 3)
    assert found["still"] == found["centre"]
    moved = baselines.baselines([still])
    assert moved["still"]["accuracy"] == 0.0 and moved["oracle"]["accuracy"] == 1.0
    points = baselines.baselines([make_row("pt", {"1": [[400, 400, 600, 600], LEFT]})])
    assert points["oracle"]["accuracy"] == 1.0 and points["whole"]["accuracy"] == 0.5


def test_the_command_prints_a_table_or_one_line(tmp_path, make_row, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"verifier_metadata": make_row("box", {"1": [LEFT]})}))
    assert baselines.main([str(path)]) == 0
    assert "| oracle | 1.000 | 1.000 | 1.000 |" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        baselines.main([str(tmp_path / "none")])
    assert caught.value.code == 2


@pytest.mark.slow
def test_the_readme_s_table_is_what_24_synthetic_videos_give(tmp_path):
    pytest.importorskip("decord", reason="reads videos (pip install decord2)")
    pytest.importorskip("cv2", reason="writes the synthetic video")
    from resources_servers.sav_tracks import convert, synthetic
    from resources_servers.sav_tracks.validate import read_rows

    synthetic.main([str(tmp_path / "set"), "--num-videos", "24", "--num-shapes", "3"])
    rewards = {}
    for task in ("box", "pt", "ref"):
        out = tmp_path / f"{task}.jsonl"
        convert.main([str(tmp_path / "set"), "--task", task, "--frame-side", "32", "--out", str(out)])
        found = baselines.baselines(read_rows(out))
        rewards[task] = {name: values["reward"] for name, values in found.items()}
        assert found["absent"]["accuracy"] == 0.0 and rewards[task]["empty"] == 0.0
        assert max(reward for name, reward in rewards[task].items() if name != "oracle") < 0.4
    table = "\n".join(
        f"| {name} | " + " | ".join(f"{rewards[task][name]:.3f}" for task in rewards) + " |"
        for name in rewards["box"]
    )
    assert table in README.read_text(encoding="utf-8"), table
