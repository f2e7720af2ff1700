# SPDX-License-Identifier: Apache-2.0
"""NeMo-Gym resources server that scores captions by what a text-only judge can answer; see `scoring.py`."""

import asyncio
import sys
from pathlib import Path
from typing import Any, ClassVar

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest, ModelServerRef
from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import get_response_json, raise_for_status
from pydantic import ConfigDict, Field, PrivateAttr

try:
    from nemo_gym.base_resources_server import BaseMultiRewardVerifyResponse, ReverifyMode
    from nemo_gym.judge import call_judge
except ImportError:  # nemo-gym 0.4.0
    BaseMultiRewardVerifyResponse, ReverifyMode, call_judge = BaseVerifyResponse, None, None

# Gym starts this file as a script; outside a Gym checkout the folder above `resources_servers` is not on the path
sys.path.append(str(Path(__file__).resolve().parents[2]))

from resources_servers.caption_qa.judge import JudgeReplyError
from resources_servers.caption_qa.scoring import JudgeSettings, score_caption


class CaptionQaConfig(BaseResourcesServerConfig):
    """Settings of the server.

    judge_model_server: the model server that answers the questions; it is sent text only.
    judge_responses_create_params: request parameters for the judge; `input` is replaced.
    judge_max_concurrency: judge requests in flight at once, over all rows.
    max_caption_chars, judge_attempts, judge_backoff_s, judge_timeout_s: see `JudgeSettings`.
    """

    # the policy's answer is all that a score depends on; `gym eval reverify` asks the judge again
    REVERIFY_MODE: ClassVar[Any] = ReverifyMode and ReverifyMode.STATELESS

    judge_model_server: ModelServerRef
    judge_responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    judge_max_concurrency: int = Field(default=64, ge=1)
    max_caption_chars: int = Field(default=4000, ge=1)
    judge_attempts: int = Field(default=3, ge=1)
    judge_backoff_s: float = Field(default=1.0, ge=0)
    judge_timeout_s: float = Field(default=120.0, gt=0)


class CaptionQaRunRequest(BaseRunRequest):
    """A row; `verifier_metadata` is taken as it comes, so that a malformed row is scored 0 and ends no batch."""

    model_config = ConfigDict(extra="allow")

    verifier_metadata: Any = None


class CaptionQaVerifyRequest(CaptionQaRunRequest, BaseVerifyRequest):
    """A row with the policy's response."""


class CaptionQaVerifyResponse(BaseMultiRewardVerifyResponse):
    """The row with its reward.

    A row that the judge could not be asked about has `error_class` `judge_unavailable` and the marks of
    `failure_marks`, so that neither Gym nor NeMo-RL takes its reward for a judgement. `accuracy` is the share of right
    answers, `net` what the answers are worth.
    """

    model_config = ConfigDict(extra="allow")

    reward_components: dict[str, float]
    net: float
    accuracy: float
    format: float
    num_questions: int
    num_right: int
    num_wrong: int
    num_cannot_answer: int
    num_unusable_replies: int
    caption_chars: int
    judgements: list[dict[str, Any]]
    error: str | None = None
    error_class: str | None = None


class CaptionQaResourcesServer(SimpleResourcesServer):
    """Asks the judge; holds no state."""

    config: CaptionQaConfig
    _judge_slots: asyncio.Semaphore = PrivateAttr()
    _settings: JudgeSettings = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Prepare the limits."""
        super().model_post_init(context)
        self._judge_slots = asyncio.Semaphore(self.config.judge_max_concurrency)
        self._settings = JudgeSettings(
            max_caption_chars=self.config.max_caption_chars,
            attempts=self.config.judge_attempts,
            backoff_s=self.config.judge_backoff_s,
            timeout_s=self.config.judge_timeout_s,
        )

    async def verify(self, body: CaptionQaVerifyRequest) -> CaptionQaVerifyResponse:
        """Score one rollout."""
        score = await score_caption(
            answer_text(body.response),
            body.verifier_metadata,
            self._ask,
            settings=self._settings,
            slots=self._judge_slots,
        )
        fields = {**body.model_dump(), **score.as_fields()}
        if score.error_class == "judge_unavailable":
            fields |= failure_marks(score.error, fields.get("instance_config"))
        return CaptionQaVerifyResponse(**well_formed(fields))

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Aggregate without the rows that were not judged."""
        judged = [row for row in body.verify_responses if row.get("error_class") != "judge_unavailable"]
        metrics = await super().aggregate_metrics(AggregateMetricsRequest(verify_responses=judged))
        metrics.agent_metrics["num_judge_unavailable"] = len(body.verify_responses) - len(judged)
        return metrics

    async def _ask(self, prompt: str) -> str:
        params = self.config.judge_responses_create_params.model_copy(
            update={"input": [NeMoGymEasyInputMessage(role="user", content=prompt)]}
        )
        where = {
            "server_name": self.config.judge_model_server.name,
            "url_path": "/v1/responses",
            "json": params,
        }
        if call_judge is not None:
            response = await call_judge(self.server_client, **where, response_model=NeMoGymResponse)
        else:
            answered = await self.server_client.post(**where)
            await raise_for_status(answered)
            response = NeMoGymResponse.model_validate(await get_response_json(answered))
        if response.incomplete_details is not None:
            # what stands before the cut is reasoning as often as not
            raise JudgeReplyError(
                f"the reply was cut ({response.incomplete_details.reason}); if that is the token limit, raise "
                "judge_responses_create_params.max_output_tokens"
            )
        return answer_text(response)


def failure_marks(reason: str, instance_config: Any) -> dict[str, Any]:
    """Fields by which a row without a judgement is known: Gym's (kept apart, repeated on resume and by `gym eval
    reverify --judge-failed-only`) and NeMo-RL's (no loss), under the names of their older and newer versions."""
    return {
        "_ng_failure_class": "judge_failed",
        "_ng_failure_judge_error": reason,
        "failure_kind": "judge_failed",
        "failure_reason": reason,
        "mask_sample": True,
        "instance_config": {
            **(instance_config if isinstance(instance_config, dict) else {}),
            "mask_sample": True,
        },
    }


def answer_text(response: NeMoGymResponse) -> str:
    """The text of the last assistant message; empty when there is none."""
    for item in reversed(response.output):
        if item.type == "message" and item.role == "assistant":
            if isinstance(item.content, str):
                return item.content
            return "".join(part.text for part in item.content if getattr(part, "type", None) == "output_text")
    return ""


def well_formed(value: Any) -> Any:
    """`value` with every lone surrogate replaced: a policy can emit one, and no JSON response can carry it."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    return [well_formed(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    CaptionQaResourcesServer.run_webserver()
