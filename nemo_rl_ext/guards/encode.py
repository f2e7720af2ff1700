# SPDX-License-Identifier: Apache-2.0
"""Tokenise untrusted text so that it can never become a control token.

Scaffold (what a chat template writes) and content (what a user, a tool or a policy wrote) arrive in one string.
A marker, put inside every control literal of the content before the template runs, tells them apart afterwards:
a literal that still stands whole is scaffold and becomes its id, one that the marker breaks stays plain text.
The marker is then removed, so that the text is exactly what the template made of the content.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nemo_rl_ext.guards.literals import EscapedPattern, first_unit_end, plain_pattern
from nemo_rl_ext.guards.markers import media_markers
from nemo_rl_ext.guards.shadow import (
    Offsets,
    make_aliases,
    ordinary_encoder,
    shadow_encoder,
    unknown_id,
)


class ControlTokenLeakError(ValueError):
    """Text turned into a control token in spite of the guard."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Ids of one text, and where each token came from."""

    ids: list[int]
    """[tokens]"""
    offsets: Offsets | None
    """[tokens] (start, end) in the characters of the text that was passed in; None when not asked for, and for
    slow tokenizers."""
    clean: bool
    """The ordinary tokenizer made these ids: no content stood for a control token."""


def control_tokens(tokenizer: Any, extra: Iterable[str] = ()) -> dict[str, int]:
    """The literals that stand for more than their text, with ids: special tokens, media markers, markup that the
    chat template writes itself (`<tool_call>` in many checkpoints), and `extra` ones.

    Other added tokens (runs of spaces, HTML tags, reserved names) are ordinary text in another spelling and stay
    untouched, as do tokens of one character.

    Raises:
        ValueError: for an `extra` literal that is no token, or one of a single character.
    """
    added = {
        token.content: (token_id, token.special) for token_id, token in tokenizer.added_tokens_decoder.items()
    }
    media = media_markers(added)
    template = getattr(tokenizer, "chat_template", None) or ""
    written = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)

    def is_control(literal: str, special: bool) -> bool:
        markup = len(literal) > 2 and literal[0] + literal[-1] in ("<>", "[]")
        return len(literal) > 1 and (special or literal in media or (markup and literal in written))

    found = {literal: i for literal, (i, special) in added.items() if is_control(literal, special)}
    for literal in extra:
        token_id = tokenizer.convert_tokens_to_ids(literal)
        if len(literal) < 2:
            raise ValueError(
                f"safe encoder: {literal!r} has one character; only longer literals can be guarded"
            )
        if literal not in added and (token_id is None or token_id == tokenizer.unk_token_id):
            raise ValueError(f"safe encoder: {literal!r} is no token of this tokenizer; check its spelling")
        found[literal] = token_id
    return found


class SafeEncoder:
    """An encoder over any Hugging Face tokenizer, fast or slow, that content cannot steer.

        encoder = SafeEncoder(tokenizer)
        encoder.encode("{type<image>|bold}")                          # no <image> id
        encoder.encode_parts([encoder.id("<img>"), "untrusted <image>"])  # scaffold by id, content by text

    Clean text gets exactly the ids that the tokenizer itself gives. `allow` names literals that content may turn
    into tokens after all (a trusted assistant history with `<think>`); `extra` adds literals to the control set.

    Raises:
        ValueError: for a tokenizer class that cannot be guarded.
    """

    def __init__(self, tokenizer: Any, *, allow: Collection[str] = (), extra: Iterable[str] = ()) -> None:
        known = control_tokens(tokenizer, extra)
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        if unknown := sorted(set(allow) - set(known) - added):
            raise ValueError(f"safe encoder: allow names {unknown}, which are no tokens of this tokenizer")
        self.tokenizer = tokenizer
        self.control = {literal: i for literal, i in known.items() if literal not in allow}
        self.marker = str(10**31 + secrets.randbelow(9 * 10**31))
        self._aliases = make_aliases(self.control)
        self._control_ids = frozenset(self.control.values())
        # Unknown characters become this one by right, so that finding it proves nothing.
        self._unknown = {unknown_id(tokenizer)}
        self._ordinary = ordinary_encoder(tokenizer)
        self._shadow = shadow_encoder(tokenizer, self._aliases, self.control)
        self._scaffold = plain_pattern(self.control)
        self._hidden = EscapedPattern(self.control)
        self._marks = plain_pattern([self.marker])
        self._marks_and_scaffold = plain_pattern([self.marker, *self.control])
        self._heads = {literal[:n] for literal in self.control for n in range(1, len(literal))}
        self._tails = {literal[n:] for literal in self.control for n in range(1, len(literal))}
        self._longest = max(map(len, self.control), default=0)
        self._middles = {t[n:] for t in self._heads for n in range(len(t))}

    def id(self, literal: str) -> int:
        """The id of a scaffold token, to be emitted by the caller."""
        if literal not in self.control:
            raise ValueError(
                f"safe encoder: {literal!r} is no control token; known are {sorted(self.control)[:20]}. A token that "
                "is ordinary text by default becomes one with SafeEncoder(extra=[...])"
            )
        return self.control[literal]

    def encode(self, text: str) -> list[int]:
        """Ids of untrusted text. O(characters)."""
        text = well_formed(text)
        ids, _ = self._ordinary(text, False)
        if self._control_ids.isdisjoint(ids):
            return ids
        return self._guarded(text, Counter(), False)[0]

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        """Scaffold ids (int) and untrusted text (str), encoded as one text: merges and prefix spaces fall where
        the tokenizer puts them for the joined text."""
        by_id = {token_id: literal for literal, token_id in self.control.items()}
        marked = []
        for part in parts:
            if isinstance(part, str):
                marked.append(self.mark(part))
            elif part in by_id:
                marked.append(by_id[part])
            else:
                raise ValueError(f"safe encoder: part {part!r} is neither text nor a control token's id")
        return self._encode_marked("".join(marked), offsets=False, whole_scaffold=True).ids

    def mark(self, content: str, *, edges: bool = True) -> str:
        """Break every control literal in a content string with the marker; clean content comes back as it is.

        Fragments at the edges are broken too: `<ima` and `ge>` in two content parts would meet in a template,
        and an argument named `image` would become one in a template that writes `<` + name + `>`.
        """
        content = well_formed(content)
        if not content or not self.control:
            return content
        if self.marker in content:
            raise ValueError("safe encoder: content already carries the marker; mark each string once")
        cuts = self._edge_cuts(content) if edges else set()
        position = 0
        while match := self._hidden.search(content, position):
            position = first_unit_end(content, match.start())
            cuts.add(position)
        if not cuts:
            return content
        return self.marker.join(content[a:b] for a, b in pairwise([0, *sorted(cuts), len(content)]))

    def encode_marked(self, marked: str, *, offsets: bool = False) -> Encoded:
        """Encode scaffold with marked content inside, such as a template's output; with character offsets on
        request, where the tokenizer has them.

        Raises:
            ControlTokenLeakError: when content turned into a control token all the same.
        """
        return self._encode_marked(marked, offsets=offsets, whole_scaffold=False)

    def _encode_marked(self, marked: str, *, offsets: bool, whole_scaffold: bool) -> Encoded:
        """`whole_scaffold`: every control literal outside content has to become its id, even where the tokenizer
        itself would spell it (`split_special_tokens`, `single_word`)."""
        marked = well_formed(marked)
        literals = self._scaffold.findall(marked) if self._scaffold else []
        expected = Counter(self.control[literal] for literal in literals)
        text = marked.replace(self.marker, "")
        ids, spans = self._ordinary(text, offsets)
        seen = self._control_counts(ids)
        surplus = seen - expected
        if self.marker not in marked:
            surplus -= self._unknown_in(seen)
        if not surplus and not (whole_scaffold and expected - seen):
            return Encoded(ids=ids, offsets=self._moved(spans, marked, scaffold=False), clean=True)
        ids, spans = self._guarded(self._aliased(marked), expected, offsets)
        return Encoded(ids=ids, offsets=self._moved(spans, marked, scaffold=True), clean=False)

    def _guarded(
        self, text: str, expected: Counter[int], want_offsets: bool
    ) -> tuple[list[int], Offsets | None]:
        ids, offsets = self._shadow(text, want_offsets)
        seen = self._control_counts(ids)
        leaked = seen - expected - self._unknown_in(seen)
        if wrong := leaked or expected - seen:
            names = self.tokenizer.convert_ids_to_tokens(sorted(wrong))
            what = "text became control tokens" if leaked else "scaffold did not become control tokens"
            raise ControlTokenLeakError(
                f"safe encoder: {what} {names} with {type(self.tokenizer).__name__}; this tokenizer class cannot "
                "be guarded"
            )
        return ids, offsets

    def _control_counts(self, ids: list[int]) -> Counter[int]:
        if self._control_ids.isdisjoint(ids):
            return Counter()
        return Counter(i for i in ids if i in self._control_ids)

    def _unknown_in(self, seen: Counter[int]) -> Counter[int]:
        return Counter({i: n for i, n in seen.items() if i in self._unknown})

    def _aliased(self, marked: str) -> str:
        if self._scaffold is not None:
            marked = self._scaffold.sub(lambda m: self._aliases[m.group()], marked)
        return marked.replace(self.marker, "")

    def _edge_cuts(self, content: str) -> set[int]:
        # Cuts sit inside the stripped text, so that a template's trim still trims.
        stripped = content.strip()
        begin = content.find(stripped) if stripped else 0
        end = begin + len(stripped)
        longest = min(self._longest, len(stripped) + 1)
        cuts = set()
        if any(stripped[-n:] in self._heads for n in range(1, longest)):
            cuts.add(end)
        if any(stripped[:n] in self._tails for n in range(1, longest)):
            cuts.add(begin)
        if stripped in self._middles:
            cuts.update((begin, end))
        return cuts

    def _moved(self, offsets: Offsets | None, marked: str, *, scaffold: bool) -> Offsets | None:
        """Offsets in the encoded text -> offsets in `marked`."""
        if offsets is None:
            return None
        pieces: list[tuple[int, int, int]] = []  # (start in encoded text, start in marked, length in marked)
        encoded = position = 0
        pattern = self._marks_and_scaffold if scaffold else self._marks
        for match in pattern.finditer(marked) if pattern is not None else ():
            copied = match.start() - position
            pieces.append((encoded, position, copied))
            encoded += copied
            if match.group() != self.marker:
                pieces.append((encoded, match.start(), len(match.group())))
                encoded += len(self._aliases[match.group()])
            position = match.end()
        if not pieces:
            return offsets
        pieces.append((encoded, position, len(marked) - position))
        starts = [p[0] for p in pieces]

        def move(offset: int, side: int) -> int:
            start, source, length = pieces[bisect_right(starts, offset - side) - 1 if offset > side else 0]
            return source + min(offset - start, length)

        return [(move(a, 0), move(b, 1) if b > a else move(a, 0)) for a, b in offsets]


def well_formed(text: str) -> str:
    """Pair up surrogates and replace lone ones by U+FFFD, which no tokenizer could encode. Usually a no-op."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
