# SPDX-License-Identifier: Apache-2.0
"""A configuration class as the Markdown table of its keys, for the pages under ``docs/``.

``python -m nemo_rl_ext.config.reference nemo_rl_ext.distill.config:DistillConfig`` prints it.
"""

import importlib
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nemo_rl_ext.config.faults import inner_block


def reference_table(root: type[BaseModel]) -> str:
    """Every key with its default and meaning, blocks as dotted prefixes, in the order of declaration."""
    rows = [
        f"| `{key}` | {_default(field)} | {' '.join((field.description or '').split()).replace('|', '&#124;')} |"
        for key, field in _leaves(root)
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _leaves(block: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in block.model_fields.items():
        inner = inner_block(field.annotation)
        if inner is None:
            yield prefix + name, field
        else:
            yield from _leaves(inner, f"{prefix}{name}.")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    others = [value for value in _choices(field.annotation) if value != default]
    return f"{_yaml(default)}{''.join(f' or {_yaml(value)}' for value in others)}"


def _choices(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return ()


def _yaml(value: Any) -> str:
    if isinstance(value, str | Path):
        return f"`{value}`"
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    print(reference_table(getattr(importlib.import_module(module), name)), end="")
