# SPDX-License-Identifier: Apache-2.0
"""Gym's real servers against a fake engine, and how their start fails.

The slow part needs Gym's environment: `make gym`, in .venv-gym or where GYM_VENV says.
"""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_ext.grpo.collecting.gym import collect_rollouts, in_process_scorer
from nemo_rl_ext.grpo.collecting.gym_servers import GymConfig, GymError, start_gym

REPOSITORY = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("GYM_VENV") or REPOSITORY / ".venv-gym")
needs_gym = pytest.mark.skipif(
    not (VENV / "bin" / "gym").exists(), reason=f"no NeMo-Gym environment in {VENV} (make gym, GYM_VENV=dir)"
)


def config(tmp_path, **fields):
    defaults = {
        "venv": VENV,
        "root": REPOSITORY / "gym_resources",
        "config_paths": ["resources_servers/sav_tracks/configs/sav_tracks.yaml"],
        "base_url": "http://127.0.0.1:1/v1",
        "model_name": "fake",
        "run_dir": tmp_path / "gym",
    }
    return GymConfig(**{**defaults, **fields})


def fake_venv(tmp_path, script):
    """An environment whose `gym` is a shell script."""
    gym = tmp_path / "venv" / "bin" / "gym"
    gym.parent.mkdir(parents=True)
    gym.write_text(f"#!/bin/sh\n{script}\n")
    gym.chmod(0o755)
    return tmp_path / "venv"


def test_without_an_environment_the_error_says_how_to_build_it(tmp_path):
    with pytest.raises(GymError, match="make gym"), start_gym(config(tmp_path, venv=tmp_path / "none")):
        pytest.fail("started")


def test_a_gym_that_ends_is_started_again_and_then_its_log_is_shown(tmp_path):
    venv = fake_venv(tmp_path, f"echo started >> {tmp_path}/starts; echo no such config >&2; exit 3")
    with pytest.raises(GymError, match=r"(?s)ended with status 3 while starting.*no such config"):
        with start_gym(config(tmp_path, venv=venv)):
            pytest.fail("started")
    assert (tmp_path / "starts").read_text().count("started") == 3


def test_a_gym_that_never_answers_is_ended(tmp_path):
    venv = fake_venv(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 600")
    with pytest.raises(GymError, match="head server did not answer within 0.5 s"):
        with start_gym(config(tmp_path, venv=venv, start_timeout_s=0.5)):
            pytest.fail("started")
    assert ended(int((tmp_path / "pid").read_text()))


def test_gym_does_not_outlive_a_killed_run(tmp_path):
    venv = fake_venv(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 600")
    code = (
        "from pathlib import Path; from nemo_rl_ext.grpo.collecting.gym_servers import GymConfig, start_gym\n"
        f"with start_gym(GymConfig(venv=Path({str(venv)!r}), root=Path('.'), config_paths=[], base_url='', "
        f"model_name='', run_dir=Path({str(tmp_path)!r}))): pass"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.05)
    run.kill()
    run.wait()
    assert ended(int((tmp_path / "pid").read_text()))


def ended(pid):
    for _ in range(400):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


class FakeEngine:
    """An OpenAI-compatible endpoint for the policy and the judge; the prompt's text says what it answers."""

    def __init__(self):
        self.judge_is_down = False
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, text = engine.answer(json.dumps(request["messages"]))
                content = json.dumps(completion(request, text)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, prompt):
        if "is a caption that somebody wrote" in prompt:
            return (503, "") if "JUDGE OUTAGE" in prompt else (200, "Answer: A")
        if "SAY NOTHING" in prompt:
            return 200, ""
        if "JUDGE OUTAGE" in prompt:
            return 200, "A caption. JUDGE OUTAGE"
        return 200, '{"tracks": [{"id": "1", "frames": [{"frame": 0, "box": [0, 0, 500, 250]}]}]}'


def completion(request, text):
    assert request["return_token_ids"] is True and request["logprobs"] is True
    ids = list(text.encode())
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
        "logprobs": {
            "content": [{"token": f"token_id:{i}", "logprob": -0.5, "top_logprobs": []} for i in ids]
        },
        "token_ids": ids,
    }
    head = {"id": "c", "object": "chat.completion", "created": 0, "model": request["model"]}
    return {**head, "choices": [choice], "prompt_token_ids": [1, 5, 5, 2]}


def tracks_row(text, metadata=None):
    truth = {"task": "box", "num_frames": 1, "objects": [{"id": "1", "boxes": [[0, 0, 500, 500]]}]}
    return {
        "responses_create_params": {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
        },
        "verifier_metadata": truth if metadata is None else metadata,
        "agent_ref": {"type": "responses_api_agents", "name": "sav_tracks_simple_agent"},
    }


def caption_row(text):
    questions = [{"id": "q", "question": "?", "choices": ["red", "blue"], "answer": 0}]
    row = tracks_row(text, {"row_id": "r", "questions": questions})
    return {**row, "agent_ref": {"type": "responses_api_agents", "name": "caption_qa_simple_agent"}}


@needs_gym
@pytest.mark.gym
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_malformed_row_a_judge_outage_and_an_empty_answer_lose_no_other_row(tmp_path):
    engine = FakeEngine()
    server = "caption_qa.resources_servers.caption_qa"
    settings = config(
        tmp_path,
        base_url=engine.url,
        config_paths=[
            f"resources_servers/{name}/configs/{name}.yaml" for name in ("sav_tracks", "caption_qa")
        ],
        # Gym's model server repeats a 503 for ever by itself; the time limit is what ends it
        overrides=[f"++{server}.judge_attempts=2", f"++{server}.judge_timeout_s=10"],
        start_timeout_s=400.0,
    )
    malformed = tracks_row("x")
    malformed["responses_create_params"]["input"][0]["content"] = [{"type": "input_image", "image_url": 7}]
    rows = [
        tracks_row("track"),
        malformed,
        tracks_row("track", {"task": "box"}),
        caption_row("describe"),
        caption_row("describe JUDGE OUTAGE"),
        tracks_row("SAY NOTHING"),
        tracks_row("track"),
    ]
    with start_gym(settings) as servers:
        found = collect_rollouts(servers, rows, params={"max_output_tokens": 8})
    good, refused, no_truth, caption, outage, empty, last = found

    assert (refused.masked, outage.masked) == (True, True)
    assert "answered 422" in refused.error
    assert outage.result["error_class"] == "judge_unavailable"
    assert outage.result["_ng_failure_class"] == "judge_failed"
    assert not any(rollout.masked for rollout in (good, no_truth, caption, last))
    assert no_truth.reward == 0.0 and no_truth.result["error_class"] == "ground_truth"
    assert empty.masked and empty.error == "the answer has no tokens" and empty.reward == 0.0
    assert empty.result["error"] == "no_answer_text"
    # the judge always says A; whether that is right, wrong or "the caption does not say" is the seeded order's affair
    assert caption.reward == sum(caption.reward_components.values())
    assert (
        caption.reward_components["accuracy"] in (0.9, 0.0, 0.9 * -3)
        and caption.reward_components["format"] == 0.1
    )

    score = in_process_scorer("sav_tracks_simple_agent", REPOSITORY / "gym_resources")
    for rollout in (good, last):
        assert rollout.reward == 0.9 * 0.5 + 0.1
        assert rollout.reward == score(rollout.text, rows[0]["verifier_metadata"])["reward"]
        (turn,) = rollout.turns
        assert turn.prompt_token_ids.tolist() == [1, 5, 5, 2]
        assert turn.token_ids.tolist() == list(rollout.text.encode()) and np.all(turn.logprobs == -0.5)
