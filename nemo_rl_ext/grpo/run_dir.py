# SPDX-License-Identifier: Apache-2.0
"""A run directory: whose it is, whether a run may go on in it, its checkpoints, and how its run ended.

`run.json` holds the run's id, versions and state. Checkpoints bear the id, so that two runs never mix, whatever
directories they share.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import shutil
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_ext.disk import explained_disk_faults
from nemo_rl_ext.grpo.config import Config
from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.grpo.training.policy_state import saved_by
from nemo_rl_ext.versions import installed

logger = logging.getLogger(__name__)

RUN_FILE, CONFIG_FILE = "run.json", "config.yaml"
_FILES = ("metrics.jsonl", "turns.jsonl", "offences.jsonl", "report.html", RUN_FILE)

FREE_KEYS = (
    "grpo.max_num_steps",
    "grpo.max_val_samples",
    "grpo.val_at_start",
    "grpo.val_period",
    "grpo.media_alignment.aligner_cpus",
    "grpo.media_alignment.aligner_timeout_s",
    "grpo.media_alignment.cache_bytes",
    "grpo.media_alignment.masked_window",
    "grpo.media_alignment.max_masked_fraction",
    "grpo.media_alignment.measure_logprob_gap",
    "grpo.media_alignment.num_aligners",
    "policy.build_tiny_checkpoint",
    "policy.generation.vllm_cfg.enable_prefix_caching",
    "policy.generation.vllm_cfg.enforce_eager",
    "policy.generation.vllm_cfg.kv_cache_memory_bytes",
    "policy.generation.vllm_cfg.max_num_seqs",
    "policy.generation.vllm_cfg.mm_processor_cache_gb",
    "policy.train_micro_batch_size",
    "data.build_demo_manifest",
    "data.validation",
    "data.verify_media",
    "data.video.decode_timeout_s",
    "env.nemo_gym.venv",
    "logger",
    "checkpointing",
)
"""What a resumed run may have otherwise than before: blocks and keys that change no training step."""


class RunDirectory:
    """The directory of one run; made by `open_run_directory`."""

    def __init__(self, config: Config, *, record: dict[str, Any], first_step: int, resumed: bool) -> None:
        self.path = config.logger.log_dir
        self.checkpoints = config.checkpoint_dir
        self.first_step = first_step
        self.resumed = resumed
        self.step = first_step
        self._config = config
        self._record = record

    @property
    def finished(self) -> bool:
        """Every step that the configuration asks for is already saved."""
        return self.resumed and self.first_step >= self._config.grpo.max_num_steps

    def claim(self) -> None:
        """Take the directory: what an earlier run left goes, and the configuration is written down.

        Raises:
            ValueError: the directory cannot be written to.
        """
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            if not self.resumed:
                self._clear()
            name = CONFIG_FILE
            if self.resumed and _settings(self.path) != _flat(self._config):
                name = f"config.step_{self.first_step:06d}.yaml"
            if not (self.resumed and name == CONFIG_FILE):
                (self.path / name).write_text(self._config.to_yaml(), encoding="utf-8")
            self._write(state="running", started=_now(), versions=installed(), error=None)

    def _lock(self) -> None:
        """Hold the directory until the run or this process ends, however it ends."""
        self._held = open(self.path / ".lock", "w")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self.path}: another run is writing to it; wait for it, or choose another logger.log_dir"
            ) from None

    def _clear(self) -> None:
        for step in self.saved_steps():
            shutil.rmtree(self.checkpoint(step))
        for path in (*(self.path / name for name in _FILES), *self.path.glob("config*.yaml")):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        self._record = {"id": uuid.uuid4().hex}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note how the run ends: finished, failed with its error, or interrupted. The directory is free then."""
        try:
            yield
            self._end("finished")
        except KeyboardInterrupt:
            self._end("interrupted")
            raise
        except BaseException as error:
            self._end(
                "failed",
                {
                    "type": type(error).__name__,
                    "message": str(error),
                    "traceback": "".join(traceback.format_exception(error)),
                },
            )
            raise
        finally:
            self._held.close()

    def _end(self, state: str, error: dict[str, str] | None = None) -> None:
        # On a full disk the run's own error matters more than this note of it.
        with contextlib.suppress(OSError):
            self._write(state=state, ended=_now(), step=self.step, error=error)

    def _write(self, **fields: Any) -> None:
        self._record |= fields
        temporary = self.path / f".{RUN_FILE}.{os.getpid()}.tmp"
        try:
            temporary.write_text(json.dumps(self._record, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, self.path / RUN_FILE)
        finally:
            temporary.unlink(missing_ok=True)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Turn a fault of the disk into one sentence, a `ValueError`: path, step, what to do."""

        def advice() -> str:
            again = "continue with --resume" if self.saved_steps() else "start again"
            return f"make room or name another place (logger.log_dir, checkpointing.checkpoint_dir), then {again}"

        return explained_disk_faults(self.path, f"at step {self.step}", advice)

    def interruption(self) -> str:
        """What to tell a user who stopped the run."""
        saved = self.saved_steps()
        if not saved:
            return (
                f"interrupted at step {self.step}, before its first checkpoint; start again with --overwrite"
            )
        return (
            f"interrupted at step {self.step}; continue with --resume from the checkpoint of step {saved[-1]}"
        )

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.checkpoints / f"step_{step:06d}"

    def saved_steps(self) -> list[int]:
        """Steps of this run with a checkpoint, ascending."""
        run = self._record.get("id")
        return [step for step, owner in _checkpoints(self.checkpoints).items() if owner and owner == run]

    def save(self, policy: Policy, step: int) -> None:
        """Write a checkpoint of this run and drop its oldest beyond `checkpointing.keep_top_k`."""
        target = self.checkpoint(step)
        with self.writing():
            shutil.rmtree(target, ignore_errors=True)
            policy.save(target, run=self._record["id"])
            for old in self.saved_steps()[: -self._config.checkpointing.keep_top_k]:
                shutil.rmtree(self.checkpoint(old))


def open_run_directory(
    config: Config, *, resume: bool = False, overwrite: bool = False, allow_changes: bool = False
) -> RunDirectory:
    """Decide whether a run may use its directory; nothing is written.

    Raises:
        ValueError: it holds another run, or one that these settings do not continue, or cannot be written to.
    """
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite starts it over: give one of them")
    path, checkpoints = config.logger.log_dir, config.checkpoint_dir
    for place in (path, checkpoints):
        _require_writable(place)
    record = _read(path / RUN_FILE)
    owners = _checkpoints(checkpoints)
    own = [step for step, owner in owners.items() if owner and owner == record.get("id")]
    if foreign := [step for step in owners if step not in own]:
        raise ValueError(
            f"{checkpoints} holds checkpoints of another run (steps {', '.join(map(str, foreign[:5]))}); choose "
            "another checkpointing.checkpoint_dir or logger.log_dir, or move them away"
        )
    if resume:
        if not own:
            raise ValueError(
                f"--resume: no checkpoint in {checkpoints}; start without --resume, or check checkpointing.*"
            )
        _require_same_settings(config, path, allow_changes=allow_changes)
        return RunDirectory(config, record=record, first_step=own[-1], resumed=True)
    steps = _steps(path / "metrics.jsonl")
    if (steps or own) and not overwrite:
        state = record.get("state", "state unknown")
        state = "killed, or still going" if state == "running" else state
        raise ValueError(
            f"{path} holds a run of {steps} steps ({state}"
            + (f", checkpoint of step {own[-1]}" if own else "")
            + "); continue it with --resume, delete it and start over with --overwrite, or choose another "
            "logger.log_dir"
        )
    return RunDirectory(config, record=record, first_step=0, resumed=False)


def _require_writable(path: Path) -> None:
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is not a directory; choose another logger.log_dir for {path}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{there} cannot be written to; choose another logger.log_dir for {path}")


def _require_same_settings(config: Config, path: Path, *, allow_changes: bool) -> None:
    before, now = _settings(path), _flat(config)
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    texts = {key: f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in changed}
    free = [key for key in changed if any(key == name or key.startswith(f"{name}.") for name in FREE_KEYS)]
    fixed = [texts[key] for key in changed if key not in free]
    for key in free:
        logger.info("resumed with %s", texts[key])
    if fixed and not allow_changes:
        raise ValueError(
            f"--resume: the run in {path} was started otherwise: {'; '.join(fixed)}. Give the same settings, or "
            "take the new ones on with --allow-changes"
        )
    for text in fixed:
        logger.warning("resumed with another %s", text)


def _settings(path: Path) -> dict[str, Any]:
    """The settings that the run had last, flat. A resumed run leaves the first file as it was and adds its own."""
    files = sorted(path.glob("config.step_*.yaml"))
    file = files[-1] if files else path / CONFIG_FILE
    try:
        return _flatten(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--resume: {file} cannot be read: {error}; restore it") from None


def _flat(config: Config) -> dict[str, Any]:
    return _flatten(yaml.safe_load(config.to_yaml()))


def _flatten(block: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(block, dict):
        return {prefix: block}
    return {
        key: value
        for name, inner in block.items()
        for key, value in _flatten(inner, f"{prefix}.{name}".lstrip(".")).items()
    }


def _checkpoints(folder: Path) -> dict[int, str | None]:
    """Step -> id of the run that saved it, ascending; half-written checkpoints never bear such a name."""
    if not folder.is_dir():
        return {}
    names = ((path, path.name.removeprefix("step_")) for path in folder.glob("step_*"))
    return dict(sorted((int(name), saved_by(path)) for path, name in names if name.isdigit()))


def _steps(metrics: Path) -> int:
    """Training steps that were written down."""
    if not metrics.is_file():
        return 0
    last = 0
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            last = max(last, int(json.loads(line)["step"]))
    return last


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
