# SPDX-License-Identifier: Apache-2.0
"""The files that a run grows step by step: JSON lines, `metrics.jsonl` among them, and TensorBoard events."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class StepLog:
    """Files in `run_dir` whose every line is one flat JSON object, `step` first.

    Of what stands in `names` already, the steps up to `keep_until` are kept, those of a checkpoint that a run is
    resumed from; None begins anew. A line that was cut goes too.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_until: int | None,
        tensorboard: bool,
        names: Sequence[str] = (METRICS_FILE,),
    ) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in names:
            _keep_until(run_dir / name, keep_until)
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                logger.warning("tensorboard is not installed; only %s is written", METRICS_FILE)
            else:
                # TensorBoard drops events from this step on; the checkpoint's own step stays.
                purge = None if keep_until is None else keep_until + 1
                self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one step's metrics."""
        self.append(METRICS_FILE, {"step": step, **values})
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Append lines to one of the files, in one write."""
        with open(self.run_dir / name, "a", encoding="utf-8") as handle:
            handle.write("".join(json.dumps(record) + "\n" for record in records))

    def close(self) -> None:
        """Write out what TensorBoard still holds."""
        if self._board is not None:
            self._board.close()


def _keep_until(path: Path, step: int | None) -> None:
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if step is not None else ():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)
