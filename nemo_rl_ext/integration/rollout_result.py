# SPDX-License-Identifier: Apache-2.0
"""What this package writes into NeMo-RL's rollout results: two keys of its own, and NeMo-RL's own mask flag."""

from __future__ import annotations

from typing import Any

PLAN_KEY = "_media_alignment_plan"
"""Key of a Gym result that holds its `RolloutPlan` inside the NemoGym actor, until it is post-processed."""

RECORD_KEY = "_media_alignment"
"""Key of a rollout result that holds its `RolloutRecord`; taken out before the result becomes a batch."""


def mask_sample(result: dict[str, Any]) -> None:
    """Ask NeMo-RL to zero a row's loss and to keep it in its prompt group's advantages."""
    full = result["full_result"]
    full["instance_config"] = {**(full.get("instance_config") or {}), "mask_sample": True}
