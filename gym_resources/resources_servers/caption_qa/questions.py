# SPDX-License-Identifier: Apache-2.0
"""A row's multiple-choice questions: read from `verifier_metadata`, checked, and what an answer to one is worth."""

from dataclasses import dataclass
from typing import Any

CANNOT_ANSWER = "The caption does not say."
MAX_QUESTIONS = 64
MAX_CHOICES = 8
MAX_TEXT = 2000


class QuestionError(ValueError):
    """A row's questions that cannot be asked; says which field, what was expected and what came."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One multiple-choice question; `answer` is the index of the right choice."""

    id: str
    text: str
    choices: tuple[str, ...]
    answer: int

    def worth(self, choice: int | None) -> float:
        """1 for the right choice, 0 for None (the caption does not say), -(k+1)/(k-1) for a wrong one of k.

        A blind guess is worth -1 on average whatever k is, silence nothing. With a confidence of t an answer is worth
        more than silence when t / (1 - t) exceeds the penalty, here when t > (1 + 1/k) / 2: halfway between chance and
        certainty. The rule of penalties by a confidence target is that of Kalai et al., "Why Language Models
        Hallucinate" (arXiv 2509.04664); formula scoring with 1/(k-1) would let a guess tie with silence.
        """
        if choice is None:
            return 0.0
        return 1.0 if choice == self.answer else -(len(self.choices) + 1) / (len(self.choices) - 1)


@dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """All questions of a row."""

    row_id: str
    questions: tuple[Question, ...]


def read_questions(metadata: Any) -> QuestionSet:
    """Check a row's `verifier_metadata`: `row_id` and `questions`, a list of `{"id", "question", "choices", "answer"}`.

    `answer` is the index of the right choice. Raises `QuestionError`.
    """
    if not isinstance(metadata, dict):
        raise QuestionError(f"verifier_metadata: expected an object, got {type(metadata).__name__}")
    row_id = metadata.get("row_id")
    if not _is_text(row_id):
        raise QuestionError(f"row_id: expected a non-empty string, got {type(row_id).__name__}")
    listed = metadata.get("questions")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_QUESTIONS:
        raise QuestionError(f"questions: expected a list of 1 to {MAX_QUESTIONS}, got {_describe(listed)}")
    questions = tuple(_read_question(item, f"questions[{i}]") for i, item in enumerate(listed))
    ids = [question.id for question in questions]
    if len(set(ids)) != len(ids):
        raise QuestionError(f"questions: ids must be unique, got {ids}")
    return QuestionSet(row_id=row_id, questions=questions)


def _read_question(item: Any, where: str) -> Question:
    if not isinstance(item, dict):
        raise QuestionError(f"{where}: expected an object, got {type(item).__name__}")
    for key in ("id", "question"):
        if not _is_text(item.get(key)):
            raise QuestionError(
                f"{where}.{key}: expected a string of 1 to {MAX_TEXT} characters, got {_describe(item.get(key))}"
            )
    choices = item.get("choices")
    if (
        not isinstance(choices, list)
        or not 2 <= len(choices) <= MAX_CHOICES
        or not all(map(_is_text, choices))
    ):
        raise QuestionError(
            f"{where}.choices: expected 2 to {MAX_CHOICES} non-empty strings, got {_describe(choices)}"
        )
    folded = {choice.strip().casefold() for choice in choices}
    if len(folded) != len(choices) or CANNOT_ANSWER.casefold() in folded:
        raise QuestionError(f"{where}.choices: must differ from each other and from {CANNOT_ANSWER!r}")
    answer = item.get("answer")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise QuestionError(f"{where}.answer: expected an index from 0 to {len(choices) - 1}")
    return Question(id=item["id"], text=item["question"], choices=tuple(choices), answer=answer)


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_TEXT:
        return False
    # a lone surrogate cannot be sent to the judge
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _describe(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"
