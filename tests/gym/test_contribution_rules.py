# SPDX-License-Identifier: Apache-2.0
"""What Gym asks of a contributed resources server."""

import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2] / "gym_resources"
SERVERS = sorted(path for path in (ROOT / "resources_servers").iterdir() if (path / "app.py").exists())


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("server", SERVERS, ids=lambda path: path.name)
def test_the_files_that_gym_asks_for_are_there(server):
    for name in (
        "app.py",
        "README.md",
        "requirements.txt",
        "tests/test_app.py",
        f"configs/{server.name}.yaml",
    ):
        assert (server / name).is_file(), name
    data = server / "data"
    assert len(rows(data / "example.jsonl")) == len(rows(data / "example_rollouts.jsonl")) == 5
    assert json.loads((data / "example_metrics.json").read_text())["Number of examples"] == 5
    assert not list(data.glob("*conflict*"))
    for path in server.rglob("*.py"):
        assert path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n"), path


@pytest.mark.parametrize("server", SERVERS, ids=lambda path: path.name)
def test_the_configuration_says_what_gym_asks_for(server):
    config = yaml.safe_load((server / "configs" / f"{server.name}.yaml").read_text())
    settings = config[server.name]["resources_servers"][server.name]
    assert (
        settings["domain"] and settings["description"] and settings["value"] and settings["verified"] is False
    )
    (agent,) = (value["responses_api_agents"] for value in config.values() if "responses_api_agents" in value)
    (settings,) = agent.values()
    assert all(dataset["license"] for dataset in settings["datasets"])
