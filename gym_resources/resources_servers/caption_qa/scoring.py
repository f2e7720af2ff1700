# SPDX-License-Identifier: Apache-2.0
"""Score a caption by the multiple-choice questions that it lets a text-only judge answer. No Gym, no server.

    net    = mean over the questions of: 1 right, 0 "the caption does not say", -(k+1)/(k-1) wrong of k choices
    reward = 0.9 * net + 0.1 * format

The judge sees the caption and one question at a time, never the media. Options are shuffled per row and question and
one of them says that the caption does not tell. A blind guess is worth -1 on average, silence 0: see `Question.worth`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from resources_servers.caption_qa.judge import JudgeReplyError, judge_prompt, read_reply, shuffled_options
from resources_servers.caption_qa.questions import (
    CANNOT_ANSWER,
    MAX_QUESTIONS,
    Question,
    QuestionError,
    read_questions,
)

logger = logging.getLogger("nemo_rl_ext.gym.caption_qa")

ACCURACY_WEIGHT = 0.9
FORMAT_WEIGHT = 0.1

Ask = Callable[[str], Awaitable[str]]


class JudgeUnavailable(RuntimeError):
    """The judge could not be reached or gave no reply: infrastructure, not the policy's answer."""


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """How much of a caption is judged, and how often and how long the judge is asked.

    max_caption_chars: what lies beyond is not judged and costs the format part.
    attempts: tries per question before the judge counts as unavailable.
    backoff_s: seconds before the second try; doubles from try to try.
    timeout_s: seconds per try.
    """

    max_caption_chars: int = 4000
    attempts: int = 3
    backoff_s: float = 1.0
    timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True)
class CaptionScore:
    """Result of one caption; with `error_class` `judge_unavailable` the reward means nothing and must not be used.

    `accuracy` is the share of questions answered right, `net` what the answers are worth, wrong ones subtracted.
    """

    net: float = 0.0
    accuracy: float = 0.0
    format: float = 0.0
    num_questions: int = 0
    num_right: int = 0
    num_wrong: int = 0
    num_cannot_answer: int = 0
    num_unusable_replies: int = 0
    caption_chars: int = 0
    judgements: tuple[dict[str, Any], ...] = ()
    error: str | None = None
    error_class: str | None = None

    @property
    def reward_components(self) -> dict[str, float]:
        """Weighted parts; `sum` of the values is the reward, bit for bit."""
        return {"accuracy": ACCURACY_WEIGHT * self.net, "format": FORMAT_WEIGHT * self.format}

    @property
    def reward(self) -> float:
        """At most 1; below 0 when wrong answers outweigh right ones."""
        return sum(self.reward_components.values())

    def as_fields(self) -> dict[str, Any]:
        """Flat JSON fields of a verify response."""
        return {
            "reward": self.reward,
            "reward_components": self.reward_components,
            "net": self.net,
            "accuracy": self.accuracy,
            "format": self.format,
            "num_questions": self.num_questions,
            "num_right": self.num_right,
            "num_wrong": self.num_wrong,
            "num_cannot_answer": self.num_cannot_answer,
            "num_unusable_replies": self.num_unusable_replies,
            "caption_chars": self.caption_chars,
            "judgements": list(self.judgements),
            "error": self.error,
            "error_class": self.error_class,
        }


def read_caption(text: Any) -> str | None:
    """The caption in a policy's final text: what follows the reasoning; None when there is none."""
    if not isinstance(text, str):
        return None
    _, closed, final = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return None
    # a lone surrogate cannot be sent to the judge
    return final.encode("utf-8", "replace").decode().strip() or None


async def score_caption(
    text: Any,
    metadata: Any,
    ask: Ask,
    *,
    settings: JudgeSettings | None = None,
    slots: asyncio.Semaphore | None = None,
) -> CaptionScore:
    """Score a policy's final text against a row's `verifier_metadata`; never raises.

    `slots` bounds the requests in flight; waiting for one does not count against the time limit. `ask` sends one prompt
    to the judge and returns its text; any exception it raises is taken as a transport failure, retried, and in the end
    reported as error class `judge_unavailable` for the whole row, and so is an empty or cut reply. Questions that
    cannot be used give reward 0 and error class `ground_truth`, an answer without a caption reward 0 and error class
    `answer`. A reply that names no option counts as 'cannot answer'.
    """
    settings, slots = settings or JudgeSettings(), slots or asyncio.Semaphore(MAX_QUESTIONS)
    try:
        asked = read_questions(metadata)
    except QuestionError as error:
        return CaptionScore(error=str(error), error_class="ground_truth")
    caption = read_caption(text)
    if caption is None:
        return CaptionScore(num_questions=len(asked.questions), error="no_caption", error_class="answer")
    judged = caption[: settings.max_caption_chars]
    # all questions run to their end, so that no request outlives the row
    results = await asyncio.gather(
        *(_judge(judged, asked.row_id, question, ask, settings, slots) for question in asked.questions),
        return_exceptions=True,
    )
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        lost = f"{len(failures)} of {len(results)} questions not judged: {failures[0]}"[:500]
        logger.warning("row %s: %s", asked.row_id, lost)
        return CaptionScore(
            num_questions=len(results),
            caption_chars=len(caption),
            error=lost,
            error_class="judge_unavailable" if isinstance(failures[0], JudgeUnavailable) else "internal",
        )
    num_right = sum(result["right"] for result in results)
    return CaptionScore(
        net=sum(result["worth"] for result in results) / len(results),
        accuracy=num_right / len(results),
        format=float(len(caption) <= settings.max_caption_chars),
        num_questions=len(results),
        num_right=num_right,
        num_wrong=sum(result["worth"] < 0 for result in results),
        num_cannot_answer=sum(result["chosen"] == CANNOT_ANSWER for result in results),
        num_unusable_replies=sum(result["chosen"] is None for result in results),
        caption_chars=len(caption),
        judgements=tuple(results),
    )


async def _judge(
    caption: str, row_id: str, question: Question, ask: Ask, settings: JudgeSettings, slots: asyncio.Semaphore
) -> dict[str, Any]:
    options, _ = shuffled_options(row_id, question)
    prompt = judge_prompt(caption, row_id, question, options)
    for attempt in range(settings.attempts):
        if attempt:
            await asyncio.sleep(settings.backoff_s * 2 ** (attempt - 1))
        try:
            async with slots:
                # Gym's client repeats a refused connection for ever; the time limit is what ends it
                reply = await asyncio.wait_for(ask(prompt), settings.timeout_s)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"[:200]
            continue
        try:
            chosen = read_reply(reply, len(options), options=options)
        except JudgeReplyError as error:
            failure = str(error)
            continue
        text = None if chosen is None else options[chosen]
        worth = question.worth(None if text in (None, CANNOT_ANSWER) else question.choices.index(text))
        return {"id": question.id, "chosen": text, "right": worth > 0, "worth": worth}
    raise JudgeUnavailable(
        f"question {question.id}: {settings.attempts} attempts failed, the last with {failure}"
    )
