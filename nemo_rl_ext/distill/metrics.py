# SPDX-License-Identifier: Apache-2.0
"""``metrics.jsonl`` (one flat object per step, ``step`` first) and TensorBoard files of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes both; ``first_step`` cuts off what a crashed run wrote after the checkpoint that is resumed."""

    def __init__(self, run_dir: Path, *, first_step: int, tensorboard: bool) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        kept = [row for row in _rows(path) if row["step"] < first_step] if first_step > 1 else []
        self._file = path.open("w", encoding="utf-8")
        for row in kept:
            self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._board = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                logger.warning("tensorboard is not installed; only metrics.jsonl is written")
            else:
                self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # the last line of a run that was killed while it wrote
                break
    return rows
