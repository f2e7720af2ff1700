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
    """One generation of a prompt. `segments` are its training sequences; a masked rollout has zero loss.

    `reward` is None where there was nothing to score. A `truncated` one has an answer that ran into a limit before its
    end, or a conversation that outgrew the engine's context.
    """

    row_id: str
    segments: list[Segment]
    reward: float | None = None
    text: str = ""
    masked: bool = False
    truncated: bool = False
    aligned: list[AlignedTurn] = field(default_factory=list)
    extra_reasons: dict[Reason, str] = field(default_factory=dict)
    repaired_segments: set[int] = field(default_factory=set)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why the rollout is masked or repaired."""
        return (*(reason for turn in self.aligned for reason in turn.report.reasons()), *self.extra_reasons)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy drew, over all turns."""
        messages = (message for segment in self.segments for message in segment.message_log)
        return sum(len(message["token_ids"]) for message in messages if message["role"] == "assistant")

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
        """Its rollouts have equal rewards, or all are masked, so that it trains nothing."""
        rewards = {rollout.reward for rollout in self.rollouts if rollout.reward is not None}
        return len(rewards) < 2 or all(rollout.masked for rollout in self.rollouts)

    def advantages(self, *, normalize: bool, leave_one_out: bool) -> np.ndarray:
        """NeMo-RL's group-relative advantages, float64 `[rollouts]`: rewards less a baseline, by a deviation if asked.

        The baseline of a rollout is the mean reward of the others (of all without `leave_one_out`), the deviation that
        of the same rewards, with Bessel's correction and 1e-6 added; where they are all equal nothing is divided.
        Masked rollouts count here as in NeMo-RL: what they sampled is a sample of the policy. One without a reward does
        not count and has no advantage.
        """
        scored = [i for i, rollout in enumerate(self.rollouts) if rollout.reward is not None]
        rewards = np.array([self.rollouts[i].reward for i in scored], dtype=np.float64)
        advantages = np.zeros(len(self.rollouts))
        for place, index in enumerate(scored if len(scored) > 1 else ()):
            basis = np.delete(rewards, place) if leave_one_out else rewards
            advantages[index] = rewards[place] - basis.mean()
            deviation = basis.std(ddof=1) if len(basis) > 1 else 0.0
            if normalize and deviation > 0:
                advantages[index] /= deviation + 1e-6
        return advantages


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
