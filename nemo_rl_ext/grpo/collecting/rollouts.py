# SPDX-License-Identifier: Apache-2.0
"""What a collector hands to training: prompt groups of rollouts, each a list of aligned training sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.rollout.packed import join_media
from nemo_rl_ext.rollout.segments import Segment


@dataclass(kw_only=True)
class Rollout:
    """One generation of a prompt. `segments` are its training sequences; a masked rollout has zero loss."""

    row_id: str
    segments: list[Segment]
    reward: float = 0.0
    text: str = ""
    masked: bool = False
    aligned: list[AlignedTurn] = field(default_factory=list)
    extra_reasons: dict[Reason, str] = field(default_factory=dict)
    repaired_segments: set[int] = field(default_factory=set)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why the rollout is masked or repaired."""
        return (*(reason for turn in self.aligned for reason in turn.report.reasons()), *self.extra_reasons)

    @property
    def has_video(self) -> bool:
        """Whether any turn brings a clip."""
        return any(item.kind == "video" for turn in self.aligned for item in turn.report.media)


@dataclass(kw_only=True)
class PromptGroup:
    """All generations of one prompt; advantages are relative to them."""

    row: ManifestRow
    rollouts: list[Rollout]
    step: int

    @property
    def is_flat(self) -> bool:
        """Its rollouts have equal rewards, masked ones aside, so that it trains nothing."""
        return len({rollout.reward for rollout in self.rollouts if not rollout.masked}) < 2

    def advantages(self, *, normalize: bool) -> np.ndarray:
        """Group-relative advantages float64 [rollouts]: centred rewards, divided by their deviation if asked.

        Masked rollouts keep their place in the group but neither count in its statistics nor have an advantage.
        The deviation gets 1e-4 added, as in reference GRPO implementations.
        """
        rewards = np.array([rollout.reward for rollout in self.rollouts])
        valid = np.array([not rollout.masked for rollout in self.rollouts])
        if valid.sum() < 2:
            return np.zeros(len(rewards))
        centred = rewards - rewards[valid].mean()
        if normalize:
            centred = centred / (rewards[valid].std(ddof=1) + 1e-4)
        return np.where(valid, centred, 0.0)


def merge_static(parts: Sequence[MediaTensors | None]) -> MediaTensors | None:
    """The static tensors of several turns as those of one, for a sequence that repeats them in one message."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if len(present) == 1:
        return present[0]
    return MediaTensors(
        grids=tuple(grid for part in present for grid in part.grids),
        values=join_media([part.values for part in present]),
    )
