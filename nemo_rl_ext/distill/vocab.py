# SPDX-License-Identifier: Apache-2.0
"""Whether student and teacher mean the same token by every id.

Equal sizes prove nothing: two swapped ids train the student on noise without a crash. The comparison is of
the whole id -> token map, added and special tokens included.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_ext.align.wording import counted

logger = logging.getLogger(__name__)


class VocabularyMismatch(ValueError):
    """Student and teacher do not map every id to the same token."""


@dataclass(frozen=True, kw_only=True)
class VocabularyDifference:
    """Ids that the two tokenizers read differently; ``None`` stands for an id without a token."""

    student_size: int
    teacher_size: int
    ids: tuple[tuple[int, str | None, str | None], ...]

    def __bool__(self) -> bool:
        return bool(self.ids)

    def describe(self, *, shown: int = 20) -> str:
        """One line per differing id, at most ``shown`` of them."""
        lines = [
            f"{counted(len(self.ids), 'id')} that differ (student has {self.student_size} tokens, teacher "
            f"{self.teacher_size}):"
        ]
        for token_id, student, teacher in self.ids[:shown]:
            lines.append(f"  id {token_id}: student {_show(student)}, teacher {_show(teacher)}")
        if len(self.ids) > shown:
            lines.append(f"  ... and {len(self.ids) - shown} more")
        return "\n".join(lines)


def _show(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def compare(student: Any, teacher: Any) -> VocabularyDifference:
    """Compare two transformers tokenizers id by id."""
    a, b = _by_id(student), _by_id(teacher)
    ids = sorted(i for i in a.keys() | b.keys() if a.get(i) != b.get(i))
    return VocabularyDifference(
        student_size=len(a), teacher_size=len(b), ids=tuple((i, a.get(i), b.get(i)) for i in ids)
    )


def _by_id(tokenizer: Any) -> dict[int, str]:
    tokens = {i: token for token, i in tokenizer.get_vocab().items()}
    # Added tokens shadow a vocabulary entry of the same id, and not every tokenizer lists them in its
    # vocabulary. Mistral's own kind has no added tokens, and a method that says so in this place.
    if isinstance(added_tokens := tokenizer.added_tokens_decoder, Mapping):
        tokens.update({i: added.content for i, added in added_tokens.items()})
    return tokens


def require_same(student: Any, teacher: Any, *, student_name: str, teacher_name: str) -> int:
    """Return the size of the shared vocabulary (highest id + 1).

    Raises:
        VocabularyMismatch: listing the ids that differ.
    """
    difference = compare(student, teacher)
    if difference:
        raise VocabularyMismatch(
            f"student {student_name} and teacher {teacher_name} do not share a vocabulary: "
            f"{difference.describe()}\n"
            "Distillation compares distributions id by id, so every id must be the same token on both sides; "
            "choose a teacher of the same tokenizer family."
        )
    for role in ("bos_token", "eos_token", "pad_token"):
        ours, theirs = getattr(student, role), getattr(teacher, role)
        if ours != theirs:
            logger.warning(
                "%s differs in role only: student %r, teacher %r; the student's is used", role, ours, theirs
            )
    return max(_by_id(student)) + 1


def require_width(name: str, *, width: int, vocab_size: int) -> None:
    """Refuse a model whose output layer is narrower than its tokenizer.

    A wider one is normal (rows padded to a round number); those rows name no token and are left out of the
    loss.

    Raises:
        VocabularyMismatch: with both numbers.
    """
    if width < vocab_size:
        raise VocabularyMismatch(
            f"{name}: the tokenizer names ids up to {vocab_size - 1}, but the model scores only {width} ids; "
            "the tokenizer files do not belong to this checkpoint"
        )
