# SPDX-License-Identifier: Apache-2.0
"""Find control-token literals in text, plain or JSON-escaped, without a branch per token.

Released tokenizers carry up to a thousand control tokens. A regular expression with one alternative per token
tries each of them at every `<`; a trie with one branch per character does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_UNIT = re.compile(
    r"\\+u[dD][89abAB][0-9a-fA-F]{2}\\+u[dD][c-fC-F][0-9a-fA-F]{2}|\\+u[0-9a-fA-F]{4}|\\+/|.", re.DOTALL
)


def plain_pattern(literals: Iterable[str]) -> re.Pattern[str] | None:
    """Leftmost-longest match of any literal, as tokenizers match added tokens. None without literals."""
    return _compile(literals, re.escape)


class EscapedPattern:
    r"""The same, also where characters are JSON-escaped at any level: `\u003cimage>`, `<\/s>`, `\\uff5c`.

    A template that parses a tool call's argument string turns those back into the literal. The search jumps from
    one possible first character to the next, which a regular expression that starts with an alternative does not.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        literals = list(literals)
        self._pattern = _compile(literals, _escapable)
        heads = "".join(re.escape(head) for head in sorted({literal[0] for literal in literals} | {"\\"}))
        self._heads = re.compile(f"[{heads}]")

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The first match at or after `start`, longest first; None without one, or without literals."""
        if self._pattern is None:
            return None
        match = self._pattern.match
        for head in self._heads.finditer(text, start):
            if found := match(text, head.start()):
                return found
        return None

    def in_bytes(self) -> re.Pattern[bytes]:
        """The pattern over UTF-8 bytes, to be matched at a known position."""
        return re.compile(self._pattern.pattern.encode() if self._pattern else b"(?!)", re.DOTALL)


def first_unit_end(text: str, start: int) -> int:
    """End of the character at `start`, counting one JSON escape sequence as one character."""
    match = _UNIT.match(text, start)
    return match.end() if match else start


def _escapable(char: str) -> str:
    units = char.encode("utf-16-be").hex()
    escape = "".join(rf"\\+u{units[i : i + 4]}" for i in range(0, len(units), 4))
    lowered = "".join(f"[{c}{c.upper()}]" if c.isalpha() and c != "u" else c for c in escape)
    slash = r"|\\+/" if char == "/" else ""
    return f"(?:{re.escape(char)}|{lowered}{slash})"


# Characters that may follow; "" where a literal ends.
_Trie = dict[str, "_Trie"]


def _compile(literals: Iterable[str], unit: Callable[[str], str]) -> re.Pattern[str] | None:
    trie: _Trie = {}
    for literal in literals:
        node = trie
        for char in literal:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_branch(trie, unit), re.DOTALL) if trie else None


def _branch(node: _Trie, unit: Callable[[str], str]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:
        char, node = next(iter(node.items()))
        prefix += unit(char)
    options = [unit(char) + _branch(child, unit) for char, child in node.items() if char]
    if not options:
        return prefix
    optional = "?" if "" in node else ""
    return f"{prefix}(?:{'|'.join(options)}){optional}"
