# SPDX-License-Identifier: Apache-2.0
"""Merge YAML files, their ``defaults:`` parents and command-line overrides, remembering each key's origin."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

DottedKey = tuple[str | int, ...]
Layer = dict[DottedKey, str]


class ConfigError(ValueError):
    """A fault in a configuration file or override; one line per fault."""


@dataclass(frozen=True, kw_only=True)
class ConfigSource:
    """Merged plain values, and where each was written.

    ``layers`` are the merged sources, weakest first: for each the label of any key that it sets.
    """

    values: dict[str, Any]
    layers: tuple[Layer, ...]

    def origin(self, key: DottedKey) -> str:
        """``file:line`` or the override that set this key, else its nearest parent that was set anywhere."""
        for end in range(len(key), -1, -1):
            for layer in reversed(self.layers):
                if key[:end] in layer:
                    return layer[key[:end]]
        raise AssertionError("every file labels the empty key")


def load_sources(path: str | Path, overrides: Sequence[str] = ()) -> ConfigSource:
    """Merge a file over its ``defaults:`` parents, then ``key=value`` or ``++key=value`` overrides in order.

    ``defaults:`` is a path or a list of paths, relative to the file that names them; later ones win.
    """
    merged: Any = OmegaConf.create()
    layers: list[Layer] = []
    for tree, layer in [*_read_with_parents(Path(path), ()), *map(_read_override, overrides)]:
        try:
            merged = OmegaConf.merge(merged, tree)
        except (TypeError, OmegaConfBaseException) as error:
            message = f"{layer[()]}: cannot be merged over what it inherits: {_first_line(error)}"
            raise ConfigError(message) from None
        layers.append(layer)
    values = _resolve(merged, layers)
    return ConfigSource(values=values, layers=tuple(layers))


def _resolve(merged: DictConfig, layers: list[Layer]) -> dict[str, Any]:
    try:
        return plain(merged, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = tuple((error.full_key or "").split("."))
        origin = ConfigSource(values={}, layers=tuple(layers)).origin(key)
        raise ConfigError(f"{origin}: {error.full_key}: {_first_line(error)}") from None


def plain(tree: DictConfig, *, throw_on_missing: bool = False) -> dict[str, Any]:
    """A mapping as plain dicts, lists and values, interpolations resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True, throw_on_missing=throw_on_missing))


def _read_with_parents(path: Path, children: tuple[Path, ...]) -> list[tuple[DictConfig, Layer]]:
    named_by = f" (named by `defaults` in {children[-1]})" if children else ""
    if path.resolve() in [child.resolve() for child in children]:
        chain = " -> ".join(str(file) for file in (*children, path))
        raise ConfigError(f"{path}: `defaults` form a circle: {chain}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file{named_by}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a YAML file, found a directory{named_by}") from None
    except UnicodeDecodeError as error:
        message = f"{path}: expected UTF-8 text, found another byte at offset {error.start}{named_by}"
        raise ConfigError(message) from None
    tree, layer = _parse(text, path)
    parents = tree.pop("defaults", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not OmegaConf.is_list(parents) and not isinstance(parents, list):
        raise ConfigError(f"{layer[('defaults',)]}: defaults: expected a path or a list of paths")
    sources = []
    for parent in parents:
        if not isinstance(parent, str):
            raise ConfigError(f"{layer[('defaults',)]}: defaults: expected a path, found {parent!r}")
        sources += _read_with_parents(path.parent / parent, (*children, path))
    return [*sources, (tree, layer)]


def _parse(text: str, path: Path) -> tuple[DictConfig, Layer]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = cast(
            DictConfig, OmegaConf.create(text)
        )  # its loader reads 1e-3 as a number and refuses duplicate keys
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML: {_first_line(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: blocks or lists are nested too deeply to be a configuration") from None
    if root is None:
        raise ConfigError(
            f"{path}: is empty; expected blocks such as `policy:`, as in configs/embedded_async.yaml"
        )
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ConfigError(f"{path}: expected a mapping of blocks such as `grpo:` at the top, found {kind}")
    layer: Layer = {(): str(path)}
    _label_lines(root, (), str(path), layer)
    return tree, layer


def _label_lines(node: yaml.Node, key: DottedKey, path: str, layer: Layer) -> None:
    if isinstance(node, yaml.MappingNode):
        children = [(name.value, name, child) for name, child in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, child, child) for index, child in enumerate(node.value)]
    else:
        return
    for name, marked, child in children:
        layer[(*key, name)] = f"{path}:{marked.start_mark.line + 1}"
        _label_lines(child, (*key, name), path, layer)


def _read_override(text: str) -> tuple[DictConfig, Layer]:
    shown = text if len(text) <= 80 else text[:77] + "..."
    label = f"override '{shown}'"
    name, equals, value = text.removeprefix("++").partition("=")
    parts = tuple(name.split("."))
    if not equals or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{label}: expected key=value or ++key=value with a dotted key such as grpo.seed=1")
    try:
        tree = OmegaConf.from_dotlist([f"{name}={value}"])
    except RecursionError:
        raise ConfigError(f"{label}: the value is nested too deeply") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{label}: the value is not valid YAML: {_first_line(error)}") from None
    return tree, {(): label, **{parts[: end + 1]: label for end in range(len(parts))}}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
