# SPDX-License-Identifier: Apache-2.0
"""Three-axis positions (mRoPE) of a sequence with media, as the engine counts them.

The rule is vLLM's `get_mrope_input_positions` (model_executor/models/qwen2_5_vl.py and qwen3_vl.py), and that of the
models' first releases: what follows a medium starts behind its largest position. transformers starts it elsewhere for
a clip that is longer than it is wide in patches, so log-probs of equal media drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl_ext.align.grids import Array


@dataclass(frozen=True)
class Block:
    """One run of media tokens: `num_tubelets` x `height` x `width` features, tubelets `interval` positions apart."""

    offset: int
    num_tubelets: int
    height: int
    width: int
    interval: float = 1.0

    @property
    def num_tokens(self) -> int:
        return self.num_tubelets * self.height * self.width


def media_positions(num_tokens: int, blocks: Sequence[Block]) -> torch.Tensor:
    """Positions int64 [3 (time, height, width), num_tokens]; `blocks` lie in order and do not overlap."""
    parts: list[Array] = []
    following = done = 0
    for block in blocks:
        parts.append(_text(block.offset - done, following))
        following += block.offset - done
        grid = np.indices((block.num_tubelets, block.height, block.width))
        if block.interval != 1.0:
            grid[0] = (grid[0] * block.interval).astype(np.int64)
        parts.append(grid.reshape(3, -1) + following)
        following = int(parts[-1].max()) + 1
        done = block.offset + block.num_tokens
    parts.append(_text(num_tokens - done, following))
    return torch.from_numpy(np.concatenate(parts, axis=1))


def _text(length: int, first: int) -> Array:
    return np.broadcast_to(np.arange(length, dtype=np.int64), (3, length)) + first
