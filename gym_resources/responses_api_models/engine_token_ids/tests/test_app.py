# SPDX-License-Identifier: Apache-2.0
from unittest.mock import MagicMock

import pytest

pytest.importorskip("nemo_gym", reason="needs the NeMo-Gym environment (make gym)")

from fastapi.testclient import TestClient
from nemo_gym import openai_utils
from nemo_gym.server_utils import ServerClient
from responses_api_models.engine_token_ids.app import (
    EngineTokenIds,
    EngineTokenIdsClient,
    EngineTokenIdsConfig,
    attach_token_ids,
)

pytestmark = pytest.mark.gym


def completion(*, prompt=(1, 5, 5, 2), generated=(7, 8), log_probs=(-0.5, -0.25), content="ab"):
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": content},
        "logprobs": {"content": [{"token": "x", "logprob": value} for value in log_probs]},
        "token_ids": None if generated is None else list(generated),
    }
    ids = None if prompt is None else list(prompt)
    head = {"id": "c", "object": "chat.completion", "created": 0, "model": "m"}
    return {**head, "choices": [choice], "prompt_token_ids": ids}


def test_ids_move_into_the_message():
    found = completion()
    attach_token_ids(found)
    assert found["choices"][0]["message"] == {
        "role": "assistant",
        "content": "ab",
        "prompt_token_ids": [1, 5, 5, 2],
        "generation_token_ids": [7, 8],
        "generation_log_probs": [-0.5, -0.25],
    }
    assert "prompt_token_ids" not in found and "logprobs" not in found["choices"][0]


def test_an_empty_generation_has_empty_ids():
    found = completion(generated=(), log_probs=(), content="")
    found["choices"][0]["logprobs"] = None
    attach_token_ids(found)
    assert found["choices"][0]["message"]["generation_token_ids"] == []


@pytest.mark.parametrize("missing", ["prompt", "generated"])
def test_a_completion_without_ids_is_refused(missing):
    with pytest.raises(ValueError, match="returned no token ids"):
        attach_token_ids(completion(**{missing: None}))


def test_two_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 token ids and 1 log-probs"):
        attach_token_ids(completion(log_probs=(-0.5,)))


def test_rows_carry_the_engine_s_ids_and_tokenize_is_not_called(monkeypatch):
    sent = []

    async def fake_engine(self, **request):
        sent.append(request)
        return completion()

    async def never(self, **request):
        pytest.fail("/tokenize was called")

    monkeypatch.setattr(openai_utils.NeMoGymAsyncOpenAI, "create_chat_completion", fake_engine)
    monkeypatch.setattr(openai_utils.NeMoGymAsyncOpenAI, "create_tokenize", never)
    config = EngineTokenIdsConfig(
        host="127.0.0.1", port=1, entrypoint="app.py", name="policy_model",
        base_url="http://127.0.0.1:1/v1", api_key="none", model="m", uses_reasoning_parser=False,
    )  # fmt: skip
    network = MagicMock(spec=ServerClient)
    network.global_config_dict = {}  # newer Gyms look there for the capture of calls
    server = EngineTokenIds(config=config, server_client=network)
    assert [type(client) for client in server._clients] == [EngineTokenIdsClient]
    with TestClient(server.setup_webserver()) as client:
        answered = client.post("/v1/responses", json={"input": "hello"})
    assert answered.status_code == 200
    (item,) = answered.json()["output"]
    assert item["prompt_token_ids"] == [1, 5, 5, 2]
    assert item["generation_token_ids"] == [7, 8] and item["generation_log_probs"] == [-0.5, -0.25]
    assert sent[0]["return_token_ids"] is True and sent[0]["logprobs"] is True


def test_ids_are_on_unless_switched_off():
    assert EngineTokenIdsConfig.model_fields["return_token_id_information"].default is True
