# SPDX-License-Identifier: Apache-2.0
"""What a run on the real engine starts from: a tiny checkpoint and a demo manifest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "configs" / "embedded_async.yaml"


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """`train.jsonl` and `validation.jsonl` in `folder`; read-only."""

    folder: Path
    checkpoint: Path
    config: Path = CONFIG

    def overrides(self, run_dir: Path) -> list[str]:
        """The configuration's overrides for a run of these inputs alone, without validation or event files."""
        return [
            f"policy.model_name={self.checkpoint}",
            f"data.train.data_path={self.folder}/train.jsonl",
            f"data.validation.data_path={self.folder}/validation.jsonl",
            "policy.build_tiny_checkpoint=false",
            "data.build_demo_manifest=false",
            f"logger.log_dir={run_dir}",
            "logger.tensorboard_enabled=false",
            "grpo.val_at_start=false",
            "grpo.val_period=0",
        ]


@pytest.fixture(scope="session")
def make_inputs(tmp_path_factory, tiny_checkpoint) -> Callable[[int, int], RunInputs]:
    """Inputs with so many rows and validation rows; the checkpoint is one for all."""
    from nemo_rl_ext.manifest.demo import build_demo_manifest

    def make(num_rows: int, num_validation_rows: int) -> RunInputs:
        folder = tmp_path_factory.mktemp("inputs")
        build_demo_manifest(folder, num_rows=num_rows, num_validation_rows=num_validation_rows, seed=0)
        return RunInputs(folder=folder, checkpoint=tiny_checkpoint)

    return make
