# SPDX-License-Identifier: Apache-2.0
"""NeMo-Gym agent whose tool returns an image: after each answer it shows the picture larger and asks again.

Its conversations hold what single answers hide: media of later turns that no manifest names, prompts that repeat an
answer's text and not its tokens, and an end where the context is full. The agent scores them itself.
"""

import sys
from pathlib import Path
from typing import Annotated

from fastapi import Body, Request, Response
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef
from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import get_response_json, raise_for_status
from pydantic import ConfigDict, Field

# Gym starts this file as a script; outside a Gym checkout the folder above `responses_api_agents` is not on the path
sys.path.append(str(Path(__file__).resolve().parents[2]))

from responses_api_agents.second_look.looking import enlarged, first_image, score


class SecondLookConfig(BaseResponsesAPIAgentConfig):
    """`turns` answers per rollout; each further picture has sides `magnify` times as long as the one before."""

    model_server: ModelServerRef
    turns: int = Field(default=3, ge=1)
    magnify: float = Field(default=3.0, gt=0.0)


class SecondLookRunRequest(BaseRunRequest):
    """A row; `verifier_metadata.answer` is `l` or `r`."""

    model_config = ConfigDict(extra="allow")


class SecondLook(SimpleResponsesAPIAgent):
    """Asks, shows the picture again, asks again."""

    config: SecondLookConfig

    async def responses(
        self,
        request: Request,
        response: Response,
        body: Annotated[NeMoGymResponseCreateParamsNonStreaming, Body()],
    ) -> NeMoGymResponse:
        """One answer of the model server."""
        answer = await self.server_client.post(
            server_name=self.config.model_server.name,
            url_path="/v1/responses",
            json=body,
            cookies=request.cookies,
        )
        await raise_for_status(answer)
        return NeMoGymResponse.model_validate(await get_response_json(answer))

    async def run(
        self, request: Request, response: Response, body: SecondLookRunRequest
    ) -> BaseVerifyResponse:
        """One rollout, scored."""
        params = body.responses_create_params
        row = body.model_dump()
        picture = first_image(row["responses_create_params"]["input"])
        output = []
        for turn in range(self.config.turns):
            asked = params.model_copy(update={"input": [*params.input, *output]})
            result = await self.responses(request, response, asked)
            output += result.output
            # An answer without ids is none: the prompt has outgrown the context.
            sampled = any(getattr(item, "generation_token_ids", None) for item in result.output)
            if not sampled or turn + 1 == self.config.turns:
                break
            picture = enlarged(picture, self.config.magnify)
            look = {"type": "input_image", "image_url": picture, "detail": "auto"}
            output.append(NeMoGymEasyInputMessage(role="user", content=[look]))
        result.output = output
        text = "".join(
            part.text
            for item in output
            for part in (item.content if isinstance(item.content, list) else ())
            if getattr(part, "type", None) == "output_text"
        )
        answer = str((row.get("verifier_metadata") or {}).get("answer", ""))
        return BaseVerifyResponse(responses_create_params=params, response=result, reward=score(text, answer))


if __name__ == "__main__":
    SecondLook.run_webserver()
