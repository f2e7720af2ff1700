# SPDX-License-Identifier: Apache-2.0
import json
from unittest.mock import MagicMock

import pytest

pytest.importorskip("nemo_gym", reason="needs the NeMo-Gym environment (make gym)")

from fastapi.testclient import TestClient
from nemo_gym.server_utils import ServerClient
from resources_servers.sav_tracks.app import SavTracksConfig, SavTracksResourcesServer

pytestmark = pytest.mark.gym

BOX = [100, 200, 300, 600]


@pytest.fixture(scope="module")
def client():
    config = SavTracksConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="sav_tracks")
    server = SavTracksResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    with TestClient(server.setup_webserver()) as client:
        yield client


def message(text):
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}


def body(metadata, *output):
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "track"}]},
        "response": {
            "id": "r", "object": "response", "created_at": 0, "model": "m", "output": list(output),
            "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
        },
        "verifier_metadata": metadata,
    }  # fmt: skip


def test_a_good_answer_is_rewarded(client, make_row, make_answer):
    answered = client.post(
        "/verify", json=body(make_row("box", {"1": [BOX]}), message(make_answer({"1": [BOX]})))
    )
    assert answered.status_code == 200
    found = answered.json()
    assert found["reward"] == sum(found["reward_components"].values()) == 1.0
    assert found["box/mean_iou"] == 1.0 and found["task"] == "box" and found["error"] is None
    assert found["response"]["output"][0]["content"][0]["text"]


def test_the_last_message_is_the_answer(client, make_row, make_answer):
    reasoning = {"id": "x", "type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    output = [message("draft"), reasoning, message(make_answer({"1": [BOX]})), reasoning]
    assert client.post("/verify", json=body(make_row("box", {"1": [BOX]}), *output)).json()["reward"] == 1.0
    plain = {"type": "message", "role": "assistant", "content": make_answer({"1": [BOX]})}
    assert client.post("/verify", json=body(make_row("box", {"1": [BOX]}), plain)).json()["reward"] == 1.0


@pytest.mark.parametrize("output", [[], [message("")]])
def test_an_empty_answer_is_reward_zero_and_not_an_error_status(client, make_row, output):
    answered = client.post("/verify", json=body(make_row("box", {"1": [BOX]}), *output))
    assert (answered.status_code, answered.json()["reward"]) == (200, 0.0)
    assert answered.json()["error"] == "no_answer_text"


@pytest.mark.parametrize("metadata", [None, [], "x", {"task": "box"}])
def test_malformed_ground_truth_is_reward_zero_and_not_an_error_status(client, metadata, make_answer):
    answered = client.post("/verify", json=body(metadata, message(make_answer({"1": [BOX]}))))
    assert (answered.status_code, answered.json()["reward"]) == (200, 0.0)
    assert answered.json()["error_class"] == "ground_truth"


def test_a_row_without_metadata_is_reward_zero(client):
    row = body(None, message("x"))
    del row["verifier_metadata"]
    assert client.post("/verify", json=row).json()["error_class"] == "ground_truth"


def test_metrics_are_aggregated_per_task(client, make_row, make_answer):
    responses = []
    for index, (task, key, place) in enumerate([("box", "box", BOX), ("pt", "point", [200, 400])]):
        text = make_answer({"1": [place]}, key=key)
        found = client.post("/verify", json=body(make_row(task, {"1": [BOX]}), message(text))).json()
        responses.append({**found, "_ng_task_index": index, "_ng_rollout_index": 0})
    metrics = client.post("/aggregate_metrics", json={"verify_responses": responses}).json()["agent_metrics"]
    assert metrics["mean/reward"] == 1.0
    assert metrics["mean/box/mean_iou"] == 1.0 and metrics["mean/pt/point_accuracy"] == 1.0


def test_responses_are_valid_json_numbers(client, make_row):
    answered = client.post(
        "/verify", json=body(make_row("box", {"1": [BOX]}), message('{"tracks": [NaN, Infinity]}'))
    )
    json.loads(answered.text, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize("note", ["\ud83d", "\udc00x", "\ud800\ud800"])
def test_a_lone_surrogate_is_scored_and_not_an_error_status(client, make_row, make_answer, note):
    text = make_answer({"1": [BOX]}, names={"1": note})
    thinking = {"id": "x", "type": "reasoning", "summary": [{"type": "summary_text", "text": note}]}
    row = make_row("box", {"1": [BOX]}, note=note)
    for said in (text, f"{note}{text}{note}", text.encode("ascii").decode("unicode_escape")):
        sent = json.dumps(body(row, thinking, message(said)))
        answered = client.post("/verify", content=sent, headers={"content-type": "application/json"})
        assert (answered.status_code, answered.json()["reward"]) == (200, 1.0)


def test_a_newer_gym_may_verify_stored_rollouts_again(client):
    from nemo_gym import base_resources_server

    if not hasattr(base_resources_server, "ReverifyMode"):
        assert SavTracksConfig.REVERIFY_MODE is None
    else:
        assert client.get("/reverify_mode").json() == "stateless"
