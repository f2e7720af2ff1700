# SPDX-License-Identifier: Apache-2.0
"""The embedded engine's OpenAI-compatible endpoint over real HTTP."""

import base64
import io
import json
import urllib.error
import urllib.request

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.align.runs import Grammar, find_runs
from nemo_rl_ext.models.tokenizer import IMAGE_ID, SPECIAL_TOKENS

pytestmark = pytest.mark.engine

GRAMMAR = Grammar(SPECIAL_TOKENS.index("<img>"), IMAGE_ID, SPECIAL_TOKENS.index("</img>"))


@pytest.fixture(scope="module")
def endpoint(tiny_checkpoint, cluster):
    from transformers import AutoTokenizer

    from nemo_rl_ext.grpo.collecting.endpoint import Completions, serve
    from nemo_rl_ext.grpo.collecting.player import Sampling
    from nemo_rl_ext.grpo.collecting.prompts import PromptRenderer
    from nemo_rl_ext.grpo.engine.actor import start_engine
    from nemo_rl_ext.grpo.engine.client import EngineClient
    from nemo_rl_ext.grpo.engine.config import EngineConfig
    from nemo_rl_ext.media.policy import MediaPolicy

    engine = EngineClient(lambda: start_engine(EngineConfig(model=str(tiny_checkpoint))))
    completions = Completions(
        engine=engine,
        renderer=PromptRenderer(AutoTokenizer.from_pretrained(str(tiny_checkpoint))),
        sampling=Sampling(temperature=1.0, max_new_tokens=8, banned_token_ids=(IMAGE_ID,)),
        media_policy=MediaPolicy(),
        model_name="tiny",
    )
    with serve(completions) as base_url:
        yield base_url
    engine.shutdown()


def post(base_url, body):
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def image_part(width, height, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_the_answer_carries_the_ids_that_were_really_used(endpoint):
    parts = [image_part(640, 480, 0), image_part(300, 1024, 1), image_part(300, 1024, 2)]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "<image>?"}]}]
    answer = post(endpoint, {"model": "tiny", "messages": messages, "max_tokens": 4, "seed": 3})
    (choice,) = answer["choices"]
    runs = find_runs(answer["prompt_token_ids"], GRAMMAR)
    assert [run.length for run in runs] == [165, 144, 144]
    assert 1 <= len(choice["token_ids"]) <= 4
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    again = post(endpoint, {"model": "tiny", "messages": messages, "max_tokens": 4, "seed": 3})
    assert again["choices"][0]["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "input_smell"}]}]}, "input_smell"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "512"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}
                ]
            },
            "no directory is open",
        ),
    ],
)
def test_a_bad_request_is_answered_and_the_engine_lives(endpoint, body, part):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(endpoint, body)
    assert caught.value.code == 400
    assert part in json.load(caught.value)["error"]["message"]
    assert post(endpoint, {"messages": [{"role": "user", "content": "?"}]})["choices"]


def test_the_model_is_listed(endpoint):
    with urllib.request.urlopen(f"{endpoint}/models", timeout=30) as response:
        assert json.load(response)["data"][0]["id"] == "tiny"
