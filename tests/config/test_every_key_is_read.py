# SPDX-License-Identifier: Apache-2.0
"""No accepted configuration key does nothing: each is read, through its block's type, by code that is no validator.

Types are followed through annotations, assignments, fields, properties and return values, so that a field of the same
name elsewhere does not count.
"""

from __future__ import annotations

import ast
import importlib
import typing
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from nemo_rl_ext.config.block import Block
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.distill.config import DistillConfig
from nemo_rl_ext.grpo.config import Config

PACKAGE = Path(importlib.import_module("nemo_rl_ext").__file__).parent
ROOTS = (Config, DistillConfig, MediaAlignmentConfig)
VALIDATORS = {"model_validator", "field_validator", "field_serializer"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def blocks() -> set[type[Block]]:
    found: set[type[Block]] = set()

    def walk(block: type[Block]) -> None:
        if block not in found:
            found.add(block)
            for field in block.model_fields.values():
                for part in (field.annotation, *typing.get_args(field.annotation)):
                    if isinstance(part, type) and issubclass(part, Block):
                        walk(part)

    for root in ROOTS:
        walk(root)
    return found


def qualified(block: type) -> str:
    return f"{block.__module__}.{block.__qualname__}"


class Package:
    """What every module of the package defines, by qualified name."""

    def __init__(self) -> None:
        self.modules: dict[str, ast.Module] = {}
        for path in sorted(PACKAGE.rglob("*.py")):
            parts = ("nemo_rl_ext", *path.relative_to(PACKAGE).with_suffix("").parts)
            name = ".".join(parts).removesuffix(".__init__")
            self.modules[name] = ast.parse(path.read_text(encoding="utf-8"))
        self.names = {name: self._names(name, tree) for name, tree in self.modules.items()}
        self.classes: dict[str, tuple[str, ast.ClassDef]] = {}
        self.functions: dict[str, tuple[str, Function]] = {}
        for name, tree in self.modules.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self.classes[f"{name}.{node.name}"] = name, node
                elif isinstance(node, Function):
                    self.functions[f"{name}.{node.name}"] = name, node
        self.attributes = {name: self._attributes(*entry) for name, entry in self.classes.items()}

    @staticmethod
    def _names(module: str, tree: ast.Module) -> dict[str, str]:
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ClassDef | Function):
                names.setdefault(node.name, f"{module}.{node.name}")
        return names

    def annotated(self, module: str, annotation: ast.expr | None) -> str | None:
        """The one class of ours that an annotation names, `X | None` and `Sequence[X]` included."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Name) and (name := self.names[module].get(node.id)) in self.classes:
                return name
        return None

    def _attributes(self, module: str, node: ast.ClassDef) -> dict[str, str]:
        """Types of a class's attributes: fields, properties, and what `__init__` keeps of its parameters."""
        found: dict[str, str | None] = {}
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                found[item.target.id] = self.annotated(module, item.annotation)
            elif isinstance(item, Function):
                found[item.name] = self.annotated(module, item.returns)
                arguments = {a.arg: a.annotation for a in (*item.args.args, *item.args.kwonlyargs)}
                for line in ast.walk(item):
                    if isinstance(line, ast.Assign):
                        pairs = zip(*map(_elements, (line.targets[0], line.value)), strict=False)
                        for target, value in pairs:
                            if isinstance(target, ast.Attribute) and isinstance(value, ast.Name):
                                kind = self.annotated(module, arguments.get(value.id))
                                if kind is not None:
                                    found.setdefault(target.attr, kind)
        return {name: kind for name, kind in found.items() if kind is not None}

    def attribute(self, owner: str, name: str) -> str | None:
        for base in self.lineage(owner):
            if name in self.attributes[base]:
                return self.attributes[base][name]
        return None

    def attributes_of(self, owner: str) -> list[str]:
        fields = (item for base in self.lineage(owner) for item in self.classes[base][1].body)
        return [item.target.id for item in fields if isinstance(item, ast.AnnAssign)]

    def lineage(self, owner: str) -> list[str]:
        module, node = self.classes[owner]
        bases = [self.names[module].get(base.id) for base in node.bases if isinstance(base, ast.Name)]
        return [owner, *(up for base in bases if base in self.classes for up in self.lineage(base))]


def _elements(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class Reads(ast.NodeVisitor):
    """Notes `(class, attribute)` of every attribute that one function reads."""

    def __init__(
        self, package: Package, module: str, reads: dict[str, set[str]], known: dict[str, str]
    ) -> None:
        self.package, self.module, self.reads, self.known = package, module, reads, dict(known)

    def kind(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.kind(node.value)
            return self.package.attribute(owner, node.attr) if owner else None
        if isinstance(node, ast.Call):
            name = (
                self.package.names[self.module].get(node.func.id) if isinstance(node.func, ast.Name) else None
            )
            if name in self.package.classes:
                return name
            if name in self.package.functions:
                module, function = self.package.functions[name]
                return self.package.annotated(module, function.returns)
            return self.kind(node.func)
        if isinstance(node, ast.BoolOp):
            return next(filter(None, map(self.kind, node.values)), None)
        return None

    def visit_FunctionDef(self, node: Function) -> None:
        decorators = {
            part.id for item in node.decorator_list for part in ast.walk(item) if isinstance(part, ast.Name)
        }
        if decorators & VALIDATORS:
            return
        inner = Reads(self.package, self.module, self.reads, self.known)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            if (kind := self.package.annotated(self.module, argument.annotation)) is not None:
                inner.known[argument.arg] = kind
        for statement in node.body:
            inner.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        inner = Reads(
            self.package, self.module, self.reads, self.known | {"self": f"{self.module}.{node.name}"}
        )
        for statement in node.body:
            inner.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target, value in zip(*map(_elements, (node.targets[0], node.value)), strict=False):
            if isinstance(target, ast.Name) and (kind := self.kind(value)) is not None:
                self.known[target.id] = kind

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and (
            kind := self.package.annotated(self.module, node.annotation)
        ):
            self.known[node.target.id] = kind

    def visit_Call(self, node: ast.Call) -> None:
        """A block that is handed over whole to a library or a function, as keyword arguments, is read whole."""
        self.generic_visit(node)
        if self.kind(node.func) is None and (name := _name(node.func)) not in ("safe_dump", "dumps"):
            into = self.package.names[self.module].get(name)
            for value in (keyword.value for keyword in node.keywords if into not in self.package.classes):
                if isinstance(value, ast.Call) and _name(value.func) == "model_dump":
                    if isinstance(value.func, ast.Attribute) and (kind := self.kind(value.func.value)):
                        self.reads[kind] |= set(self.package.attributes_of(kind))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owner = self.kind(node.value)
        if owner is not None and isinstance(node.ctx, ast.Load):
            self.reads[owner].add(node.attr)


@cache
def reads() -> dict[str, set[str]]:
    """The attributes that the package reads of each of its classes; what is read of a class counts for its bases."""
    package, found = Package(), defaultdict(set)
    for module, tree in package.modules.items():
        Reads(package, module, found, {}).visit(tree)
    merged = defaultdict(set)
    for owner, names in found.items():
        for base in package.lineage(owner):
            merged[base] |= names
    return merged


@pytest.mark.parametrize("block", sorted(blocks(), key=qualified), ids=qualified)
def test_every_key_is_read(block):
    assert sorted(set(block.model_fields) - reads()[qualified(block)]) == []


def test_a_key_that_only_a_validator_reads_or_another_class_has_is_found(monkeypatch):
    source = """
from nemo_rl_ext.config.block import Block

class Inner(Block):
    used: int
    dead: int
    checked: int

    @model_validator(mode="after")
    def _check(self):
        if self.checked < 0:
            raise ValueError

class Outer(Block):
    inner: Inner

class Row:
    dead: int

class Whole(Block):
    key: int

def run(config: Outer, row: Row, whole: Whole):
    inner = config.inner
    library(**whole.model_dump())
    return inner.used + row.dead + len(safe_dump(config.model_dump()))
"""
    package, found = Package(), defaultdict(set)
    monkeypatch.setitem(package.modules, "probe", ast.parse(source))
    package.names["probe"] = package._names("probe", package.modules["probe"])
    for node in package.modules["probe"].body:
        if isinstance(node, ast.ClassDef):
            package.classes[f"probe.{node.name}"] = "probe", node
    for name in ("Inner", "Outer", "Row", "Whole"):
        package.attributes[f"probe.{name}"] = package._attributes(*package.classes[f"probe.{name}"])
    Reads(package, "probe", found, {}).visit(package.modules["probe"])
    found = {name: names - {"model_dump"} for name, names in found.items()}
    assert found == {
        "probe.Outer": {"inner"},
        "probe.Inner": {"used"},
        "probe.Row": {"dead"},
        "probe.Whole": {"key"},
    }
