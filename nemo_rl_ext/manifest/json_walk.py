# SPDX-License-Identifier: Apache-2.0
"""JSON read as it stands, repeated keys, any depth and all, and walked text by text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

try:
    import msgspec
except ImportError:  # only speed is lost: every line then goes through `json.loads`
    msgspec = None  # type: ignore[assignment]

_ID_FIELDS = ("id", "example_id", "row_id", "uid", "uuid", "_id", "task_id", "index")
# Parts of a message that hold other than text.
_NO_TEXT = re.compile(r"image|video|audio|file", re.IGNORECASE)
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


class Pairs(list[Any]):
    """A JSON object as (key, value) pairs: repeated keys all stay."""


def parse(text: str | bytes) -> Any:
    """`json.loads` that keeps repeated keys and survives any depth.

    Raises:
        ValueError: when the text is not JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=Pairs)
    except RecursionError:
        return _parse_deep(text.decode() if isinstance(text, bytes) else text)


def _parse_deep(text: str) -> Any:
    """The same without recursion, for nesting deeper than the interpreter's stack. Checks less: brackets, strings
    and scalars must be well formed, the order of commas and colons is not judged."""
    root: list[Any] = []
    stack: list[tuple[Any, Any]] = [(root, None)]
    position = 0
    while match := _JSON_TOKEN.search(text, position):
        position, token = match.end(), match.group()
        container, key = stack[-1]
        if token in ",:":
            if token == "," and isinstance(container, Pairs):
                stack[-1] = (container, None)
            continue
        if token in "}]":
            if len(stack) == 1 or isinstance(container, Pairs) is not (token == "}"):
                raise ValueError(f"unbalanced {token!r} at character {match.start()}")
            stack.pop()
            continue
        value = Pairs() if token == "{" else [] if token == "[" else json.loads(token)
        if isinstance(container, Pairs) and key is None:
            stack[-1] = (container, value)
            continue
        container.append((key, value) if isinstance(container, Pairs) else value)
        if token in "{[":
            stack.append((value, None))
    if len(stack) != 1 or len(root) != 1:
        raise ValueError("unbalanced brackets")
    return root[0]


def strings(row: Any) -> Iterator[tuple[Any, str]]:
    """(link, text) of every string and every key of a parsed row, in document order, without recursion.

    `field_path(link)` spells the place out; links to the parents cost less than a path per string.
    """
    stack: list[tuple[Any, Any]] = [(row, None)]
    while stack:
        value, link = stack.pop()
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                continue  # a picture, say
        if isinstance(value, str):
            yield link, value
        elif isinstance(value, (Pairs, dict)):
            pairs = list(value.items()) if isinstance(value, dict) else value
            for key, child in reversed(pairs):
                if isinstance(child, (str, bytes, list, dict, tuple)):
                    stack.append((child, (link, key)))
                if isinstance(key, str):
                    stack.append((key, (link, _Key(key))))
        elif isinstance(value, (list, tuple)):
            stack.extend((value[i], (link, i)) for i in range(len(value) - 1, -1, -1))


def text_runs(row: Any) -> Iterator[tuple[Any, list[str]]]:
    """(link of the first, texts) of neighbouring text parts, which a chat template may join: objects with a `text`,
    and plain strings of a list named `content`. Another part between two of them keeps them apart."""
    stack: list[tuple[Any, Any]] = [(row, None)]
    while stack:
        value, link = stack.pop()
        if isinstance(value, (Pairs, dict)):
            pairs = list(value.items()) if isinstance(value, dict) else value
            stack.extend(
                (child, (link, key)) for key, child in pairs if isinstance(child, (list, dict, tuple))
            )
        elif isinstance(value, (list, tuple)):
            plain = link is not None and link[1] in ("content", "text")
            run: list[tuple[Any, str]] = []
            for index, item in enumerate(value):
                if isinstance(item, (list, dict, tuple)):
                    stack.append((item, (link, index)))
                if (part := _text_of(item, (link, index), plain)) is not None:
                    run.append(part)
                    continue
                if len(run) > 1:
                    yield run[0][0], [text for _, text in run]
                run = []
            if len(run) > 1:
                yield run[0][0], [text for _, text in run]


def _text_of(item: Any, link: Any, plain: bool) -> tuple[Any, str] | None:
    if isinstance(item, str):
        return (link, item) if plain else None
    if not isinstance(item, (Pairs, dict)):
        return None
    fields = dict(item)
    text = fields.get("text")
    if not isinstance(text, str) or "role" in fields or _NO_TEXT.search(str(fields.get("type") or "")):
        return None
    return (link, "text"), text


class _Key(str):
    """A step that names the key itself rather than its value."""


def field_path(link: Any) -> str:
    """Spell out where a string of `strings` stands."""
    steps = []
    while link is not None:
        link, step = link
        if isinstance(step, int):
            steps.append(f"[{step}]")
        else:
            steps.append(f".{step}{'{key}' if isinstance(step, _Key) else ''}")
    return "".join(reversed(steps)).removeprefix(".")


def example_id(row: Any) -> str | None:
    """The row's own name, from the usual top-level fields."""
    fields = dict(row) if isinstance(row, (Pairs, dict)) else {}
    for name in _ID_FIELDS:
        if isinstance(fields.get(name), (str, int)):
            return str(fields[name])
    return None


def check_lines(data: bytes) -> tuple[int, list[tuple[int, str]]]:
    """How many lines of a block hold JSON, and (0-based line, error) of every one that is not. Blank lines are
    neither."""
    lines = data.split(b"\n")
    num_filled = sum(1 for line in lines if line and not line.isspace())
    if msgspec is not None:
        try:
            if not data.isascii():
                data.decode()
            if len(msgspec.json.Decoder(msgspec.Raw).decode_lines(data)) == num_filled:
                return num_filled, []
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # some line here is broken, or is JSON by Python's wider rule (NaN, lone surrogates, depth)
    broken = [(number, error) for number, line in enumerate(lines) if (error := _why_broken(line))]
    return num_filled - len(broken), broken


def _why_broken(line: bytes) -> str | None:
    if not line or line.isspace():
        return None
    try:
        parse(line.decode("utf-8-sig"))
    except ValueError as error:
        return str(error)
    return None
