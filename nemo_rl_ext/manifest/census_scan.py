# SPDX-License-Identifier: Apache-2.0
"""Find media markers in JSON lines: which string of which field holds which marker.

Two passes. The first looks at bytes only: positions where a marker can start, plain or JSON-escaped. The second
parses the few lines that hold one, and walks them to name the field. Lines without a candidate are only checked
for being JSON. What counts as a marker is what `guards.chat.SafeChat` would break.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rl_ext.guards.literals import EscapedPattern, plain_pattern
from nemo_rl_ext.guards.markers import MEDIA_MARKERS
from nemo_rl_ext.manifest.json_walk import example_id, field_path, parse, strings, text_runs

DEFAULT_MARKERS = MEDIA_MARKERS

_MEDIA_WORD = re.compile(r"im(?:age|g)|video|audio|vision|media|sound|so_", re.IGNORECASE)
# From here on the search over bytes wins over a regular expression, as for pictures in base64.
_LONG_TEXT = 1024
_BACKSLASH, _QUOTE = ord("\\"), ord('"')
_HEX = np.zeros(256, np.int64)
for _digit in "0123456789abcdefABCDEF":
    _HEX[ord(_digit)] = int(_digit, 16)
_OPENER = re.compile(r'[{\["]')
_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|/)")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One marker in one string."""

    file: str
    line: int
    """1-based; the row number in Parquet."""
    example_id: str | None
    path: str
    """Such as `messages[2].tool_calls[0].function.arguments{json}.style`: `{json}` steps into JSON inside a
    string, `{key}` says that the marker stands in the name of a field, `{escaped}` that JSON escapes spell it in
    text that holds JSON, `{joined}` that it begins in this text and ends in the next text part."""
    marker: str
    count: int
    phantom_tokens: int | None = None
    """Placeholder ids that the string makes of this marker; None without a tokenizer."""


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
        self._in_bytes = self._escaped.in_bytes()
        self._cut_in_bytes, self._rest_in_bytes = _cut_patterns(self.markers)
        self._heads = sorted({marker.encode()[0] for marker in self.markers})
        # A character beyond the BMP is escaped as a pair; its first half is looked for.
        units = {marker[0].encode("utf-16-be")[:2] for marker in self.markers}
        self._is_head_code = np.zeros(1 << 16, bool)
        self._is_head_code[[int.from_bytes(unit) for unit in units]] = True
        self._second = np.zeros((256, 256), bool)
        self._third = np.zeros((256, 256), bool)
        for marker in self.markers:
            head, second, third = marker.encode().ljust(3, b"\0")[:3]
            self._second[head, second] = True
            self._third[second, third if len(marker.encode()) > 2 else slice(None)] = True
        # `<\/img>` and `<\uff5c...`: any character after the first may be escaped.
        self._second[self._heads, _BACKSLASH] = True
        self._third[:, _BACKSLASH] = self._third[_BACKSLASH, :] = True
        # `"<im", ...`: a text may end in mid-marker. After one character only where the quote does not open a text.
        self._second[self._heads, _QUOTE] = True
        self._third[_QUOTE, list(b",]}:\\ \t\r\n\0")] = True
        seconds = sorted({marker.encode()[1] for marker in self.markers})
        for space in b'" \t':
            self._third[seconds, space] = True

    def candidates(self, data: bytes, *, in_lines: bool = True) -> np.ndarray:
        """Offsets (int64) in UTF-8 JSON bytes where a marker starts, plain, escaped at any level, or cut by the end of
        its text where another text begins with the rest of a marker: later in the line, or, without `in_lines`, at all.
        """
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
        both = np.concatenate([plain, escapes[self._is_head_code[codes]]])
        both.sort()
        return np.array(list(self._confirmed(data, both.tolist(), in_lines)), np.int64)

    def _confirmed(self, data: bytes, offsets: list[int], in_lines: bool) -> Iterator[int]:
        whole, cut, rest = self._in_bytes.match, self._cut_in_bytes.match, self._rest_in_bytes.search
        judged = 0  # up to here a cut marker needs no further look: its line has been searched for the rest
        for offset in offsets:
            if whole(data, offset):
                yield offset
            elif offset >= judged and cut(data, offset):
                end = data.find(b"\n", offset) if in_lines else -1
                judged = len(data) if end < 0 else end
                if rest(data, offset, judged):
                    yield offset

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

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        return self._plain.finditer(text) if self._plain is not None else iter(())

    def _hits(self, row: Any) -> Iterator[tuple[str, str, Counter[str]]]:
        for link, text in strings(row):
            if not self._may_hold(text):
                continue
            path = field_path(link)
            raw = Counter(match.group() for match in self._matches(text))
            inner = list(self._inside_json(path, text))
            # Text of JSON inside a string is judged where it is read: by its field when it parses.
            if sum((c for _, _, c in inner), Counter()).total() >= max(raw.total(), 1):
                yield from inner
                continue
            if raw:
                yield path, text, raw
            if escaped := self._behind_a_prefix(text):
                yield f"{path}{{escaped}}", _unescaped(text), escaped
        for link, pieces in text_runs(row):
            if joined := self._across(pieces):
                yield f"{field_path(link)}{{joined}}", "".join(pieces), joined

    def _behind_a_prefix(self, text: str) -> Counter[str]:
        """Markers spelled with escapes in text that is no JSON as a whole but may hold some, as `call: {"a": ...}`."""
        start = _OPENER.search(text)
        found: Counter[str] = Counter()
        position = start.start() if start else len(text)
        while match := self._escaped.search(text, position):
            marker = _unescaped(match.group())
            found[marker] += marker != match.group()
            position = match.end()
        return +found

    def _across(self, pieces: Sequence[str]) -> Counter[str]:
        """Markers that begin in one piece and end in a later one, as templates join them: as they are, or trimmed."""
        found: Counter[str] = Counter()
        for texts in (pieces, [piece.strip() for piece in pieces]):
            joints = list(itertools.accumulate(map(len, texts)))[:-1]
            matches = self._matches("".join(texts))
            found |= Counter(
                m.group() for m in matches if any(m.start() < joint < m.end() for joint in joints)
            )
        return found

    def _may_hold(self, text: str) -> bool:
        # In JSON inside a string, text parts may cut a marker; the search over bytes sees those as well.
        if len(text) < _LONG_TEXT and not _looks_like_json(text):
            return self._escaped.search(text) is not None
        return len(self.candidates(text.encode("utf-8", "surrogatepass"), in_lines=False)) > 0

    def _inside_json(self, path: str, text: str) -> Iterator[tuple[str, str, Counter[str]]]:
        if not _looks_like_json(text):
            return
        try:
            inner = parse(text)
        except ValueError:
            return
        for step, value, counts in self._hits(inner):
            yield f"{path}{{json}}{step if step.startswith('[') or not step else '.' + step}", value, counts


def media_scanner(tokenizer: Any = None, markers: Sequence[str] = ()) -> MarkerScanner:
    """A scanner for these markers, or for the known ones and the tokenizer's own media tokens.

    With a tokenizer each finding counts the placeholder tokens that its text becomes.
    """
    if tokenizer is None:
        return MarkerScanner(markers or DEFAULT_MARKERS)
    from nemo_rl_ext.guards.encode import control_tokens, well_formed

    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    ids = control_tokens(tokenizer, known.intersection(markers))
    own = [literal for literal in ids if _MEDIA_WORD.search(literal)]

    def count_phantoms(text: str, marker: str) -> int:
        token_id = ids.get(marker)
        if token_id is None:
            return 0
        return list(tokenizer.encode(well_formed(text), add_special_tokens=False)).count(token_id)

    return MarkerScanner(markers or (*DEFAULT_MARKERS, *own), count_phantoms)


def _looks_like_json(text: str) -> bool:
    return text.lstrip().startswith(("{", "[", '"'))


def _cut_patterns(markers: Sequence[str]) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """The beginning of a marker, escaped at any level, at the end of a JSON string (`<im", ` or `<im\\",`), and the
    rest of one at the beginning of a string."""
    cuts = [(marker[:length], marker[length:]) for marker in markers for length in range(1, len(marker))]
    beginnings, rests = (EscapedPattern(parts).in_bytes().pattern for parts in zip(*cuts, strict=True))
    space = rb"(?:\s|\\+[nrt])*"
    closing = space + rb'\\*"(?=\s*(?:[,\]}:\\"]|\Z))'
    return re.compile(beginnings + closing, re.DOTALL), re.compile(b'"' + space + rests, re.DOTALL)


def _unescaped(text: str) -> str:
    """JSON escapes of characters undone, at any level; half a surrogate pair stays as it is."""
    decoded = _ESCAPE.sub(lambda m: chr(int(m.group(1), 16)) if m.group(1) else "/", text)
    return decoded.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
