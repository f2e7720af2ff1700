# SPDX-License-Identifier: Apache-2.0
"""Agents that add, replace, drop and reorder media between two requests, through the endpoint and the Gym player.

The engine, its endpoint, the aligner and the policy are real; `AgentEdge` stands for NeMo-Gym's agent at the network's
edge: it keeps token ids and log-probs, as Gym does, and drops everything else that the engine said.
"""

import base64
import dataclasses
import io
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.policy import MediaPolicy

pytestmark = pytest.mark.engine


def url(height, width, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


A, B, C = url(488, 487, 1), url(96, 128, 2), url(500, 500, 3)


def message(*urls):
    return {"role": "user", "content": [{"type": "input_image", "image_url": u} for u in urls]}


class AgentEdge:
    """A Gym agent: `script` says, from the row's messages, what each request holds and what is recorded before it."""

    def __init__(self, base_url):
        self.base_url, self.script = base_url, None
        edge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = json.dumps(edge.run(row)).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.urls = {"agent": f"http://127.0.0.1:{self.server.server_port}"}

    def check(self):
        pass

    def run(self, row):
        output, initial = [], row["responses_create_params"]["input"]
        for recorded, messages in self.script(initial):
            output += recorded
            output.append(self.ask(messages))
        return {
            "response": {"output": output, "agent_input": initial},
            "responses_create_params": {"input": initial},
            "reward": 1.0,
        }

    def ask(self, messages):
        request = {"model": "m", "messages": messages, "max_tokens": 3, "seed": 5}
        data = json.dumps(request).encode()
        post = urllib.request.Request(
            f"{self.base_url}/chat/completions", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(post, timeout=120) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            # What NeMo-Gym's vllm_model makes of a prompt beyond the context: an empty answer without ids.
            assert error.code == 400 and "context length" in error.read().decode()
            return {"type": "message", "role": "assistant", "content": []}
        (choice,) = answer["choices"]
        return {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": choice["message"]["content"]}],
            "prompt_token_ids": answer["prompt_token_ids"],
            "generation_token_ids": choice["token_ids"],
            "generation_log_probs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
        }


@pytest.fixture(scope="module")
def run(in_process) -> Iterator[SimpleNamespace]:
    """A collector whose rollouts come from the agent, on the engine's endpoint."""
    from nemo_rl_ext.grpo.collecting.assembly import AlignmentOptions
    from nemo_rl_ext.grpo.collecting.collector import Collector
    from nemo_rl_ext.grpo.collecting.endpoint import Completions, serve
    from nemo_rl_ext.grpo.collecting.gym_player import GymPlayer
    from nemo_rl_ext.receipts.store import ReceiptStore

    store = ReceiptStore()
    completions = Completions(
        engine=in_process.client,
        renderer=in_process.renderer,
        sampling=in_process.sampling,
        media_policy=MediaPolicy(),
        model_name="m",
        receipts=store,
    )
    with serve(completions) as base_url:
        agent = AgentEdge(base_url)
        player = GymPlayer(
            servers=agent,
            engine=in_process.client,
            pool=in_process.pool,
            renderer=in_process.renderer,
            media_policy=MediaPolicy(),
            base_dir=None,
            max_turns=4,
            samples=completions.samples,
            receipts=store,
        )
        collector = Collector(
            player=player,
            pool=in_process.pool,
            reward=lambda row, text: 1.0,
            sampling=in_process.sampling,
            options=AlignmentOptions(enabled=True, share_static=True, max_model_len=None, ordered=False),
            num_generations=2,
        )
        yield SimpleNamespace(agent=agent, collector=collector, gap=in_process.gap)
        agent.server.shutdown()


def collect(run, script, *images):
    """The rollouts of one row whose agent follows `script`, and the largest log-prob gap of those not masked."""
    row = ManifestRow.from_json(
        {"responses_create_params": {"input": [message(*images)]}, "agent_ref": {"name": "agent"}}
    )
    run.agent.script = script
    (group,) = run.collector.collect([row], step=0)
    return group.rollouts, run.gap(group)


def reasons(rollouts):
    return {reason for rollout in rollouts for reason in rollout.reasons if rollout.masked}


def test_a_tool_s_screenshot_is_trained_on_with_the_engine_s_pixels(run):
    def script(initial):
        first = list(initial)
        yield [], first
        yield [message(B)], [*first, {"role": "assistant", "content": "x"}, message(B)]

    rollouts, gap = collect(run, script, A)
    assert not any(rollout.masked for rollout in rollouts)
    assert gap < 5e-5
    proven = [
        item.content_proven for rollout in rollouts for turn in rollout.aligned for item in turn.report.media
    ]
    assert proven and all(proven)


def test_a_tool_result_that_is_a_list_of_parts_is_an_image_too(run):
    parts = message(B)["content"]

    def script(initial):
        yield [], list(initial)
        tool = {"type": "function_call_output", "call_id": "1", "output": parts}
        yield [tool], [*initial, {"role": "tool", "content": parts}]

    rollouts, gap = collect(run, script, A)
    assert not any(rollout.masked for rollout in rollouts) and gap < 5e-5


def test_a_bare_url_that_the_engine_read_as_text_is_no_image(run):
    def script(initial):
        yield [], list(initial)
        tool = {"type": "function_call_output", "call_id": "1", "output": "data:image/png;base64,AA"}
        yield [tool], [*initial, {"role": "tool", "content": "data:image/png;base64,AA"}]

    rollouts, gap = collect(run, script, A)
    assert not any(rollout.masked for rollout in rollouts) and gap < 5e-5


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ((C,), Reason.CONTENT_CHANGED),
        ((), Reason.MEDIA_GONE),
        ((A, B), Reason.MEDIA_ADDED),
    ],
    ids=["replaced", "dropped", "added"],
)
def test_a_prompt_that_the_agent_changed_in_secret_is_masked_by_name(run, shown, expected):
    """The agent reports the row's own messages and sends others."""

    def script(initial):
        yield [], [message(*shown) if shown else {"role": "user", "content": "what?"}]

    rollouts, _ = collect(run, script, A)
    assert all(rollout.masked for rollout in rollouts)
    assert expected in reasons(rollouts)


def test_media_in_another_order_than_reported_are_masked(run):
    def script(initial):
        yield [], [message(B, A)]

    rollouts, _ = collect(run, script, A, B)
    assert all(rollout.masked for rollout in rollouts)
    assert Reason.ORDER_SUSPECT in reasons(rollouts)


def test_an_agent_that_replaces_its_screenshot_does_not_train_on_the_old_one(run):
    def script(initial):
        yield [], list(initial)
        yield [message(C)], [message(C)]

    rollouts, gap = collect(run, script, A)
    assert all(rollout.masked for rollout in rollouts) or gap < 5e-5


@pytest.mark.parametrize("filtering", [False, True], ids=["trained", "filtered"])
def test_a_conversation_that_outgrows_the_context_ends_there_and_is_named(run, filtering):
    def script(initial):
        yield [], list(initial)
        told = {"role": "user", "content": "x " * 600}
        yield [told], [*initial, {"role": "assistant", "content": "x"}, told]

    options = run.collector.options
    run.collector.options = dataclasses.replace(options, overlong_filtering=filtering)
    try:
        rollouts, gap = collect(run, script, B)
    finally:
        run.collector.options = options
    assert all(Reason.CONTEXT_OUTGROWN in rollout.extra_reasons for rollout in rollouts)
    assert not any(Reason.GENERATION_FAILED in rollout.extra_reasons for rollout in rollouts)
    assert [rollout.masked for rollout in rollouts] == [filtering] * 2
    assert all((Reason.OVERLONG_FILTERED in rollout.extra_reasons) == filtering for rollout in rollouts)
    assert all(rollout.truncated and rollout.reward == 1.0 and rollout.num_sampled for rollout in rollouts)
    assert gap < 5e-5


def test_the_engine_s_word_on_each_sample_reaches_a_rollout_of_an_agent(run):
    def script(initial):
        yield [], list(initial)

    rollouts, _ = collect(run, script, B)
    for rollout in rollouts:
        (answer,) = (m for m in rollout.segments[0].message_log if m["role"] == "assistant")
        assert answer["weight_versions"] == ((0, 0, len(answer["token_ids"])),)
