# SPDX-License-Identifier: Apache-2.0
"""Turns one pydantic fault into one line: where, which key, what was expected, what was found."""

import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from nemo_rl_ext.config.source import ConfigSource, DottedKey

_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "path_type": "a path",
}
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}


def explain_fault(fault: Mapping[str, Any], source: ConfigSource, root: type[BaseModel]) -> str:
    """One entry of ``ValidationError.errors()`` as one line."""
    key: DottedKey = tuple(fault["loc"])
    dotted = ".".join(map(str, key))
    where = source.origin(key)
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown key `{dotted}`{_suggest(key, root)}"
    if fault["type"] == "missing":
        description = _block_at(root, key[:-1]).model_fields[str(key[-1])].description
        return f"{where}: missing key `{dotted}`: {description}"
    if fault["type"] == "value_error":
        return f"{where}: {fault['ctx']['error']}"
    expected = _EXPECTED.get(fault["type"]) or re.sub(
        "^(Input should be|(List|String|Dictionary) should have) ", "", fault["msg"]
    )
    if fault["type"] == "model_type":
        expected = "a mapping with the keys " + ", ".join(_block_at(root, key).model_fields)
    return f"{where}: {dotted}: expected {expected}, found {_show(fault['input'])}"


def known_keys(block: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key below a block, sub-blocks before their fields, in declaration order."""
    for name, field in block.model_fields.items():
        yield prefix + name
        inner = inner_block(field.annotation)
        if inner is not None:
            yield from known_keys(inner, f"{prefix}{name}.")


def _suggest(key: DottedKey, root: type[BaseModel]) -> str:
    """The closest known key: a sibling with nearly this name, else the same name in another block."""
    block, name = _block_at(root, key[:-1]), str(key[-1])
    siblings = list(block.model_fields)
    close = difflib.get_close_matches(name, siblings, n=1)
    prefix = "".join(f"{part}." for part in key[:-1])
    hint: str | None
    if close:
        hint = prefix + close[0]
    else:
        by_leaf = {dotted.rpartition(".")[2]: dotted for dotted in known_keys(root)}
        same = difflib.get_close_matches(name, by_leaf, n=1, cutoff=0.8)
        hint = by_leaf[same[0]] if same else None
    where = f"`{prefix[:-1]}`" if prefix else "a configuration"
    question = f", did you mean `{hint}`?" if hint else ";"
    return f"{question} known keys of {where}: {', '.join(siblings)}"


def _block_at(root: type[BaseModel], key: DottedKey) -> type[BaseModel]:
    block = root
    for part in key:
        inner = inner_block(block.model_fields[str(part)].annotation)
        assert inner is not None, f"{part} of {key} is not a block"
        block = inner
    return block


def inner_block(annotation: Any) -> type[BaseModel] | None:
    """The block that a field of this type holds; None for a field that holds a value."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _show(value: Any) -> str:
    text = repr(value)
    kind = _KINDS.get(type(value), type(value).__name__)
    return f"{text[:77] + '...' if len(text) > 80 else text} ({kind})"
