# SPDX-License-Identifier: Apache-2.0
"""A real engine decides the placeholder runs; NeMo-RL's server, actor, collector and buffer do the rest.

NeMo-Gym's servers are left out; `gym_edge.EngineEdge` sends their requests. `test_gym_servers.py` has them in.
"""

import pytest
from driving import engine_recipe, play, said

pytestmark = pytest.mark.slow


def test_a_real_engine_fits_three_over_budget_images_and_training_follows(
    engine, tmp_path, ray_head, installed, nemo_rl_root, monkeypatch
):
    # 188 tokens each for the trainer alone, 141 each where 512 tokens of context are shared.
    images = ([(97, 1500)] * 3, [(160, 320)])
    model, url = engine
    sizes, found, total, _ = play(engine_recipe(nemo_rl_root, tmp_path, model, images), monkeypatch, url)
    assert found == 2 * 3 * 141 + 2 * 50
    assert sizes == sorted(2 * [[[96, 1504]] * 3] + 2 * [[[160, 320]]])
    assert total("media_repaired") == 6 and total("media_matched") == 2 and total("rows_masked") == 0


@pytest.mark.parametrize("evidence", ["runs", "receipt"])
def test_recorded_grids_settle_what_runs_leave_open(
    evidence, engine, tmp_path, ray_head, installed, nemo_rl_root, monkeypatch
):
    # 240 tokens each: 32 x 30 patches in the engine, which 30 x 32 would explain as well.
    lines = {
        "runs": ["patch grids from the placeholder runs"],
        "receipt": [
            "patch grids from the engine's record",
            "the engine's media receipts arrive with the rollouts",
        ],
    }
    before = [said(line) for line in lines[evidence]]
    images = ([(500, 500)] * 2, [(160, 320)])
    model, url = engine
    config = engine_recipe(nemo_rl_root, tmp_path, model, images, evidence=evidence)
    sizes, found, total, _ = play(config, monkeypatch, url)
    assert [said(line) for line in lines[evidence]] == [count + 1 for count in before]
    assert found == 2 * 2 * 240 + 2 * 50
    if evidence == "receipt":
        assert sizes == sorted(2 * [[[512, 480]] * 2] + 2 * [[[160, 320]]])
        assert total("media_repaired") == 4 and total("rows_masked") == 0
    else:
        assert total("media_ambiguous") == total("reason/ambiguous_grid") == 4 and total("rows_masked") == 2
