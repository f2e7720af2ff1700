# SPDX-License-Identifier: Apache-2.0
"""Is this the NeMo-RL that the hooks were written for? Answered from its source text; nothing of it is imported."""

from __future__ import annotations

import ast
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nemo_rl_ext.integration.upstream_alignment import (
    find_upstream_alignment,
    function,
    identifiers,
    parameters,
)
from nemo_rl_ext.integration.upstream_contract import ATTACHING, KNOWN_COMMIT, NAMES, TARGETS, Target

logger = logging.getLogger(__name__)


class UnknownNemoRLError(ValueError):
    """NeMo-RL is missing, or is not what the hooks know; one string that names the first difference."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was found: NeMo-RL's directory, the version that it writes about itself, and what it does itself.

    With `in_tree` this package stands aside; `beside` says what NeMo-RL does that leaves work to it.
    """

    root: Path
    version: str
    in_tree: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


def probe(root: Path | None = None) -> Probe:
    """Look for alignment of NeMo-RL's own, then check every target against its source.

    Args:
        root: the directory of the package `nemo_rl`; found on the import path when None.

    Raises:
        UnknownNemoRLError: naming the first difference and what to do.
    """
    root = root or find_root()
    upstream = find_upstream_alignment(lambda module: _tree(root, module, missing_ok=True))
    if not upstream.aligns:
        _require_gym_images(root)
        for target in TARGETS:
            _check(target, root)
        for module, names in NAMES.items():
            _check_names(module, names, root)
    return Probe(root=root, version=_version(root), in_tree=upstream.aligns, beside=upstream.beside)


def _require_gym_images(root: Path) -> None:
    module, name = ATTACHING[0]
    if function(_tree(root, module, missing_ok=True), name) is None:
        raise UnknownNemoRLError(
            f"NeMo-RL in {root} sends no images through NeMo-Gym (it has no {module}.{name}), so that there is nothing "
            "to align: its releases up to v0.7.0 do not, its main branch does since August 2026, whatever version it "
            f"writes about itself ({_version(root)} here); {_ADVICE}"
        )


def find_root() -> Path:
    """The directory of the package `nemo_rl`, without importing it."""
    spec = importlib.util.find_spec("nemo_rl")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        raise UnknownNemoRLError(
            "NeMo-RL is not on the import path; put the directory that holds `nemo_rl` on PYTHONPATH, "
            "or run with the environment that NeMo-RL is installed in"
        )
    return Path(locations[0])


_ADVICE = (
    f"these hooks were written against NeMo-RL {KNOWN_COMMIT}; use that version or a release of nemo-rl-ext that "
    "knows yours, or remove grpo.media_alignment to run without them"
)


def _check_names(module: str, names: tuple[str, ...], root: Path) -> None:
    bound: set[str] = set()
    for node in _body(root, module):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
    missing = [name for name in names if name not in bound]
    if missing:
        raise UnknownNemoRLError(f"{module} in {root} does not have {', '.join(missing)}; {_ADVICE}")


def _check(target: Target, root: Path) -> None:
    where = f"{target.module}.{target.name}"
    node = function(_tree(root, target.module), target.name)
    if node is None:
        raise UnknownNemoRLError(f"NeMo-RL in {root} has no {where}, which {target.used_by} needs; {_ADVICE}")
    found = parameters(node)
    shared = tuple(name for name in found if name in target.parameters)
    added = [name for name, has_default in found.items() if name not in target.parameters and not has_default]
    if shared != target.parameters or (added and not target.forwarding):
        raise UnknownNemoRLError(
            f"{where} in {root} takes ({', '.join(found)}), expected ({', '.join(target.parameters)}) and nothing else "
            f"without a default; {_ADVICE}"
        )
    if isinstance(node, ast.AsyncFunctionDef) != target.is_async:
        kind = "a coroutine" if target.is_async else "a plain function"
        raise UnknownNemoRLError(f"{where} in {root} is not {kind}; {_ADVICE}")
    used = identifiers(node) | {
        item.value
        for item in ast.walk(node)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }
    used |= {item.arg for item in ast.walk(node) if isinstance(item, ast.keyword) and item.arg}
    missing = [name for name in target.mentions if name not in used]
    if missing:
        raise UnknownNemoRLError(f"{where} in {root} does not use {', '.join(missing)}; {_ADVICE}")
    awaited = {item.value for item in ast.walk(node) if isinstance(item, ast.Await)}
    plain = {
        getattr(item.func, "id", getattr(item.func, "attr", ""))
        for item in ast.walk(node)
        if isinstance(item, ast.Call) and item not in awaited
    }
    missing = [name for name in target.plain_calls if name not in plain]
    if missing:
        raise UnknownNemoRLError(f"{where} in {root} does not call {', '.join(missing)} directly; {_ADVICE}")


def _body(root: Path, module: str) -> list[ast.stmt]:
    tree = _tree(root, module)
    return tree.body if tree is not None else []


@cache
def _tree(root: Path, module: str, *, missing_ok: bool = False) -> ast.Module | None:
    path = root.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except OSError:
        if missing_ok:
            return None
        raise UnknownNemoRLError(
            f"NeMo-RL in {root} has no {path.relative_to(root.parent)}; {_ADVICE}"
        ) from None


def _version(root: Path) -> str:
    """MAJOR.MINOR.PATCH of `package_info.py`, which is the same for many commits; the targets above are not."""
    values: dict[str, object] = {}
    for node in _body(root, "nemo_rl.package_info"):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return ".".join(str(values.get(name, "?")) for name in ("MAJOR", "MINOR", "PATCH"))
