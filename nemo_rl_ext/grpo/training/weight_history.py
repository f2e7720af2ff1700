# SPDX-License-Identifier: Apache-2.0
"""Other weights in the policy for a while: the versions that sampled, and the reference of the KL penalty.

Under asynchronous training the policy has moved on when a rollout arrives; a log-prob gap that is not measured on the
weights that sampled would show that movement and drown what alignment is about.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch

from nemo_rl_ext.grpo.training.policy import Policy

Weights = Mapping[str, torch.Tensor]
"""The trainable parameters of a policy by name."""


def snapshot(policy: Policy) -> Weights:
    """Copies of the policy's trainable parameters as they are."""
    return {name: value.detach().clone() for name, value in policy.trainable.items()}


@contextlib.contextmanager
@torch.no_grad()
def applied(policy: Policy, weights: Weights) -> Iterator[None]:
    """Run the block with these weights in the policy, without gradients; its own come back afterwards."""
    own = snapshot(policy)
    _copy(weights, policy)
    try:
        yield
    finally:
        _copy(own, policy)


class WeightHistory:
    """The newest `size` versions of a policy's weights."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._versions: OrderedDict[int, Weights] = OrderedDict()

    def keep(self, version: int, policy: Policy) -> None:
        """Remember the policy's weights as `version`; the oldest beyond `size` are forgotten."""
        self._versions[version] = snapshot(policy)
        while len(self._versions) > self.size:
            self._versions.popitem(last=False)

    def items(self) -> tuple[tuple[int, Weights], ...]:
        """The versions that are remembered and their weights, oldest first."""
        return tuple(self._versions.items())


@torch.no_grad()
def _copy(source: Weights, policy: Policy) -> None:
    for name, value in policy.trainable.items():
        value.copy_(source[name])
