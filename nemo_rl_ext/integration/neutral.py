# SPDX-License-Identifier: Apache-2.0
"""Neutral media as NeMo-RL's backends take them: every key that its own media have, and one size where one is needed.

NeMo-RL's AutoModel and DTensor backends refuse a micro-batch whose images differ in size (`nemo_rl/models/automodel/
data.py`, `filter_multimodal_kwargs_for_model`), which the neutral images of one row may.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nemo_rl_ext.align.families.family import MediaFamily, MediaTensors
from nemo_rl_ext.align.runs import find_all_runs
from nemo_rl_ext.align.turn import TokenIds, neutral_media
from nemo_rl_ext.align.verdict import Reason, TurnReport
from nemo_rl_ext.rollout.provenance import attach_rollout_media, detach_media


@dataclass(frozen=True, kw_only=True)
class NeutralMedia:
    """Makes neutral media for one checkpoint and one backend.

    `counters` are the processor's keys that hold a 1 for every image (`num_patches`). `one_size` says that the images
    of a row must not differ in size.
    """

    family: MediaFamily
    counters: tuple[str, ...] = ()
    one_size: bool = False

    def completed(self, tensors: MediaTensors) -> MediaTensors:
        """Tensors with the counters that NeMo-RL's own media have."""
        ones = {key: torch.ones(len(tensors.grids), dtype=torch.int64) for key in self.counters}
        return MediaTensors(grids=tensors.grids, values={**tensors.values, **ones})

    def of_turn(self, token_ids: TokenIds, *, clip: bool = False) -> MediaTensors | None:
        """Neutral media for the ids of one turn [tokens]; None where they call for none.

        `clip`: the turn's own media are a clip's, which NeMo-RL gives no counters.
        """
        tensors = neutral_media(token_ids, self.family)
        return tensors if tensors is None or clip else self.completed(tensors)

    def fill_row(self, messages: Sequence[dict[str, Any]]) -> None:
        """Give every message of a row neutral media of one size, as many features as it has context tokens."""
        counts = [
            int(find_all_runs(message["token_ids"], self.family.grammars).lengths.sum())
            for message in messages
        ]
        tokens = self.tokens_of_one_size(counts)
        for message, count in zip(messages, counts, strict=True):
            if count:
                tensors = self.family.neutral([tokens] * (count // tokens))
                attach_rollout_media(message, self.completed(tensors))
            else:
                detach_media(message)

    def tokens_of_one_size(self, counts: Sequence[int]) -> int:
        """The most tokens that divide every count and for which the family's neutral images have one size."""
        common = math.gcd(*counts)
        for tokens in range(common, 1, -1):
            if common % tokens == 0 and len(set(self.family.neutral([tokens]).grids)) == 1:
                return tokens
        return 1


def mixed_sizes(reports: Sequence[TurnReport]) -> list[TurnReport]:
    """Reports of a row whose images must not differ in size: if they do, its first turn with images becomes neutral."""
    grids = {item.grid for report in reports for item in report.media if item.grid is not None}
    if len(grids) < 2 or any(report.neutral for report in reports):
        return list(reports)
    first = next(index for index, report in enumerate(reports) if report.media)
    sizes = ", ".join(sorted(map(str, grids)))
    named = replace(
        reports[first],
        neutral=True,
        reason=Reason.MIXED_SIZES,
        detail=f"the engine gave the row's images the grids {sizes}, and this backend takes images of one size",
    )
    return [*reports[:first], named, *reports[first + 1 :]]
