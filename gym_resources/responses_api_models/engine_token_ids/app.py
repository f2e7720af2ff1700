# SPDX-License-Identifier: Apache-2.0
"""vLLM model server that reports the token ids which the engine really used.

Gym's `vllm_model` asks vLLM's `/tokenize` for the prompt ids after the completion. That is a second pass over every
image, and how many context tokens an image becomes depends on the engine's budget, its cache and its version: ids of
another pass are a guess at what the model saw. Here they come with the completion itself.
"""

from typing import Any

from nemo_gym.openai_utils import NeMoGymAsyncOpenAI
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig


class EngineTokenIdsClient(NeMoGymAsyncOpenAI):
    """Asks for token ids with every completion and puts them where `vllm_model` looks before it calls `/tokenize`."""

    async def create_chat_completion(self, **kwargs: Any) -> dict[str, Any]:
        """The completion, its message carrying prompt ids, generated ids and their log-probs."""
        completion = await super().create_chat_completion(**kwargs, return_token_ids=True)
        attach_token_ids(completion)
        return completion


def attach_token_ids(completion: dict[str, Any]) -> None:
    """Move vLLM's token ids and log-probs into the message, in place.

    Raises `ValueError` when the engine did not report them or reports two different lengths: a row whose ids are
    uncertain must not be trained on.
    """
    (choice,) = completion["choices"]
    prompt_ids, generated_ids = completion.pop("prompt_token_ids", None), choice.pop("token_ids", None)
    if prompt_ids is None or generated_ids is None:
        raise ValueError(
            "the engine returned no token ids; vLLM >= 0.10.2 does for 'return_token_ids': true in the request"
        )
    log_probs = [entry["logprob"] for entry in (choice.pop("logprobs", None) or {}).get("content") or []]
    if len(log_probs) != len(generated_ids):
        raise ValueError(f"the engine returned {len(generated_ids)} token ids and {len(log_probs)} log-probs")
    choice["message"] |= {
        "prompt_token_ids": prompt_ids,
        "generation_token_ids": generated_ids,
        "generation_log_probs": log_probs,
    }


class EngineTokenIdsConfig(VLLMModelConfig):
    """As `vllm_model`; token ids are the point of this server, so they are always on."""

    return_token_id_information: bool = True


class EngineTokenIds(VLLMModel):
    """`vllm_model` with exact token ids."""

    config: EngineTokenIdsConfig

    def _post_init(self) -> None:
        super()._post_init()
        self._clients = [EngineTokenIdsClient(**client.model_dump()) for client in self._clients]


if __name__ == "__main__":
    EngineTokenIds.run_webserver()
