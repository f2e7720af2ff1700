# SPDX-License-Identifier: Apache-2.0
"""The files of a run directory, read as they are: a run may still be going, or may have been killed mid-line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter
from typing_extensions import TypedDict

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Steps, the first occurrence of each reason and chosen turns of one run; what a run did not write is empty."""

    run_dir: Path
    steps: tuple[Record, ...]
    occurrences: tuple[Record, ...] = ()
    turns: tuple[Record, ...] = ()
    config: Record = field(default_factory=dict)
    record: Record = field(default_factory=dict)
    """`run.json`: id, versions, state, and the error that ended the run."""

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


class _Medium(TypedDict, total=False):
    kind: str
    source: str
    verdict: str
    size: tuple[int, int]
    expected: list[int]
    found: list[int]
    grid: tuple[int, int] | None
    static_grid: tuple[int, int] | None
    evidence: str


class _Turn(TypedDict, total=False):
    """What a page reads of a turn or of a reason's first occurrence; further keys are free."""

    step: int
    turn: int | None
    reason: str
    reasons: list[str]
    detail: str
    media: list[_Medium]
    num_media: int
    num_expected: int
    num_found: int
    rollouts: int
    repair_ms: float
    num_bytes: int


_TURN = TypeAdapter(_Turn)


def read_run(run_dir: str | Path) -> RunFiles:
    """Read a run directory.

    Raises:
        ValueError: when it is none: no directory, no `metrics.jsonl` in it, or lines in it that no run writes.
    """
    run_dir = Path(run_dir).resolve()
    if not run_dir.is_dir():
        raise ValueError(
            f"{run_dir} is not a directory; the directory that a run wrote (logger.log_dir) is expected"
        )
    metrics, record = run_dir / "metrics.jsonl", _object(run_dir / "run.json")
    # A run that failed before its first step wrote no metrics, but what ended it.
    if not metrics.is_file() and "state" not in record:
        raise ValueError(f"{run_dir} holds no metrics.jsonl; the directory that a run wrote is expected")
    if "fingerprint" in record:
        raise ValueError(f"{run_dir} is a distillation run's; the report knows runs of `nemo-rl-ext grpo`")
    return RunFiles(
        run_dir=run_dir,
        steps=tuple(_records(metrics, _require_metrics)),
        occurrences=tuple(_records(run_dir / "offences.jsonl", _TURN.validate_python)),
        turns=tuple(_records(run_dir / "turns.jsonl", _TURN.validate_python)),
        config=_config(run_dir / "config.yaml"),
        record=record,
    )


def _records(path: Path, require: Callable[[Record], object]) -> list[Record]:
    """The JSON objects of a file. Its last line may be cut: the run still writes, or was killed."""
    if not path.is_file():
        return []
    records = []
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, start=1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"a JSON object is expected, found {type(record).__name__}")
                require(record)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    break
                problem = "; ".join(str(error).split("\n")[:3])
                raise ValueError(
                    f"{path}:{number}: no line that a run writes: {problem}; repair or remove the line"
                ) from None
            records.append(record)
    return records


def _require_metrics(record: Record) -> None:
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"'step' must be a whole number, found {step!r}")
    for name, value in record.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{name!r} must be a number, found {value!r:.80}")


def _object(path: Path) -> Record:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _config(path: Path) -> Record:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
