# SPDX-License-Identifier: Apache-2.0
"""A user's own reward function, named in `env.reward_function`."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from nemo_rl_ext.manifest.rows import ManifestRow

RewardFunction = Callable[[str, Mapping[str, Any]], float]
"""`reward(text, metadata)`: a rollout's last answer, and the row's `verifier_metadata`."""


def load_reward_function(name: str) -> RewardFunction:
    """The function that `module:function` or `path/to/file.py:function` names.

    Raises:
        ValueError: naming the key, what was expected, and what was found.
    """
    where = "env.reward_function"
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name.isidentifier():
        raise ValueError(
            f"{where}: expected module:function or path/to/file.py:function, found {name!r}, as in "
            "rewards.py:exact_match"
        )
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
    except Exception as error:
        raise ValueError(
            f"{where}: {module_name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        public = sorted(
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        )
        raise ValueError(
            f"{where}: {module_name} has no function {function_name!r}; it has {', '.join(public) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file; relative paths start in {Path.cwd()}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> Any:
    return importlib.import_module(name)


def checked_reward(function: RewardFunction, name: str) -> Callable[[ManifestRow, str], float]:
    """The function as the run calls it: one finite number per rollout, or an error that names function and row."""

    def reward(row: ManifestRow, text: str) -> float:
        try:
            value = function(text, row.verifier_metadata)
        except Exception as error:
            raise ValueError(
                f"env.reward_function {name} raised {type(error).__name__} for row {row.row_id!r} ({row.where}): "
                f"{error}"
            ) from error
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(
                f"env.reward_function {name}: expected one finite number for row {row.row_id!r} ({row.where}), found "
                f"{value!r}"
            )
        return float(value)

    return reward
