# SPDX-License-Identifier: Apache-2.0
"""What Gym asks of a contributed resources server, and that the example files are of today's scoring."""

import json
from pathlib import Path

import pytest
import yaml

from nemo_rl_ext.grpo.collecting.gym import in_process_scorer

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
    examples = rows(data / "example.jsonl")
    assert len(examples) == 5
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


@pytest.mark.parametrize("server", SERVERS, ids=lambda path: path.name)
def test_the_example_rollouts_are_of_the_example_rows(server):
    examples = rows(server / "data" / "example.jsonl")
    rollouts = rows(server / "data" / "example_rollouts.jsonl")
    asked = sorted(json.dumps(row["verifier_metadata"], sort_keys=True) for row in examples)
    assert sorted(json.dumps(row["verifier_metadata"], sort_keys=True) for row in rollouts) == asked
    for row in rollouts:
        assert row["reward"] == sum(row["reward_components"].values())


def text_of(rollout):
    (message,) = (item for item in rollout["response"]["output"] if item["type"] == "message")
    return "".join(part["text"] for part in message["content"])


def test_the_track_rollouts_score_today_as_they_did_then():
    score = in_process_scorer("sav_tracks_simple_agent", ROOT)
    for rollout in rows(ROOT / "resources_servers" / "sav_tracks" / "data" / "example_rollouts.jsonl"):
        today = score(text_of(rollout), rollout["verifier_metadata"])
        assert {key: rollout[key] for key in today} == today


def test_the_caption_rollouts_are_worth_today_what_they_were_then():
    from resources_servers.caption_qa.questions import read_questions

    for rollout in rows(ROOT / "resources_servers" / "caption_qa" / "data" / "example_rollouts.jsonl"):
        questions = {
            question.id: question for question in read_questions(rollout["verifier_metadata"]).questions
        }
        assert {judged["id"] for judged in rollout["judgements"]} == set(questions)
        for judged in rollout["judgements"]:
            choices = questions[judged["id"]].choices
            chosen = choices.index(judged["chosen"]) if judged["chosen"] in choices else None
            assert judged["worth"] == questions[judged["id"]].worth(chosen)
        assert rollout["net"] == sum(judged["worth"] for judged in rollout["judgements"]) / len(questions)
