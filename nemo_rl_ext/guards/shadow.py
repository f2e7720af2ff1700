# SPDX-License-Identifier: Apache-2.0
"""A twin of a tokenizer in which control tokens answer to other names.

`split_special_tokens=True` is not enough to keep text from becoming a control token: it leaves added tokens that
are not marked special (`<tool_call>` in many checkpoints), and it leaves tokens that the model's own vocabulary
can spell (Unigram lattices, WordPiece and WordLevel words, BPE merges, SentencePiece user-defined symbols).
In the twin every control token answers to an unguessable alias, and to nothing else: text cannot spell it, by
construction.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

Offsets = list[tuple[int, int]]
EncodeFn = Callable[[str, bool], tuple[list[int], "Offsets | None"]]
"""(text, whether offsets are wanted) -> (ids, character offsets or None)"""


def make_aliases(control: Mapping[str, int]) -> dict[str, str]:
    """One alias per control token. Digits survive every normaliser; the brackets keep word boundaries."""
    salt = secrets.randbits(100)
    return {literal: f"<{salt}0{token_id}>" for literal, token_id in control.items()}


def ordinary_encoder(tokenizer: Any) -> EncodeFn:
    """Exactly what the tokenizer does itself, without added BOS/EOS."""

    def encode(text: str, want_offsets: bool) -> tuple[list[int], Offsets | None]:
        if not want_offsets or not getattr(tokenizer, "is_fast", False):
            return list(tokenizer.encode(text, add_special_tokens=False)), None
        out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(out["input_ids"]), list(out["offset_mapping"])

    return encode


def unknown_id(tokenizer: Any) -> int | None:
    """The id that unknown characters get by right; None where every text can be spelled.

    Not the tokenizer's `unk_token_id`: byte-level tokenizers often give that name to their end token.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if model is None or not hasattr(model, "unk_token"):
        unknown: int | None = tokenizer.unk_token_id
    else:
        unknown = None if model.unk_token is None else model.token_to_id(model.unk_token)
    return unknown


def shadow_encoder(tokenizer: Any, aliases: Mapping[str, str], control: Mapping[str, int]) -> EncodeFn:
    """The same with control tokens reachable by alias only.

    Raises:
        ValueError: when the twin cannot be built for this tokenizer class.
    """
    fast = getattr(tokenizer, "is_fast", False)
    encode = _fast_shadow(tokenizer, aliases, control) if fast else _slow_shadow(tokenizer, aliases)
    unknown = unknown_id(tokenizer)
    for literal, token_id in control.items():
        reached, spelled = encode(aliases[literal], False)[0], encode(literal, False)[0]
        if token_id not in reached:
            raise ValueError(
                f"safe encoder: {type(tokenizer).__name__} does not keep id {token_id} of {literal!r} in its twin "
                f"(got {reached}); this tokenizer class cannot be guarded"
            )
        if token_id in spelled and token_id != unknown:
            raise ValueError(
                f"safe encoder: {type(tokenizer).__name__} still spells {literal!r} (id {token_id}) from plain "
                "text through its own vocabulary; this tokenizer class cannot be guarded"
            )
    return encode


def _fast_shadow(tokenizer: Any, aliases: Mapping[str, str], control: Mapping[str, int]) -> EncodeFn:
    from tokenizers import AddedToken, Tokenizer

    backend = tokenizer.backend_tokenizer
    model = backend.model
    unknown = unknown_id(tokenizer)
    # Control tokens that the vocabulary itself holds, so that text may spell them. The unknown token comes from
    # characters that have no other.
    held = {
        i: piece for i in control.values() if (piece := model.id_to_token(i)) is not None and i != unknown
    }
    respelled = {i: _respelled(model, piece, held, unknown) for i, piece in held.items()}
    # The twin shares the model with the tokenizer: reading a large one again would take as long as loading it.
    twin = Tokenizer(model)
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        twin.pre_tokenizer = backend.pre_tokenizer
    added = sorted(backend.get_added_tokens_decoder().items())
    twin.add_tokens(
        [
            AddedToken(
                aliases.get(token.content, token.content),
                single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
                normalized=token.normalized, special=token.special,
            )
            for _, token in added
        ]
    )  # fmt: skip
    # Tokens that the model does not know are numbered anew by the twin.
    original = {twin.token_to_id(aliases.get(token.content, token.content)): i for i, token in added}
    if clash := [i for i, own in original.items() if i != own and model.id_to_token(i) is not None]:
        raise ValueError(
            f"safe encoder: the vocabulary of {type(tokenizer).__name__} has gaps, so that ids {clash[:5]} of its "
            "twin would have two meanings; this tokenizer class cannot be guarded"
        )
    replaced = {i: [own] for i, own in original.items() if i != own} | {
        i: ids for i, ids in respelled.items() if ids is not None
    }

    def encode(text: str, want_offsets: bool) -> tuple[list[int], Offsets | None]:
        encoding = twin.encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets if want_offsets else None
        if replaced.keys().isdisjoint(ids):
            return ids, offsets
        parts = [replaced.get(i) or [i] for i in ids]
        if offsets is not None:
            offsets = [span for span, part in zip(offsets, parts, strict=True) for _ in part]
        return [i for part in parts for i in part], offsets

    return encode


def _respelled(model: Any, piece: str, forbidden: Collection[int], unknown: int | None) -> list[int] | None:
    """Another spelling of a vocabulary piece, as the model gives it to text: ids; None when there is none."""
    from tokenizers import models

    if isinstance(model, models.WordLevel):
        return None if unknown is None else [unknown]
    if isinstance(model, models.WordPiece):
        ids = _longest_first(model, piece, forbidden)
        return [unknown] if ids is None and unknown is not None else ids
    found = []
    for cut in range(1, len(piece)):
        halves = [[token.id for token in model.tokenize(half)] for half in (piece[:cut], piece[cut:])]
        if all(halves) and not any(i in forbidden for half in halves for i in half):
            found.append(halves[0] + halves[1])
    return min(found, key=lambda ids: (ids.count(unknown), len(ids)), default=None)


def _longest_first(model: Any, word: str, forbidden: Collection[int]) -> list[int] | None:
    """WordPiece without the forbidden pieces."""
    ids: list[int] = []
    start = 0
    while start < len(word):
        prefix = model.continuing_subword_prefix if start else ""
        for end in range(len(word), start, -1):
            token_id = model.token_to_id(prefix + word[start:end])
            if token_id is not None and token_id not in forbidden:
                break
        else:
            return None
        ids.append(token_id)
        start = end
    return ids


def _slow_shadow(tokenizer: Any, aliases: Mapping[str, str]) -> EncodeFn:
    twin = copy.deepcopy(tokenizer)
    # Python tokenizers keep vocabularies in differently named attributes; any of them may hold a literal.
    for name, value in vars(twin).items():
        if isinstance(value, dict):
            setattr(twin, name, {_alias(k, aliases): _alias(v, aliases) for k, v in value.items()})
    if hasattr(twin, "sp_model"):
        twin.sp_model = _aliased_sentencepiece(twin.sp_model, aliases)
    if not hasattr(twin, "tokens_trie"):
        raise ValueError(
            f"safe encoder: {type(tokenizer).__name__} is neither a fast tokenizer nor a Python one with a token "
            "trie; this tokenizer class cannot be guarded"
        )
    twin.tokens_trie = type(twin.tokens_trie)()
    for token in twin._added_tokens_encoder:
        twin.tokens_trie.add(token)

    def encode(text: str, want_offsets: bool) -> tuple[list[int], Offsets | None]:
        return list(twin.convert_tokens_to_ids(twin.tokenize(text))), None

    return encode


def _alias(value: Any, aliases: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return aliases.get(value, value)
    if isinstance(getattr(value, "content", None), str) and value.content in aliases:
        value = copy.copy(value)
        value.content = aliases[value.content]
    return value


def _aliased_sentencepiece(processor: Any, aliases: Mapping[str, str]) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    # Generated code, whose classes no checker sees.
    model: Any = sentencepiece_model_pb2
    proto = model.ModelProto()
    proto.ParseFromString(processor.serialized_model_proto())
    spelled_from_text = (proto.SentencePiece.Type.NORMAL, proto.SentencePiece.Type.USER_DEFINED)
    for piece in proto.pieces:
        if piece.type in spelled_from_text:
            piece.piece = aliases.get(piece.piece, piece.piece)
    return type(processor)(model_proto=proto.SerializeToString())
