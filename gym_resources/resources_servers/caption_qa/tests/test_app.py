# SPDX-License-Identifier: Apache-2.0
import json
from unittest.mock import MagicMock

import pytest

pytest.importorskip("nemo_gym", reason="needs the NeMo-Gym environment (make gym)")

from fastapi.testclient import TestClient
from nemo_gym.config_types import ModelServerRef
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import ServerClient
from resources_servers.caption_qa.app import CaptionQaConfig, CaptionQaResourcesServer

pytestmark = pytest.mark.gym


def response(*output):
    return {
        "id": "r", "object": "response", "created_at": 0, "model": "m", "output": list(output),
        "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def message(text):
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}


class FakeHttpReply:
    """The HTTP reply of the judge's model server."""

    def __init__(self, content, *, ok=True):
        self.ok = ok
        self._content = content
        self.content = self

    async def read(self):
        return json.dumps(self._content).encode()

    def raise_for_status(self):
        assert not self.ok
        raise RuntimeError("503 Service Unavailable")


@pytest.fixture
def judge():
    """What the judge's model server does; tests replace `reply`."""

    class FakeJudgeEndpoint:
        sent = []

        async def post(self, server_name, url_path, json):
            self.sent.append((server_name, url_path, json))
            return self.reply(json.input[0].content)

        def reply(self, prompt):
            letter = next(line[0] for line in prompt.splitlines() if line[1:] == ". blue")
            return FakeHttpReply(response(message(f"Answer: {letter}")))

    endpoint = FakeJudgeEndpoint()
    endpoint.sent = []
    return endpoint


@pytest.fixture
def client(judge):
    config = CaptionQaConfig(
        host="127.0.0.1",
        port=1,
        entrypoint="app.py",
        name="caption_qa",
        judge_model_server=ModelServerRef(type="responses_api_models", name="judge"),
        judge_responses_create_params=NeMoGymResponseCreateParamsNonStreaming(input=[], temperature=0.0),
        judge_backoff_s=0.0,
        judge_timeout_s=5.0,
        max_caption_chars=200,
    )
    network = MagicMock(spec=ServerClient)
    network.post = judge.post
    server = CaptionQaResourcesServer(config=config, server_client=network)
    with TestClient(server.setup_webserver()) as client:
        yield client


def body(metadata, *output, **fields):
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    content = [picture, {"type": "input_text", "text": "Describe."}]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        "response": response(*output),
        "verifier_metadata": metadata,
        **fields,
    }


def test_a_good_caption_is_rewarded_and_the_judge_sees_text_only(client, judge, make_row):
    answered = client.post("/verify", json=body(make_row(3), message("A blue disc.")))
    assert answered.status_code == 200
    found = answered.json()
    assert found["reward"] == sum(found["reward_components"].values()) == 1.0
    assert (found["num_questions"], found["num_right"], found["error"]) == (3, 3, None)
    assert "_ng_failure_class" not in found and "instance_config" not in found
    assert len(judge.sent) == 3
    for server, path, params in judge.sent:
        assert (server, path, params.temperature) == ("judge", "/v1/responses", 0.0)
        assert isinstance(params.input[0].content, str) and "A blue disc." in params.input[0].content
        assert "base64" not in params.model_dump_json()


def test_an_outage_is_no_wrong_answer_and_no_error_status(client, judge, make_row):
    judge.reply = lambda prompt: FakeHttpReply({}, ok=False)
    answered = client.post(
        "/verify", json=body(make_row(2), message("A blue disc."), instance_config={"k": 1})
    )
    assert answered.status_code == 200
    found = answered.json()
    assert found["error_class"] == "judge_unavailable"
    assert (
        found["_ng_failure_class"] == found["failure_kind"] == "judge_failed" and found["mask_sample"] is True
    )
    assert found["_ng_failure_judge_error"] == found["failure_reason"] == found["error"]
    assert found["instance_config"] == {"k": 1, "mask_sample": True}
    assert "503 Service Unavailable" in found["error"]
    assert len(judge.sent) == 6


def test_a_reply_that_is_no_response_is_an_outage(client, judge, make_row):
    judge.reply = lambda prompt: FakeHttpReply({"error": "x"})
    assert (
        client.post("/verify", json=body(make_row(1), message("x"))).json()["error_class"]
        == "judge_unavailable"
    )


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (response(), "the reply is empty"),
        (response(message("")), "the reply is empty"),
        (response(message("<think>It says")), "ends inside its reasoning"),
        (
            response(message("Answer: A")) | {"incomplete_details": {"reason": "max_output_tokens"}},
            "raise judge_resp",
        ),
    ],
)
def test_a_judge_that_says_nothing_or_is_cut_has_failed(client, judge, make_row, reply, words):
    judge.reply = lambda prompt: FakeHttpReply(reply)
    found = client.post("/verify", json=body(make_row(1), message("x"))).json()
    assert found["error_class"] == "judge_unavailable" and words in found["error"]
    assert len(judge.sent) == 3


def test_a_judge_s_plain_text_is_read(client, judge, make_row):
    plain = {"type": "message", "role": "assistant", "content": "Answer: Z"}
    judge.reply = lambda prompt: FakeHttpReply(response(plain))
    found = client.post("/verify", json=body(make_row(1), message("x"))).json()
    assert (found["net"], found["num_unusable_replies"], found["error"]) == (0.0, 1, None)


@pytest.mark.parametrize("text", ["A blue disc \ud83d.", "\udc00", "<think>\ud800</think>A blue disc."])
def test_a_lone_surrogate_is_scored_and_not_an_error_status(client, judge, make_row, text):
    sent = json.dumps(
        body({**make_row(1), "note": "\ud800"}, message(text), more={"\udfff": ["\ud800", 1.5, None]})
    )
    answered = client.post("/verify", content=sent, headers={"content-type": "application/json"})
    assert answered.status_code == 200
    found = answered.json()
    assert (found["accuracy"], found["error"]) == (1.0, None)
    assert found["more"] == {"?": ["?", 1.5, None]}
    assert all(params.model_dump_json().encode() for _, _, params in judge.sent)


@pytest.mark.parametrize("output", [[], [message("")]])
def test_an_empty_answer_is_reward_zero_and_not_an_error_status(client, judge, make_row, output):
    answered = client.post("/verify", json=body(make_row(), *output))
    assert (answered.status_code, answered.json()["reward"], answered.json()["error"]) == (
        200,
        0.0,
        "no_caption",
    )
    assert judge.sent == []


@pytest.mark.parametrize("metadata", [None, [], {"row_id": "x"}])
def test_malformed_ground_truth_is_reward_zero_and_not_an_error_status(client, metadata):
    answered = client.post("/verify", json=body(metadata, message("x")))
    assert (answered.status_code, answered.json()["reward"]) == (200, 0.0)
    assert answered.json()["error_class"] == "ground_truth"


def test_rows_that_were_not_judged_stay_out_of_the_averages(client, judge, make_row):
    good = client.post("/verify", json=body(make_row(1), message("A blue disc."))).json()
    judge.reply = lambda prompt: FakeHttpReply({}, ok=False)
    lost = client.post("/verify", json=body(make_row(1), message("A blue disc."))).json()
    rows = [{**row, "_ng_task_index": i, "_ng_rollout_index": 0} for i, row in enumerate((good, lost))]
    metrics = client.post("/aggregate_metrics", json={"verify_responses": rows}).json()["agent_metrics"]
    assert metrics["mean/reward"] == 1.0 and metrics["num_judge_unavailable"] == 1
    assert metrics["mean/net"] == 1.0
    none = client.post("/aggregate_metrics", json={"verify_responses": rows[1:]}).json()["agent_metrics"]
    assert none == {"num_judge_unavailable": 1}


def test_a_newer_gym_may_verify_stored_rollouts_again(client):
    from nemo_gym import base_resources_server

    if not hasattr(base_resources_server, "ReverifyMode"):
        assert CaptionQaConfig.REVERIFY_MODE is None
    else:
        assert client.get("/reverify_mode").json() == "stateless"
