# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from nemo_rl_ext.grpo.checkpoint import build_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny float32 checkpoint; read-only, shared by every test of the package."""
    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")
