# SPDX-License-Identifier: Apache-2.0
"""A rollout's record on its way between processes: whoever receives it gets the hooks with it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from nemo_rl_ext.integration.in_process import install_in_process
from nemo_rl_ext.integration.record import RolloutRecord


@dataclass(frozen=True, kw_only=True)
class TravellingRecord(RolloutRecord):
    """Unpickling it installs the hooks in the process that receives it: that process is, by construction, one that
    collects rollouts, and needs no hook of Ray's to be found."""

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # The family's decoder holds a tokenizer, which nobody needs on the other side.
        family: Any = self.neutral_media.family
        family = replace(family, decoder=None)
        return _receive, (values | {"neutral_media": replace(self.neutral_media, family=family)},)


def _receive(values: dict[str, Any]) -> TravellingRecord:
    install_in_process()
    return TravellingRecord(**values)
