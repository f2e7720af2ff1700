# SPDX-License-Identifier: Apache-2.0
"""Processor classes that NeMo-RL treats as placeholder style, extended by the names it does not know yet."""

from __future__ import annotations

import importlib
import logging
import sys

logger = logging.getLogger(__name__)

EXTRA_PROCESSOR_NAMES = frozenset(
    {"NemotronH_Omni_Reasoning_V3Processor", "NemotronH_Super_Omni_Reasoning_V3Processor"}
)
"""Same contract as `NemotronH_Nano_Omni_Reasoning_V3Processor`, under the names of later checkpoints."""

_ALLOWLISTS = (
    ("nemo_rl.data.multimodal_utils", "_PLACEHOLDER_STYLE_PROCESSOR_NAMES"),
    ("nemo_rl.environments.nemotron_utils", "NEMOTRON_VIDEO_PROCESSOR_NAMES"),
    # A copy by name: extending the original does not reach it.
    ("nemo_rl.environments.nemo_gym_video", "NEMOTRON_VIDEO_PROCESSOR_NAMES"),
)


def extend_processor_names() -> None:
    """Add the names to NeMo-RL's allowlists in this process. Idempotent; says nothing where they are known."""
    for module_name, name in _ALLOWLISTS:
        module = sys.modules.get(module_name) or importlib.import_module(module_name)
        known = getattr(module, name)
        missing = EXTRA_PROCESSOR_NAMES - known
        if missing:
            setattr(module, name, known | missing)
            logger.info("%s.%s: added %s", module_name, name, ", ".join(sorted(missing)))
