# SPDX-License-Identifier: Apache-2.0
"""Requests to Gym's servers over a real socket; the far end is a stand-in that answers as agents do, or fails to."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("httpx")

from nemo_rl_ext.grpo.collecting.gym import collect_rollouts
from nemo_rl_ext.grpo.collecting.gym_servers import GymServers

GENERATED = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "yes"}],
    "prompt_token_ids": [1, 2],
    "generation_token_ids": [3],
    "generation_log_probs": [-0.5],
}


class StandInAgents(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/global_config_dict_yaml":
            self.send_error(404)
            return
        host, port = self.server.server_address
        here = {"host": host, "port": port}
        agents = {"agent": {"responses_api_agents": {"simple": here}}}
        self._answer(200, json.dumps(json.dumps(agents)))

    def do_POST(self):
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = row["kind"]
        if kind == "good":
            self._answer(200, json.dumps({"reward": 1.0, "response": {"output": [GENERATED]}}))
        elif kind == "error":
            self._answer(500, "the judge is away")
        elif kind == "text":
            self._answer(200, "<html>")
        elif kind == "slow":
            self.server.released.wait(60)
        self.close_connection = True

    def _answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


class StandInServer(ThreadingHTTPServer):
    # As many as are in flight; the default of five loses connections.
    request_queue_size = 128


@pytest.fixture
def edge():
    server = StandInServer(("127.0.0.1", 0), StandInAgents)
    server.released = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def servers(edge, tmp_path):
    gym = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (tmp_path / "gym.log").write_text("")
    running = GymServers(gym, f"http://127.0.0.1:{edge.server_port}", tmp_path / "gym.log")
    yield running
    gym.kill()
    running.close()


def row(kind):
    return {"kind": kind, "agent_ref": {"name": "agent"}, "responses_create_params": {"input": []}}


def test_every_row_keeps_its_place_whatever_its_server_does(servers, monkeypatch):
    # A proxy of the environment must not see requests to this machine.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    servers.wait_until_ready(20)
    kinds = ["good", "error", "text", "closed", "slow", "good"] + ["good"] * 40
    found = collect_rollouts(servers, [row(kind) for kind in kinds], timeout_s=5)
    assert [rollout.masked for rollout in found] == [kind != "good" for kind in kinds], found
    assert found[0].turns[0].token_ids.tolist() == [3] and found[0].reward == 1.0
    assert found[1].error == "agent answered 500: the judge is away"
    for rollout, reason in zip(
        found[2:5], ("JSONDecodeError", "RemoteProtocolError", "ReadTimeout"), strict=True
    ):
        assert rollout.error.startswith(f"agent: {reason}")


def test_a_server_that_is_gone_masks_the_row(servers, edge):
    servers.wait_until_ready(20)
    edge.shutdown()
    edge.server_close()
    (rollout,) = collect_rollouts(servers, [row("good")], timeout_s=3)
    assert rollout.masked and rollout.error.startswith("agent: ConnectError")
