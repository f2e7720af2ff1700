# SPDX-License-Identifier: Apache-2.0
"""NeMo-Gym resources server that scores object tracks on SA-V rows; the scoring itself is in `scoring.py`."""

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
from nemo_gym.openai_utils import NeMoGymResponse
from pydantic import ConfigDict, PrivateAttr

try:
    from nemo_gym.base_resources_server import BaseMultiRewardVerifyResponse, ReverifyMode
except ImportError:  # nemo-gym 0.4.0
    BaseMultiRewardVerifyResponse, ReverifyMode = BaseVerifyResponse, None

# Gym starts this file as a script; outside a Gym checkout the folder above `resources_servers` is not on the path
sys.path.append(str(Path(__file__).resolve().parents[2]))

from resources_servers.sav_tracks.scoring import score_answer
from resources_servers.sav_tracks.truth import TruthCache


class SavTracksConfig(BaseResourcesServerConfig):
    """Settings of the server.

    region_metrics: report J, F and J&F where a row carries masks; the costly part of a request.
    cache_megabytes: memory for decoded ground truth; every generation of a row shares one entry.
    """

    # a score depends on the answer and the row alone
    REVERIFY_MODE: ClassVar[Any] = ReverifyMode and ReverifyMode.STATELESS

    region_metrics: bool = True
    cache_megabytes: int = 256


class SavTracksRunRequest(BaseRunRequest):
    """A row; `verifier_metadata` is taken as it comes, so that a malformed row is scored 0 and ends no batch."""

    model_config = ConfigDict(extra="allow")

    verifier_metadata: Any = None


class SavTracksVerifyRequest(SavTracksRunRequest, BaseVerifyRequest):
    """A row with the policy's response."""


class SavTracksVerifyResponse(BaseMultiRewardVerifyResponse):
    """The row with its reward; further numeric fields are the per-task metrics (`box/mean_iou`, ...)."""

    model_config = ConfigDict(extra="allow")

    reward_components: dict[str, float]
    accuracy: float
    format: float
    task: str | None = None
    dropped: dict[str, int]
    error: str | None = None
    error_class: str | None = None


class SavTracksResourcesServer(SimpleResourcesServer):
    """Scores tracks; holds no state but the ground-truth cache."""

    config: SavTracksConfig
    _cache: TruthCache = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Size the cache."""
        super().model_post_init(context)
        self._cache = TruthCache(max_bytes=self.config.cache_megabytes << 20)

    async def verify(self, body: SavTracksVerifyRequest) -> SavTracksVerifyResponse:
        """Score one rollout."""
        score = score_answer(
            answer_text(body.response),
            body.verifier_metadata,
            cache=self._cache,
            region_metrics=self.config.region_metrics,
        )
        return SavTracksVerifyResponse(**well_formed({**body.model_dump(), **score.as_fields()}))


def answer_text(response: NeMoGymResponse) -> str:
    """The text of the last assistant message; empty when the policy produced none."""
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
    SavTracksResourcesServer.run_webserver()
