# SPDX-License-Identifier: Apache-2.0
"""A twin of a tokenizer in which control tokens answer to other names.

`split_special_tokens=True` is not enough to keep text from becoming a control token: it leaves added tokens that
are not marked special (`<tool_call>` in many checkpoints), and it leaves tokens that the model's own vocabulary
can spell (Unigram lattices, WordPiece and WordLevel words, BPE merges, SentencePiece user-defined symbols).
The twin keeps every id, but each control token's text is replaced by an unguessable alias, everywhere: text can
then not spell it by construction, while the alias still can.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Mapping
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


def shadow_encoder(tokenizer: Any, aliases: Mapping[str, str], control: Mapping[str, int]) -> EncodeFn:
    """The same with control tokens reachable by alias only.

    Raises:
        ValueError: when the twin cannot be built for this tokenizer class.
    """
    fast = getattr(tokenizer, "is_fast", False)
    encode = _fast_shadow(tokenizer, aliases) if fast else _slow_shadow(tokenizer, aliases)
    for literal, token_id in control.items():
        reached, spelled = encode(aliases[literal], False)[0], encode(literal, False)[0]
        if token_id not in reached:
            raise ValueError(
                f"safe encoder: {type(tokenizer).__name__} does not keep id {token_id} of {literal!r} in its twin "
                f"(got {reached}); this tokenizer class cannot be guarded"
            )
        if token_id in spelled and token_id != tokenizer.unk_token_id:
            raise ValueError(
                f"safe encoder: {type(tokenizer).__name__} still spells {literal!r} (id {token_id}) from plain "
                "text through its own vocabulary; this tokenizer class cannot be guarded"
            )
    return encode


def _fast_shadow(tokenizer: Any, aliases: Mapping[str, str]) -> EncodeFn:
    from tokenizers import Tokenizer

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec["truncation"] = spec["padding"] = spec["post_processor"] = None
    for token in spec["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    model = spec["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [m for m in model["merges"] if not _spells(m, aliases)]
    twin = Tokenizer.from_str(json.dumps(spec))

    def encode(text: str, want_offsets: bool) -> tuple[list[int], Offsets | None]:
        encoding = twin.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets if want_offsets else None

    return encode


def _spells(merge: Any, aliases: Mapping[str, str]) -> bool:
    left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
    return left in aliases or right in aliases or left + right in aliases


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

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(processor.serialized_model_proto())
    spelled_from_text = (proto.SentencePiece.Type.NORMAL, proto.SentencePiece.Type.USER_DEFINED)
    for piece in proto.pieces:
        if piece.type in spelled_from_text:
            piece.piece = aliases.get(piece.piece, piece.piece)
    return type(processor)(model_proto=proto.SerializeToString())
