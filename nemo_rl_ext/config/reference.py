# SPDX-License-Identifier: Apache-2.0
"""A configuration class as the Markdown table of its keys, for the pages under ``docs/``.

``python -m nemo_rl_ext.config.reference`` prints docs/configuration.md, and with the name of a class, such as
``nemo_rl_ext.distill.config:DistillConfig``, that class's table alone.
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

PAGE = (
    (
        "nemo-rl-ext grpo",
        "nemo_rl_ext.grpo.config:Config",
        "The embedded run. `nemo-rl-ext grpo --print-config` prints the settings of a run, defaults included; "
        "`key=value` on the command line overrides the file.",
    ),
    (
        "Inside NeMo-RL",
        "nemo_rl_ext.config.media_alignment:MediaAlignmentConfig",
        "The block `grpo.media_alignment` of a NeMo-RL recipe, the same as the embedded run's; a key that one side "
        "cannot have says so when it is used. All other keys of a recipe are NeMo-RL's own ([nemo_rl.md](nemo_rl.md)).",
    ),
    (
        "nemo-rl-ext distill",
        "nemo_rl_ext.distill.config:DistillConfig",
        "SFT-masked distillation ([distill.md](distill.md)).",
    ),
)
"""Heading, class and introduction of each part of the page."""


def configuration_page() -> str:
    """docs/configuration.md: every key of every configuration."""
    parts = [
        "# Configuration\n\nWritten from the code: `python -m nemo_rl_ext.config.reference > docs/configuration.md`. "
        "An unknown key is an error that lists the known ones, with file and line.\n"
    ]
    for heading, name, about in PAGE:
        parts.append(f"## {heading}\n\n{about}\n\n{reference_table(_named(name))}")
    return "\n".join(parts)


def _named(name: str) -> type[BaseModel]:
    module, _, attribute = name.partition(":")
    found: type[BaseModel] = getattr(importlib.import_module(module), attribute)
    return found


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
    print(reference_table(_named(sys.argv[1])) if sys.argv[1:] else configuration_page(), end="")
