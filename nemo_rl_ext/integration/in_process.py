# SPDX-License-Identifier: Apache-2.0
"""Binding NeMo-RL's names to something else in one process, and what a process that collects rollouts needs of it.

`install_in_process` runs in every process that receives one of this package's objects (the actor class, a row
processor, a rollout's record), each of which calls it when it is unpickled; no hook of Ray's is needed, and a process
that receives none of them is left alone.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from nemo_rl_ext.integration import reattach
from nemo_rl_ext.integration.probe import probe
from nemo_rl_ext.integration.processor_allowlists import extend_processor_names

_MARK = "_nemo_rl_ext_original"
_originals: list[tuple[Any, str, Any]] = []


def install_in_process() -> None:
    """Wrap what collects rollouts or loads rows; what the process has not imported, it does not use. Idempotent.

    Where NeMo-RL aligns media itself nothing is wrapped.

    Raises:
        UnknownNemoRLError: when NeMo-RL's code is not what the hooks know.
    """
    if not _originals and probe().in_tree:
        return
    _show_log()
    extend_processor_names()
    rollouts = sys.modules.get("nemo_rl.experience.rollouts")
    if rollouts is not None:
        wrap(rollouts, "_reattach_static_multimodal_payloads_to_result", reattach.reattach_respecting_marks)
        wrap(rollouts, "_postprocess_single_nemo_gym_group", reattach.group_with_metrics)
    manager = sys.modules.get("nemo_rl.experience.rollout_manager")
    if manager is not None:
        wrap(manager, "attach_static_multimodal_payload", reattach.attach_respecting_marks)


def driver_is_bound() -> bool:
    """Whether the NemoGym actor's class is bound in this process, which the launcher does before a script runs."""
    return any(name == "NemoGym" for _, name, _ in _originals)


def uninstall() -> None:
    """Give every name its original back; for tests and notebooks."""
    while _originals:
        owner, name, original = _originals.pop()
        _set(owner, name, original)


def wrap(module: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of a module by what `make` makes of it, once."""
    current = getattr(module, name)
    if not is_wrapped(current):
        replacement = functools.wraps(current)(make(current))
        setattr(replacement, _MARK, current)
        bind(module, name, replacement)


def is_wrapped(function: Any) -> bool:
    """Whether a function is one of this package's replacements."""
    return hasattr(function, _MARK)


def bind(owner: Any, name: str, value: Any) -> None:
    """Bind an attribute of a module, or a key of a registry, and remember what was there."""
    _originals.append((owner, name, owner.get(name) if isinstance(owner, dict) else getattr(owner, name)))
    _set(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    if not isinstance(owner, dict):
        setattr(owner, name, value)
    elif value is None:
        owner.pop(name, None)
    else:
        owner[name] = value


def _show_log() -> None:
    """Let this package's start-up lines be seen in Ray's workers, which show warnings at most."""
    ours = logging.getLogger("nemo_rl_ext")
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)
    if not ours.isEnabledFor(logging.INFO):
        ours.setLevel(logging.INFO)
