# SPDX-License-Identifier: Apache-2.0
"""Is this the NeMo-RL that the hooks were written for? Answered from its source text; nothing of it is imported."""

from __future__ import annotations

import ast
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nemo_rl_ext.integration.upstream_contract import IN_TREE_MARKERS, KNOWN_COMMIT, NAMES, TARGETS, Target

logger = logging.getLogger(__name__)


class UnknownNemoRLError(ValueError):
    """NeMo-RL is missing, or is not what the hooks know; one string that names the first difference."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was found: NeMo-RL's directory and version, and what it already does itself."""

    root: Path
    version: str
    in_tree: tuple[str, ...] = ()


def probe(root: Path | None = None) -> Probe:
    """Check every target against NeMo-RL's source.

    Args:
        root: the directory of the package `nemo_rl`; found on the import path when None.

    Raises:
        UnknownNemoRLError: naming the first difference and what to do.
    """
    root = root or find_root()
    for target in TARGETS:
        _check(target, root)
    for module, names in NAMES.items():
        _check_names(module, names, root)
    texts = [
        _text(root, module) for module in ("nemo_rl.environments.nemo_gym", "nemo_rl.experience.rollouts")
    ]
    in_tree = tuple(marker for marker in IN_TREE_MARKERS if any(marker in text for text in texts))
    return Probe(root=root, version=_version(root), in_tree=in_tree)


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
    for node in _tree(root, module).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
    missing = [name for name in names if name not in bound]
    if missing:
        raise UnknownNemoRLError(f"{module} in {root} no longer has {', '.join(missing)}; {_ADVICE}")


def _check(target: Target, root: Path) -> None:
    where = f"{target.module}.{target.name}"
    node = _find(_tree(root, target.module), target.name)
    if node is None:
        raise UnknownNemoRLError(f"NeMo-RL in {root} has no {where}, which {target.used_by} needs; {_ADVICE}")
    found = tuple(
        argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    )
    if found != target.parameters:
        raise UnknownNemoRLError(
            f"{where} in {root} takes ({', '.join(found)}), expected ({', '.join(target.parameters)}); {_ADVICE}"
        )
    used = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    used |= {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
    used |= {item.arg for item in ast.walk(node) if isinstance(item, ast.keyword) and item.arg}
    used |= {
        item.value
        for item in ast.walk(node)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }
    missing = [name for name in target.mentions if name not in used]
    if missing:
        raise UnknownNemoRLError(f"{where} in {root} no longer uses {', '.join(missing)}; {_ADVICE}")


def _find(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    body: list[ast.stmt] = tree.body
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if found is None:
            return None
        body = getattr(found, "body", [])
    return found if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) else None


@cache
def _text(root: Path, module: str) -> str:
    path = root.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        raise UnknownNemoRLError(
            f"NeMo-RL in {root} has no {path.relative_to(root.parent)}; these hooks were written against "
            f"{KNOWN_COMMIT}"
        ) from None


@cache
def _tree(root: Path, module: str) -> ast.Module:
    return ast.parse(_text(root, module))


def _version(root: Path) -> str:
    """MAJOR.MINOR.PATCH of `package_info.py`, which is the same for many commits; the targets above are not."""
    values: dict[str, object] = {}
    for node in _tree(root, "nemo_rl.package_info").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return ".".join(str(values.get(name, "?")) for name in ("MAJOR", "MINOR", "PATCH"))
