# SPDX-License-Identifier: Apache-2.0
"""Find media markers in JSON lines: which string of which field holds which marker.

Two passes. The first looks at bytes only: positions where a marker can start, plain or JSON-escaped. The second
parses the few lines that hold one, and walks them to name the field. Lines without a candidate are only checked
for being JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rl_ext.guards.literals import EscapedPattern, plain_pattern

try:
    import msgspec
except ImportError:  # only speed is lost: every line then goes through `json.loads`
    msgspec = None

# What released vision-language checkpoints use; a tokenizer adds its own.
DEFAULT_MARKERS = (
    "<image>", "</image>", "<img>", "</img>", "<video>", "</video>", "<audio>", "</audio>",
    "<|image|>", "<|video|>", "<|audio|>", "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|media_pad|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|media_begin|>", "<|media_end|>",
    "<|media_content|>", "<IMG_CONTEXT>", "<image_soft_token>", "<start_of_image>", "<end_of_image>",
    "<so_start>", "<so_embedding>", "<so_end>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
)  # fmt: skip

# From here on the search over bytes wins over a regular expression, as for pictures in base64.
_LONG_TEXT = 1024
_ID_FIELDS = ("id", "example_id", "row_id", "uid", "uuid", "_id", "task_id", "index")
_BACKSLASH = ord("\\")
_HEX = np.zeros(256, np.int64)
for _digit in "0123456789abcdefABCDEF":
    _HEX[ord(_digit)] = int(_digit, 16)
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One marker in one string."""

    file: str
    line: int
    """1-based; the row number in Parquet."""
    example_id: str | None
    path: str
    """Such as `messages[2].tool_calls[0].function.arguments{json}.style`: `{json}` steps into JSON inside a
    string, `{key}` says that the marker stands in the name of a field."""
    marker: str
    count: int
    phantom_tokens: int | None = None
    """Placeholder ids that the string makes of this marker; None without a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class BrokenLine:
    """A line that could not be read; the census went on."""

    file: str
    line: int
    error: str


class MarkerScanner:
    """Searches rows for a set of markers. `count_phantoms(text, marker)` is asked for each finding when given."""

    def __init__(
        self, markers: Sequence[str], count_phantoms: Callable[[str, str], int] | None = None
    ) -> None:
        if not markers or any(len(m) < 2 for m in markers):
            raise ValueError(
                f"census: markers must be strings of two or more characters, got {list(markers)}"
            )
        self.markers = tuple(dict.fromkeys(markers))
        self._count_phantoms = count_phantoms
        self._plain = plain_pattern(self.markers)
        self._escaped = EscapedPattern(self.markers)
        self._escaped_bytes = self._escaped.in_bytes()
        self._heads = sorted({marker.encode()[0] for marker in self.markers})
        # A character beyond the BMP is escaped as a pair; its first half is looked for.
        units = {marker[0].encode("utf-16-be")[:2] for marker in self.markers}
        self._head_codes = np.array(sorted(int.from_bytes(unit) for unit in units))
        self._second = np.zeros((256, 256), bool)
        self._third = np.zeros((256, 256), bool)
        for marker in self.markers:
            head, second, third = marker.encode().ljust(3, b"\0")[:3]
            self._second[head, second] = True
            self._third[second, third if len(marker.encode()) > 2 else slice(None)] = True
        # `<\/img>` and `<\uff5c...`: any character after the first may be escaped.
        self._second[self._heads, _BACKSLASH] = True
        self._third[:, _BACKSLASH] = self._third[_BACKSLASH, :] = True

    def candidates(self, data: bytes) -> np.ndarray:
        """Offsets (int64) in UTF-8 JSON bytes where a marker starts, plain or escaped at any level."""
        array = np.frombuffer(data + b"\0" * 6, np.uint8)
        is_head = array == _BACKSLASH
        for head in self._heads:
            is_head |= array == head
        starts = np.flatnonzero(is_head)
        escaped = (array[starts] == _BACKSLASH) & (array[starts + 1] == ord("u"))
        plain = starts[self._second[array[starts], array[starts + 1]]]
        plain = plain[self._third[array[plain + 1], array[plain + 2]]]
        escapes = starts[escaped]
        codes = np.zeros(len(escapes), np.int64)
        for place in range(2, 6):
            codes = codes * 16 + _HEX[array[escapes + place]]
        both = np.concatenate([plain, escapes[np.isin(codes, self._head_codes)]])
        both.sort()
        match = self._escaped_bytes.match
        return np.array([s for s in both.tolist() if match(data, s)], np.int64)

    def findings(self, row: Any, *, file: str, line: int) -> list[Finding]:
        """Every marker in a parsed row, at any depth, in document order."""
        found = []
        for path, text, counts in self._hits(row):
            for marker, count in counts.items():
                phantoms = self._count_phantoms(text, marker) if self._count_phantoms else None
                found.append((path, marker, count, phantoms))
        example = example_id(row) if found else None
        return [
            Finding(
                file=file, line=line, example_id=example, path=p, marker=m, count=c, phantom_tokens=n
            )  # fmt: skip
            for p, m, c, n in found
        ]

    def _hits(self, row: Any) -> Iterator[tuple[str, str, Counter[str]]]:
        for link, text in strings(row):
            if not self._may_hold(text):
                continue
            path = field_path(link)
            raw = Counter(self._plain.findall(text))
            inner = list(self._inside_json(path, text))
            # Text of JSON inside a string is judged where it is read: by its field when it parses.
            if sum((c for _, _, c in inner), Counter()).total() >= max(raw.total(), 1):
                yield from inner
            elif raw:
                yield path, text, raw

    def _may_hold(self, text: str) -> bool:
        if len(text) < _LONG_TEXT:
            return self._escaped.search(text) is not None
        return len(self.candidates(text.encode("utf-8", "surrogatepass"))) > 0

    def _inside_json(self, path: str, text: str) -> Iterator[tuple[str, str, Counter[str]]]:
        if not text.lstrip().startswith(("{", "[", '"')):
            return
        try:
            inner = parse(text)
        except ValueError:
            return
        for step, value, counts in self._hits(inner):
            yield f"{path}{{json}}{step if step.startswith('[') or not step else '.' + step}", value, counts


class Pairs(list):
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
        if isinstance(value, str):
            yield link, value
        elif isinstance(value, (Pairs, dict)):
            pairs = list(value.items()) if isinstance(value, dict) else value
            for key, child in reversed(pairs):
                if isinstance(child, (str, list, dict, tuple)):
                    stack.append((child, (link, key)))
                if isinstance(key, str):
                    stack.append((key, (link, _Key(key))))
        elif isinstance(value, (list, tuple)):
            stack.extend((value[i], (link, i)) for i in range(len(value) - 1, -1, -1))


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


def broken_lines(data: bytes) -> list[tuple[int, str]]:
    """(0-based line, error) of every line of a block that is not JSON. Blank lines are fine."""
    if msgspec is not None:
        num_rows = sum(1 for line in data.split(b"\n") if line and not line.isspace())
        try:
            if not data.isascii():
                data.decode()
            if len(msgspec.json.Decoder(msgspec.Raw).decode_lines(data)) == num_rows:
                return []
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # some line here is broken, or is JSON by Python's wider rule (NaN, lone surrogates, depth)
    broken = []
    for number, line in enumerate(data.split(b"\n")):
        if error := _why_broken(line):
            broken.append((number, error))
    return broken


def _why_broken(line: bytes) -> str | None:
    if not line or line.isspace():
        return None
    try:
        json.loads(line.decode("utf-8-sig"))
    except RecursionError:
        try:
            _parse_deep(line.decode("utf-8-sig"))
        except ValueError as error:
            return str(error)
    except ValueError as error:
        return str(error)
    return None
