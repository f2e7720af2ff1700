# SPDX-License-Identifier: Apache-2.0
"""Policy parameters and optimizer state on disk: safetensors and JSON, no pickles."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

_FORMAT = 1
_PARAMETERS = "policy.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_META = "policy.json"
_HYPERPARAMETERS = ("lr", "weight_decay", "eps", "betas")


def save_policy_state(
    path: Path,
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    run: str | None = None,
) -> None:
    """Write `parameters` and the state of `optimizer`, which holds them in the same order, to new `path`.

    `run` is the id of the run that it belongs to, which `saved_by` reads.

    Raises ValueError when `path` exists and is not empty.
    """
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} exists and is not empty; policy state is only written to a new directory")
    names = list(parameters)
    saved = optimizer.state_dict()
    state = {
        f"{key}/{names[index]}": value.contiguous()
        for index, entry in saved["state"].items()
        for key, value in entry.items()
    }
    group = saved["param_groups"][0]
    hyperparameters = {key: group[key] for key in _HYPERPARAMETERS}
    meta = {"format": _FORMAT, "run": run, "optimizer": hyperparameters, "parameters": names}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        values = {name: value.detach().contiguous() for name, value in parameters.items()}
        save_file(values, scratch / _PARAMETERS)
        save_file(state, scratch / _OPTIMIZER)
        (scratch / _META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        scratch.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def saved_by(path: Path) -> str | None:
    """The id of the run that wrote the state at `path`; None where it names none."""
    try:
        run = json.loads((path / _META).read_text(encoding="utf-8")).get("run")
    except (OSError, ValueError, AttributeError):
        return None
    return run if isinstance(run, str) else None


@torch.no_grad()
def load_policy_state(
    path: Path, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Copy the state at `path` into `parameters` and `optimizer`; its learning rate and betas stay.

    Raises ValueError when a file is missing or broken, or a name or shape differs; nothing changes then.
    """
    try:
        meta = json.loads((path / _META).read_text(encoding="utf-8"))
        values = load_file(path / _PARAMETERS)
        state = load_file(path / _OPTIMIZER)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a saved policy: {error}") from error
    if meta.get("format") != _FORMAT:
        raise ValueError(f"{path / _META}: expected format {_FORMAT}, found {meta.get('format')!r}")
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    found = {name: tuple(value.shape) for name, value in values.items()}
    if shapes != found:
        names = shapes.keys() | found.keys()
        differing = sorted(name for name in names if shapes.get(name) != found.get(name))
        raise ValueError(
            f"{path} was saved by another model: {len(differing)} parameters differ, first {differing[0]!r} "
            f"(expected shape {shapes.get(differing[0])}, found {found.get(differing[0])})"
        )
    entries: dict[int, dict[str, torch.Tensor]] = {}
    index = {name: i for i, name in enumerate(parameters)}
    for key, value in state.items():
        kind, _, name = key.partition("/")
        if name not in index:
            raise ValueError(f"{path / _OPTIMIZER}: state {key!r} belongs to no parameter")
        entries.setdefault(index[name], {})[kind] = value
    for name, value in parameters.items():
        value.copy_(values[name])
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
