# SPDX-License-Identifier: Apache-2.0
"""What the NemoGym actor found out about one rollout, as it travels beside it to whoever collects rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_ext.align.verdict import TurnReport
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration.neutral import NeutralMedia


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One rollout's reports, and what a process needs in order to judge static tensors against its tokens."""

    row_id: str
    reports: tuple[TurnReport, ...]
    num_changed: int
    bytes_shipped: int
    has_video: bool
    neutral_media: NeutralMedia
    temporal_patch_size: int
    settings: MediaAlignmentConfig
    shares: bool = False
    """Whether repaired media are references into the object store."""

    @property
    def neutral(self) -> bool:
        return any(report.neutral for report in self.reports)
