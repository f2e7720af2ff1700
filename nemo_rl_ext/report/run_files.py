# SPDX-License-Identifier: Apache-2.0
"""The files of a run directory, read as they are: a run may still be going, or may have been killed mid-line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Steps, first offences and chosen turns of one run; `config` is empty where the run wrote none."""

    run_dir: Path
    steps: tuple[Record, ...]
    offences: tuple[Record, ...] = ()
    turns: tuple[Record, ...] = ()
    config: Record = field(default_factory=dict)

    def setting(self, dotted: str, default: Any = None) -> Any:
        """A value of the run's configuration by its dotted name."""
        value: Any = self.config
        for key in dotted.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return default if value is None else value

    def locate(self, path: str | Path) -> Path:
        """A path of the configuration, which is relative to the directory that the run was started in.

        That directory is the run directory without the end that `logger.log_dir` names; else the current one.
        """
        path = Path(path)
        if path.is_absolute():
            return path
        log_dir = Path(str(self.setting("logger.log_dir", "")))
        parts = log_dir.parts
        if parts and not log_dir.is_absolute() and self.run_dir.parts[-len(parts) :] == parts:
            return Path(*self.run_dir.parts[: -len(parts)]) / path
        return Path.cwd() / path


def read_run(run_dir: str | Path) -> RunFiles:
    """Read a run directory.

    Raises:
        ValueError: when it is none: no directory, or no `metrics.jsonl` in it.
    """
    run_dir = Path(run_dir).resolve()
    if not run_dir.is_dir():
        raise ValueError(
            f"{run_dir} is not a directory; the directory that a run wrote (logger.log_dir) is expected"
        )
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{run_dir} holds no metrics.jsonl; the directory that a run wrote is expected")
    steps = [record for record in _records(metrics) if isinstance(record.get("step"), int)]
    return RunFiles(
        run_dir=run_dir,
        steps=tuple(steps),
        offences=tuple(_records(run_dir / "offences.jsonl")),
        turns=tuple(_records(run_dir / "turns.jsonl")),
        config=_config(run_dir / "config.yaml"),
    )


def _records(path: Path) -> list[Record]:
    """The JSON objects of a file; a line that is none (the last of a killed run) is left out."""
    if not path.is_file():
        return []
    records = []
    with open(path, encoding="utf-8", errors="replace") as handle:
        for line in handle:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                records.append(record)
    return records


def _config(path: Path) -> Record:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
