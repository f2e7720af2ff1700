# SPDX-License-Identifier: Apache-2.0
"""Text to token ids that say exactly what the text says: decoding them gives it back, character for character.

Many tokenizers put a space before every text they are given (SentencePiece's dummy prefix, which tokenizers
write as ``Metaspace`` or ``Prepend``; ``ByteLevel`` with ``add_prefix_space``). That is right for the first text
of a sequence, whose space the decoder takes off again, and wrong for a text that continues another one:
``"The capi"`` and ``"tal"`` would train ``The capi tal``. So a continuation is encoded by a copy of the tokenizer
without the prefix, and every result is decoded and compared before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from nemo_rl_ext.distill.records import RecordError

_PROBES = (
    ("The capi", "tal is Paris."),
    ("def f(x):\n", "    if x:\n\t\treturn  2\n"),
    (" Two  spaces", " and one at the end "),
    ("Compatible: ", "\ufb01ne \u2460 \uff21\u00a0\u00b2"),
)


class TokenizerRefused(ValueError):
    """The tokenizer changes text that it encodes, so nothing can be trained verbatim with it."""


class VerbatimTokenizer:
    """A transformers tokenizer whose ids are checked against the text they stand for.

    Raises:
        TokenizerRefused: it loses case, white space or characters that it has tokens for, or separates texts
            in a way that cannot be switched off.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._bare = _without_prefix(tokenizer)
        for text, more in _PROBES:
            self._refuse_if_changed(text, more)

    def starts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that begin a sequence, one list each; not yet compared (see `start`)."""
        return _encode(self.tokenizer, texts)

    def continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that continue a sequence; not yet compared (see `require_continuation`)."""
        if self._bare is None:
            return _encode(self.tokenizer, texts)
        return [encoding.ids for encoding in self._bare.encode_batch_fast(texts, add_special_tokens=False)]

    def start(self, text: str, ids: list[int], *, name: str) -> list[int]:
        """``ids`` where they give ``text`` back, else the first other encoding that does.

        The tokenizer's own encoding is the first choice, since it is what a model sees at inference. It loses the
        space of a text that begins with one where the prefix is added only to texts without, and gains one after a
        special token; the prefix as text, or none, does neither.

        Raises:
            RecordError: no encoding gives the text back; ``name`` is the key that holds it.
        """
        choices = [ids]
        if self._bare is not None:
            # A special token at the beginning takes the place of the prefix.
            special = ids[:1] and ids[0] in self.tokenizer.added_tokens_decoder
            choices += self.continuations([text] if special else [" " + text, text])
        for choice in choices:
            if self.decode(choice) == text:
                return choice
        raise RecordError(self._difference(name, text, self.decode(ids), ids))

    def require_continuation(
        self, before: list[int], context: str, ids: list[int], text: str, *, name: str
    ) -> None:
        """Check that ``ids`` after ``before``, which decode to ``context``, add ``text`` and change nothing else.

        Raises:
            RecordError: they do not; ``name`` is the key that holds ``text``.
        """
        found = self.decode(before + ids)
        if found != context + text:
            raise RecordError(self._difference(name, text, found[len(context) :], ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, special tokens included and nothing tidied up."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _refuse_if_changed(self, text: str, more: str) -> None:
        if not all(map(self._knows, set(text + more))):
            return  # a small vocabulary (proteins, digits): its records decide
        (ids,), (more_ids,) = self.starts([text]), self.continuations([more])
        try:
            ids = self.start(text, ids, name="input")
            self.require_continuation(ids, text, more_ids, more, name="output")
        except RecordError as problem:
            raise TokenizerRefused(
                f"the student's tokenizer {_describe(self.tokenizer)} does not give text back as it was written: for "
                f"input {text!r} and output {more!r}, {problem}. Distillation trains on the text as it stands; "
                "choose a student whose tokenizer keeps case, white space and characters"
            ) from None

    def _knows(self, character: str) -> bool:
        if character.isspace():
            return True
        (ids,) = self.starts([character])
        return bool(ids) and self.tokenizer.unk_token_id not in ids

    def _difference(self, name: str, text: str, found: str, ids: list[int]) -> str:
        at = next((i for i, (a, b) in enumerate(zip(text, found, strict=False)) if a != b), None)
        at = min(len(text), len(found)) if at is None else at
        unknown = self.tokenizer.unk_token_id
        missing = unknown is not None and unknown in ids
        return (
            f"{name!r} does not come back from the student's tokenizer as it was written: at character {at} "
            f"{text[at : at + 20]!r} becomes {found[at : at + 20]!r}"
            + (" (there is no token for it)" if missing else "")
        )


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _without_prefix(tokenizer: Any) -> Any | None:
    """A copy of the Rust tokenizer that adds no space to a text; None where there is none to take away."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        return None
    pipeline = json.loads(backend.to_str())
    changed = False
    for part in _parts(pipeline["normalizer"], "normalizers"):
        if part["type"] == "Prepend":
            # An empty Prepend adds nothing, and stays valid alone or within a sequence.
            part["prepend"], changed = "", True
    for part in _parts(pipeline["pre_tokenizer"], "pretokenizers"):
        if part["type"] == "Metaspace" and part["prepend_scheme"] != "never":
            part["prepend_scheme"], changed = "never", True
        elif part["type"] == "ByteLevel" and part["add_prefix_space"]:
            part["add_prefix_space"], changed = False, True
    if not changed:
        return None
    bare = type(backend).from_str(json.dumps(pipeline))
    # As transformers sets them for each call.
    bare.no_truncation()
    bare.no_padding()
    bare.encode_special_tokens = backend.encode_special_tokens
    return bare


def _parts(component: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """A pipeline component with what it is a sequence of, innermost only."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [part for inner in component[key] for part in _parts(inner, key)]
    return [component]


def _describe(tokenizer: Any) -> str:
    name = f"{tokenizer.name_or_path or 'without a path'} ({type(tokenizer).__name__})"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        return name
    pipeline = json.loads(backend.to_str())
    keys = (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders"))
    parts = [
        f"{key} {' + '.join(part['type'] for part in _parts(pipeline[key], inner)) or 'none'}"
        for key, inner in keys
    ]
    return f"{name}: {', '.join(parts)}"
