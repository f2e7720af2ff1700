# SPDX-License-Identifier: Apache-2.0
"""The policy's last few versions, so that a log-prob gap is measured on the weights that sampled.

Under asynchronous training the policy has moved on when a rollout arrives; comparing its log-probs then would show
that movement and drown what alignment is about.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

import torch

from nemo_rl_ext.grpo.training.policy import Policy


class WeightHistory:
    """Copies of the trainable parameters of the newest `size` versions."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._versions: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()

    def keep(self, version: int, policy: Policy) -> None:
        """Remember the policy's weights as `version`; the oldest beyond `size` are forgotten."""
        self._versions[version] = {name: value.detach().clone() for name, value in policy.trainable.items()}
        while len(self._versions) > self.size:
            self._versions.popitem(last=False)

    def versions(self) -> tuple[int, ...]:
        """The versions that are remembered, oldest first."""
        return tuple(self._versions)

    @contextlib.contextmanager
    @torch.no_grad()
    def applied(self, policy: Policy, version: int) -> Iterator[None]:
        """Run the block with the policy at `version`, without gradients; its own weights come back afterwards."""
        current = {name: value.detach().clone() for name, value in policy.trainable.items()}
        _copy(self._versions[version], policy)
        try:
            yield
        finally:
            _copy(current, policy)


@torch.no_grad()
def _copy(source: dict[str, torch.Tensor], policy: Policy) -> None:
    for name, value in policy.trainable.items():
        value.copy_(source[name])
