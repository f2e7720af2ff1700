# SPDX-License-Identifier: Apache-2.0
"""Where NeMo-Gym's servers would answer: rows say which placeholder runs the engine writes, results follow.

Importable by Ray workers. Everything but the edges is NeMo-RL's own.
"""

import asyncio
import copy
import json
import sys

import nemo_rl.environments.nemo_gym as nemo_gym
import numpy as np
import ray
from PIL import Image

from nemo_rl_ext.receipts.receipt import read_receipt
from nemo_rl_ext.receipts.store import actor_handle, rollout_key

START, CONTEXT, END = 3, 5, 4


def picture(height, width, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompt_ids(runs):
    ids = [6]
    for run in runs:
        ids += [START, *[CONTEXT] * run, END]
    return [*ids, 9, 10]


def image_row(urls, runs, **extra):
    """A row whose rollout number k gets the runs `runs[k % len(runs)]`."""
    content = [{"type": "input_text", "text": "look"}]
    content += [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    return {
        "agent_ref": {"name": "agent"},
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        "edge_runs": runs,
        **extra,
    }


def gym_result(row, runs, *, tool=None, sampled=(11, 12)):
    """A rollout result; `tool=(url, runs)` adds a turn whose prompt brings one more image.

    A row's `edge_prompts` are whole prompts, one per rollout, instead of runs.
    """
    prompts = row.get("edge_prompts")
    prompt = list(prompts[row["_rowidx"] % len(prompts)]) if prompts else prompt_ids(runs)
    sampled = list(sampled)
    logprobs = [-0.1] * len(sampled)
    output = [{"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": logprobs}]
    if tool is not None:
        url, tool_runs = tool
        output.append({"role": "user", "content": [{"type": "input_image", "image_url": url}]})
        longer = [*prompt, *sampled, *prompt_ids(tool_runs)]
        output.append(
            {"prompt_token_ids": longer, "generation_token_ids": [13], "generation_log_probs": [-0.3]}
        )
    messages = copy.deepcopy(row["responses_create_params"]["input"])
    return {
        "response": {
            "agent_input": copy.deepcopy(messages),
            "seed_obs": copy.deepcopy(messages),
            "output": output,
        },
        "responses_create_params": {"input": messages},
        "reward": float(row.get("_rowidx", 0) % 2),
    }


class FakeGymEdge:
    """Stands where NeMo-Gym's rollout helper would call servers."""

    def run_examples(self, examples, head_server_config):
        async def answer(row):
            await asyncio.sleep(0)
            runs = row["edge_runs"]
            runs = runs[row["_rowidx"] % len(runs)] if runs else []
            tool = row.get("edge_tool")
            result = gym_result(
                row,
                runs,
                tool=(tool["url"], tool["runs"]) if tool else None,
                sampled=row.get("edge_sampled", (11, 12)),
            )
            return row, result

        return (answer(row) for row in examples)


class EngineEdge:
    """Stands where NeMo-Gym's agent and model servers would, and asks a real OpenAI-compatible engine."""

    def __init__(self, url, extra_body):
        self.url, self.extra_body = url, extra_body

    def run_examples(self, examples, head_server_config):
        return (self._play(row) for row in examples)

    async def _play(self, row):
        import aiohttp

        messages = row["responses_create_params"]["input"]
        request = {
            "model": "policy",
            "messages": [_chat_message(message) for message in messages],
            "max_tokens": 4,
            "temperature": 1.0,
            "top_p": 1.0,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            **self.extra_body,
        }
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{self.url}/chat/completions", json=request) as answer:
                answer.raise_for_status()
                body = await answer.json()
        choice = body["choices"][0]
        item = {
            "prompt_token_ids": body["prompt_token_ids"],
            "generation_token_ids": choice["token_ids"],
            "generation_log_probs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
        }
        await _hand_over(item, body.get("media_receipt"))
        return row, {
            "response": {
                "agent_input": copy.deepcopy(messages),
                "seed_obs": copy.deepcopy(messages),
                "output": [item],
            },
            "responses_create_params": {"input": copy.deepcopy(messages)},
            "reward": float(row["_rowidx"] % 2),
        }


async def _hand_over(item, receipt):
    """NeMo-Gym's model server drops the receipt; a worker of the job hands it to the store itself.

    The tests' worker runs in the engine's environment, outside of the job's Ray, so that it is done for it here.
    """
    store = actor_handle()
    if store is not None and receipt is not None:
        key = rollout_key(
            item["prompt_token_ids"], item["generation_token_ids"], item["generation_log_probs"]
        )
        await store.put.remote([key], read_receipt(receipt))


class GymServersEdge:
    """Stands where NeMo-Gym's own client would, and sends rows to a running agent of NeMo-Gym as that does."""

    def __init__(self, url, extra_body):
        self.url, self.extra_body = url, extra_body

    def run_examples(self, examples, head_server_config):
        return (self._play(row) for row in examples)

    async def _play(self, row):
        import aiohttp

        request = copy.deepcopy(row)
        parameters = request["responses_create_params"]
        parameters["max_output_tokens"] = 4
        parameters["metadata"] = {"extra_body": json.dumps(self.extra_body)}
        async with aiohttp.ClientSession() as session:
            async with session.post(self.url, json=request) as answer:
                assert answer.status == 200, await answer.text()
                return row, await answer.json()


def _chat_message(message):
    parts = [
        {"type": "text", "text": part["text"]}
        if part["type"] == "input_text"
        else {"type": "image_url", "image_url": {"url": part["image_url"]}}
        for part in message["content"]
    ]
    return {"role": message["role"], "content": parts}


class AtTheEdge:
    """Mixed into an actor class: no servers are started."""

    def _spinup(self):
        (url,) = self.cfg["base_urls"]
        gym = self.cfg["initial_global_config_dict"]
        model = gym.get("policy_model", {}).get("responses_api_models", {}).get("vllm_model", {})
        words = model.get("extra_body", {}).get("bad_words")
        extra_body = {"bad_words": words} if words else {}
        if url == "http://edge":
            self.rch = FakeGymEdge()
        else:
            self.rch = (GymServersEdge if url.endswith("/run") else EngineEdge)(url, extra_body)
        self.rh, self.head_server_config = object(), None


def edge_actor(name):
    """A Ray actor class with NeMo-RL's options; `EdgeNemoGym` is NeMo-RL's own, `EdgeAlignedNemoGym` ours."""
    return ray.remote(max_restarts=-1, max_task_retries=-1)(getattr(sys.modules[__name__], name))


class EdgeNemoGym(AtTheEdge, nemo_gym.NemoGym.__ray_metadata__.modified_class):
    pass


def __getattr__(name):
    # Only on demand: a run without the extension must not import it.
    if name == "EdgeAlignedNemoGym":
        from nemo_rl_ext.integration.actor import AlignedNemoGym

        globals()[name] = type(name, (AtTheEdge, AlignedNemoGym), {"__module__": __name__})
        return globals()[name]
    raise AttributeError(name)
