# SPDX-License-Identifier: Apache-2.0
"""NeMo-Gym's agent, model server and verifier between NeMo-RL's actor and a real engine.

The servers run in Gym's own environment (`make gym`; GYM_VENV=dir for elsewhere), the engine in its own. The actor
sends them rows as NeMo-Gym's client does; that client is not part of NeMo-RL's test environment.
"""

import os
from pathlib import Path

import pytest
from driving import engine_recipe, play

from nemo_rl_ext.grpo.collecting.gym_servers import GymConfig, start_gym

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("GYM_VENV") or ROOT / ".venv-gym")
AGENT = "sav_tracks_simple_agent"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gym,
    pytest.mark.skipif(
        not (VENV / "bin" / "gym").exists(),
        reason=f"no NeMo-Gym environment in {VENV}: `make gym` builds it, GYM_VENV names another",
    ),
]


@pytest.fixture
def agent_url(engine, tmp_path):
    """Where a running agent of NeMo-Gym takes rows; its model server asks the engine."""
    settings = GymConfig(
        venv=VENV,
        root=ROOT / "gym_resources",
        config_paths=["resources_servers/sav_tracks/configs/sav_tracks.yaml"],
        base_url=engine[1],
        model_name="policy",
        run_dir=tmp_path / "gym",
    )
    with start_gym(settings) as servers:
        yield f"{servers.urls[AGENT]}/run"


def test_rollouts_through_gyms_servers_fit_the_engine_and_carry_its_rewards(
    agent_url, engine, tmp_path, ray_head, installed, nemo_rl_root, monkeypatch
):
    # 188 tokens each for the trainer alone, 141 each where 512 tokens of context are shared.
    config = engine_recipe(
        nemo_rl_root,
        tmp_path,
        engine[0],
        ([(97, 1500)] * 3, [(160, 320)]),
        agent_ref={"type": "responses_api_agents", "name": AGENT},
        verifier_metadata={
            "task": "box",
            "num_frames": 1,
            "objects": [{"id": "1", "boxes": [[0, 0, 500, 500]]}],
        },
    )
    sizes, found, total, metrics = play(config, monkeypatch, agent_url)
    assert found == 2 * 3 * 141 + 2 * 50
    assert sizes == sorted(2 * [[[96, 1504]] * 3] + 2 * [[[160, 320]]])
    assert total("media_repaired") == 6 and total("media_matched") == 2 and total("rows_masked") == 0
    # Fields that only the verifier writes.
    assert all(entry[f"{AGENT}/{name}/mean"] == 0 for entry in metrics for name in ("accuracy", "format"))
