# SPDX-License-Identifier: Apache-2.0
"""Rollouts from Gym's agents. The agents are faked at the HTTP edge; test_gym_servers.py has the real ones."""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_ext.grpo.collecting.gym import collect_rollouts, in_process_scorer, inline_images
from nemo_rl_ext.grpo.collecting.gym_servers import GymError

REPOSITORY = Path(__file__).resolve().parents[2]


def message(text="ab", prompt=(1, 5, 5, 2), generated=(7, 8), log_probs=(-0.5, -0.25)):
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "role": "assistant", "content": content}
    if prompt is not None:
        item |= {
            "prompt_token_ids": list(prompt),
            "generation_token_ids": list(generated),
            "generation_log_probs": list(log_probs),
        }
    return item


def result(*output, **fields):
    return {
        "response": {"output": list(output)},
        "reward": 0.5,
        "reward_components": {"accuracy": 0.5},
        **fields,
    }


class FakeAgent:
    """An HTTP server that answers /run with what `reply(row)` returns: (status, body)."""

    def __init__(self):
        self.reply = lambda row: (200, result(message()))
        self.rows = []
        agent = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                agent.rows.append(row)
                status, body = agent.reply(row)
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class FakeServers:
    """Stands in for running Gym servers whose only agent is `agent`."""

    def __init__(self, agent):
        self.urls = {"agent": f"http://127.0.0.1:{agent.server.server_port}"}
        self.dead = False

    def check(self):
        if self.dead:
            raise GymError("Gym ended")


@pytest.fixture
def agent():
    fake = FakeAgent()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def row(**fields):
    return {"responses_create_params": {"input": "hello"}, "agent_ref": {"name": "agent"}, **fields}


def test_a_rollout_carries_ids_log_probs_and_reward(agent):
    (rollout,) = collect_rollouts(FakeServers(agent), [row()])
    (turn,) = rollout.turns
    assert turn.prompt_token_ids.tolist() == [1, 5, 5, 2] and turn.token_ids.tolist() == [7, 8]
    assert turn.token_ids.dtype == np.int32 and turn.logprobs.dtype == np.float32
    assert (rollout.text, rollout.reward, rollout.masked, rollout.error) == ("ab", 0.5, False, None)
    assert rollout.reward_components == {"accuracy": 0.5}


def test_results_keep_the_order_of_the_rows(agent):
    agent.reply = lambda row: (200, result(message(text=row["responses_create_params"]["input"])))
    rows = [row(responses_create_params={"input": str(i)}) for i in range(40)]
    assert [r.text for r in collect_rollouts(FakeServers(agent), rows, num_in_flight=8)] == [
        str(i) for i in range(40)
    ]
    assert collect_rollouts(FakeServers(agent), []) == []


def test_parameters_and_extra_body_reach_the_engine_and_the_row_stays_as_it_was(agent):
    given = row(responses_create_params={"input": "x", "metadata": {"extra_body": '{"seed": 3}'}})
    before = json.dumps(given)
    collect_rollouts(
        FakeServers(agent), [given], params={"temperature": 0.5}, extra_body={"logit_bias": {"5": -100}}
    )
    sent = agent.rows[0]["responses_create_params"]
    assert sent["temperature"] == 0.5
    assert json.loads(sent["metadata"]["extra_body"]) == {"seed": 3, "logit_bias": {"5": -100}}
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((422, {"detail": "input_image needs detail"}), "agent answered 422: .*needs detail"),
        ((500, b"Internal Server Error"), "agent answered 500"),
        ((200, b"not json"), "JSONDecodeError"),
        ((200, {"reward": 1.0}), "KeyError: 'response'"),
        ((200, result(message(), reward=float("nan"))), "reward is nan"),
        ((200, result(message(log_probs=(-0.5,)))), "2 token ids and 1 log-probs"),
        ((200, result(message(prompt=None))), "carries no token ids"),
        ((200, result(message(), error="judge down", error_class="judge_unavailable")), "judge down"),
        ((200, result(message(), error="boom", error_class="internal")), "boom"),
        ((200, result(message(), error_class="internal")), "internal"),
        # what Gym's own judge_failsafe answers, of 0.5 and of 0.7
        (
            (200, result(message(), _ng_failure_class="judge_failed", _ng_failure_judge_error="503")),
            "judge_failed: 503",
        ),
        (
            (
                200,
                result(message(), _ng_failure_class="judge_failed", failure_reason="cut", mask_sample=True),
            ),
            "judge_failed: cut",
        ),
        ((200, result(message(), _ng_failure_class="timeout")), "timeout"),
    ],
)
def test_one_bad_row_is_masked_with_its_reason_and_costs_no_other(agent, reply, error):
    agent.reply = lambda row: (
        reply if row["responses_create_params"]["input"] == "bad" else (200, result(message()))
    )
    rows = [row(), row(responses_create_params={"input": "bad"}), row()]
    first, bad, last = collect_rollouts(FakeServers(agent), rows)
    assert not first.masked and not last.masked and bad.masked
    assert re.search(error, bad.error)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"agent_ref": {"name": "other"}}, r"expected the name of a running agent \(agent\), got 'other'"),
        ({"agent_ref": None}, "got None"),
        ({"responses_create_params": "x"}, "responses_create_params: expected an object, got str"),
    ],
)
def test_a_row_that_cannot_be_sent_is_masked(agent, fields, error):
    bad, good = collect_rollouts(FakeServers(agent), [row(**fields), row()])
    assert bad.masked and re.search(error, bad.error) and not good.masked


def test_an_answer_of_no_tokens_is_no_turn(agent):
    """Nothing was sampled in it, and NeMo-RL counts none either; a row of nothing else is masked and says so."""
    empty = message(text="", generated=(), log_probs=())
    agent.reply = lambda row: (200, result(message(), empty, reward=0.0))
    (rollout,) = collect_rollouts(FakeServers(agent), [row()])
    assert len(rollout.turns) == 1 and len(rollout.turns[0].token_ids) and not rollout.masked
    agent.reply = lambda row: (200, result(empty, reward=0.0))
    (rollout,) = collect_rollouts(FakeServers(agent), [row()])
    assert rollout.turns == () and rollout.masked and rollout.error == "the answer has no tokens"


@pytest.mark.parametrize("mark", [{"instance_config": {"mask_sample": True}}, {"mask_sample": True}])
def test_a_flagged_sample_is_masked(agent, mark):
    agent.reply = lambda row: (200, result(message(), **mark))
    assert collect_rollouts(FakeServers(agent), [row()])[0].masked


def test_an_unanswered_row_after_gym_s_death_is_an_infrastructure_error(agent):
    servers = FakeServers(agent)
    servers.dead = True
    assert len(collect_rollouts(servers, [row()])) == 1
    agent.reply = lambda row: (500, b"")
    with pytest.raises(GymError, match="Gym ended"):
        collect_rollouts(servers, [row()])


def test_images_are_inlined_with_their_bytes_unchanged():
    png, jpeg = b"\x89PNG and more", b"\xff\xd8 and more"
    parts = [
        {"type": "input_image", "image_url": "a.png", "detail": "high"},
        {"type": "input_image", "image_url": "b.jpg"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"},
        {"type": "input_text", "text": "x"},
    ]
    given = {
        "responses_create_params": {
            "input": [{"role": "user", "content": parts}, {"role": "user", "content": "x"}]
        }
    }
    found = inline_images(given, {"a.png": png, "b.jpg": jpeg}.__getitem__)
    first, second, third, fourth = found["responses_create_params"]["input"][0]["content"]
    assert first == {
        "type": "input_image",
        "image_url": "data:image/png;base64," + base64.b64encode(png).decode(),
        "detail": "high",
    }
    assert second["image_url"].startswith("data:image/jpeg;base64,") and second["detail"] == "auto"
    assert third == parts[2] and fourth == parts[3]
    assert parts[0]["image_url"] == "a.png"
    assert inline_images({"responses_create_params": {"input": "text"}}, {}.__getitem__)


def test_the_in_process_scorer_gives_the_verifier_s_fields():
    score = in_process_scorer("sav_tracks_simple_agent", REPOSITORY / "gym_resources")
    metadata = {"task": "box", "num_frames": 1, "objects": [{"id": "1", "boxes": [[0, 0, 500, 500]]}]}
    text = '{"tracks": [{"id": "1", "frames": [{"frame": 0, "box": [0, 0, 500, 500]}]}]}'
    found = score(text, metadata)
    assert found["reward"] == 1.0 and found["reward_components"] == {"accuracy": 0.9, "format": 0.1}
    with pytest.raises(ValueError, match="caption_qa_simple_agent.*should_use_nemo_gym: true"):
        in_process_scorer("caption_qa_simple_agent", REPOSITORY / "gym_resources")
