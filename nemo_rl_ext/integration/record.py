# SPDX-License-Identifier: Apache-2.0
"""What the NemoGym actor found out about one rollout, as it travels beside it to whoever collects rollouts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from nemo_rl_ext.align.verdict import TurnReport
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration.in_process import install_in_process
from nemo_rl_ext.integration.neutral import NeutralMedia


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One rollout's reports, and what a process needs in order to judge static tensors against its tokens.

    Unpickling a record installs the hooks in the process that receives it: that process is, by construction, one
    that collects rollouts, and needs no hook of Ray's to be found.
    """

    row_id: str
    reports: tuple[TurnReport, ...]
    num_changed: int
    bytes_shipped: int
    has_video: bool
    neutral_media: NeutralMedia
    temporal_patch_size: int
    settings: MediaAlignmentConfig

    @property
    def neutral(self) -> bool:
        return any(report.neutral for report in self.reports)

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # The family's decoder holds a tokenizer, which nobody needs on the other side.
        family: Any = self.neutral_media.family
        family = replace(family, decoder=None)
        return _receive, (values | {"neutral_media": replace(self.neutral_media, family=family)},)


def _receive(values: dict[str, Any]) -> RolloutRecord:
    install_in_process()
    return RolloutRecord(**values)
