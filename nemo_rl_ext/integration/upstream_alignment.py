# SPDX-License-Identifier: Apache-2.0
"""What a NeMo-RL does of this package's work itself, recognised in its code: identifiers and parameters, not text."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from nemo_rl_ext.integration.upstream_contract import ATTACHING

Trees = Callable[[str], ast.Module | None]
"""A module's syntax tree by its dotted name; None for a module that does not exist."""

_MARKER = "ROLLOUT_MATCHED_MEDIA_KEY"
_MARKED_MODULES = (
    "nemo_rl.environments.nemo_gym",
    "nemo_rl.experience.rollouts",
    "nemo_rl.data.multimodal_utils",
)
_RUN_WORDS = ("placeholder", "run_lengths", "media_runs", "image_runs", "tile_counts")


@dataclass(frozen=True, kw_only=True)
class UpstreamAlignment:
    """`aligns`: evidence that NeMo-RL fits media to rollouts itself. `beside`: what it does that this package needs
    not stand aside for, and what is left to do."""

    aligns: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


def find_upstream_alignment(trees: Trees) -> UpstreamAlignment:
    """Look for the shapes in which NeMo-RL's own alignment was proposed."""
    aligns = [
        f"{module} uses {_MARKER}" for module in _MARKED_MODULES if _MARKER in identifiers(trees(module))
    ]
    for module, name in ATTACHING:
        node = function(trees(module), name)
        found = (
            [word for word in parameters(node) if any(part in word for part in _RUN_WORDS)] if node else []
        )
        aligns += [f"{module}.{name} takes {word}" for word in found]
    beside = []
    static = function(trees("nemo_rl.experience.rollouts"), "attach_static_multimodal_payload")
    if static is not None and "tokenizer" in parameters(static):
        beside.append(
            "attach_static_multimodal_payload takes a tokenizer, by which NeMo-RL compares fixed tiles; images of "
            "dynamic resolution are aligned here"
        )
    if trees("nemo_rl.data.captured_media") is not None:
        beside.append(
            "nemo_rl.data.captured_media carries the engine's processed media in the single controller; rollouts "
            "without it are aligned here"
        )
    return UpstreamAlignment(aligns=tuple(aligns), beside=tuple(beside))


def identifiers(tree: ast.AST | None) -> set[str]:
    """Names that code uses, assigns or imports; nothing in strings and comments."""
    used: set[str] = set()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.alias):
            used.add(node.name.rpartition(".")[2])
    return used


def function(tree: ast.Module | None, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """A function, or `Class.method`, of a module."""
    body: list[ast.stmt] = tree.body if tree is not None else []
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        body = getattr(found, "body", [])
    return found if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) else None


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, bool]:
    """Parameter names in order, and whether each has a default."""
    positional = [*node.args.posonlyargs, *node.args.args]
    num_required = len(positional) - len(node.args.defaults)
    found = {argument.arg: index >= num_required for index, argument in enumerate(positional)}
    keyword = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return found | {argument.arg: default is not None for argument, default in keyword}
