# SPDX-License-Identifier: Apache-2.0
import asyncio
import copy
import json
import logging

import pytest
from resources_servers.caption_qa import scoring
from resources_servers.caption_qa.questions import CANNOT_ANSWER, Question, QuestionError, read_questions
from resources_servers.caption_qa.scoring import JudgeSettings, read_caption, score_caption

FAST = JudgeSettings(backoff_s=0.0, timeout_s=5.0, max_caption_chars=100)


class FakeJudge:
    """Stands in for the judge at the network edge: picks the option with the wanted text from the prompt it is sent."""

    def __init__(self, wanted="blue", *, failures=0):
        self.wanted = wanted
        self.failures = failures
        self.prompts = []
        self.in_flight = self.most_in_flight = 0

    async def __call__(self, prompt):
        self.prompts.append(prompt)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        if self.failures:
            self.failures -= 1
            raise ConnectionError("refused")
        options = dict(line.split(". ", 1) for line in prompt.splitlines() if line[1:3] == ". ")
        return "Answer: " + next(letter for letter, text in options.items() if text == self.wanted)


def score(text, metadata, judge, **settings):
    return asyncio.run(score_caption(text, metadata, judge, settings=FAST, **settings))


def test_wrong_answers_are_subtracted(make_row):
    row = make_row(4)
    row["questions"][0]["answer"] = 0
    found = score("A blue disc.", row, FakeJudge())
    assert (found.accuracy, found.format, found.num_right, found.num_wrong) == (0.75, 1.0, 3, 1)
    assert found.net == (3 - 2) / 4  # of three choices a wrong one costs (3 + 1) / (3 - 1)
    assert found.reward_components == {"accuracy": 0.9 * 0.25, "format": 0.1}
    fields = json.loads(json.dumps(found.as_fields()))
    assert fields["reward"] == sum(fields["reward_components"].values())
    assert fields["judgements"][0] == {"id": "q0", "chosen": "blue", "right": False, "worth": -2.0}


@pytest.mark.parametrize("num_choices", range(2, 9))
def test_silence_is_worth_more_than_a_guess_and_less_than_being_right(num_choices):
    question = Question(id="q", text="?", choices=tuple("abcdefgh"[:num_choices]), answer=1)
    worths = [question.worth(choice) for choice in range(num_choices)]
    assert question.worth(None) == 0.0 < question.worth(1) == 1.0
    assert sum(worths) / num_choices == pytest.approx(-1)
    # worth saying from halfway between chance and certainty
    confidence = (1 + 1 / num_choices) / 2
    assert confidence + (1 - confidence) * min(worths) == pytest.approx(0)


def test_the_judge_sees_the_caption_and_no_answer(make_row):
    judge = FakeJudge()
    score("<think>secret plan</think> A blue disc.", make_row(1), judge)
    (prompt,) = judge.prompts
    assert "A blue disc." in prompt and "secret plan" not in prompt and "Colour number 0?" in prompt
    assert all(text in prompt for text in ("red", "blue", "green", CANNOT_ANSWER))


def test_cannot_answer_and_unusable_replies_are_counted_and_worth_nothing(make_row):
    found = score("x", make_row(2), FakeJudge(CANNOT_ANSWER))
    assert (found.accuracy, found.net, found.num_cannot_answer, found.error) == (0.0, 0.0, 2, None)
    assert found.reward == 0.1

    async def mumbles(_):
        return "I would rather not."

    found = score("x", make_row(2), mumbles)
    assert (found.net, found.num_unusable_replies, found.error) == (0.0, 2, None)


@pytest.mark.parametrize("reply", ["", "  ", "<think>The caption says", "<think>Answer: A</think>"])
def test_an_empty_or_cut_reply_is_asked_for_again_and_then_the_judge_s_failure(make_row, reply):
    replies = [reply, reply]

    async def recovers(prompt):
        return replies.pop() if replies else "blue"

    assert score("A blue disc.", make_row(1), recovers).num_right == 1

    async def never(_):
        return reply

    found = score("A blue disc.", make_row(1), never)
    assert (found.reward, found.error_class) == (0.0, "judge_unavailable") and "the reply" in found.error


@pytest.mark.parametrize(
    ("text", "caption"),
    [
        ("  A dog. ", "A dog."),
        ("<think>x</think>A dog.", "A dog."),
        ("<think>cut", None),
        ("", None),
        (" \n", None),
        (None, None),
        ("A dog \ud83d runs.", "A dog ? runs."),
        ("A dog \U0001f415 runs.", "A dog \U0001f415 runs."),
    ],
)
def test_the_caption_is_what_follows_the_reasoning(text, caption):
    assert read_caption(text) == caption


def test_no_caption_is_reward_zero_without_asking(make_row):
    judge = FakeJudge()
    found = score("", make_row(), judge)
    assert (found.reward, found.error, found.error_class) == (0.0, "no_caption", "answer")
    assert judge.prompts == []


def test_a_caption_beyond_the_cap_is_cut_and_loses_the_format_part(make_row):
    judge = FakeJudge()
    found = score("x" * 90 + "END " * 1000, make_row(1), judge)
    assert (found.accuracy, found.format, found.caption_chars) == (1.0, 0.0, 4089)
    assert len(judge.prompts[0]) < 1200


def test_a_transport_failure_is_retried_and_then_its_own_class(make_row, caplog):
    judge = FakeJudge(failures=2)
    assert score("A blue disc.", make_row(1), judge).accuracy == 1.0
    assert len(judge.prompts) == 3
    with caplog.at_level(logging.WARNING, logger="nemo_rl_ext.gym.caption_qa"):
        found = score("A blue disc.", make_row(2), FakeJudge(failures=5))
    assert found.error_class == "judge_unavailable" and found.num_questions == 2
    assert (
        "1 of 2 questions not judged: question q" in found.error and "ConnectionError: refused" in found.error
    )
    assert "row row-1" in caplog.text


def test_a_judge_that_hangs_is_given_up(make_row):
    async def hangs(_):
        await asyncio.Event().wait()

    settings = JudgeSettings(attempts=2, backoff_s=0.0, timeout_s=0.01)
    found = asyncio.run(score_caption("x", make_row(1), hangs, settings=settings))
    assert found.error_class == "judge_unavailable" and "TimeoutError" in found.error


def test_requests_in_flight_are_bounded(make_row):
    async def run():
        judge, slots = FakeJudge(), asyncio.Semaphore(3)
        await asyncio.gather(
            *(score_caption("x", make_row(5), judge, settings=FAST, slots=slots) for _ in range(20))
        )
        return judge

    judge = asyncio.run(run())
    assert len(judge.prompts) == 100 and judge.most_in_flight == 3


def test_our_own_mistake_is_reported_and_not_raised(make_row, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(scoring, "read_reply", broken)
    assert score("x", make_row(1), FakeJudge()).error_class == "internal"


def replace(row, path, value):
    target = row
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["row_id"], "", "row_id: expected a non-empty string"),
        (["questions"], [], "questions: expected a list of 1 to 64, got a list of 0"),
        (["questions"], "x", "questions: expected a list of 1 to 64, got a str"),
        (["questions", 1], 5, r"questions\[1\]: expected an object"),
        (["questions", 1, "id"], "q0", "ids must be unique"),
        (["questions", 1, "id"], 1, r"questions\[1\].id: expected a string"),
        (["questions", 1, "question"], " ", r"questions\[1\].question: expected a string"),
        (
            ["questions", 1, "question"],
            "x" * 2001,
            r"questions\[1\].question: expected a string of 1 to 2000",
        ),
        (["questions", 1, "question"], "a \ud83d", r"questions\[1\].question: expected a string"),
        (["questions", 1, "choices", 0], "\udc00", r"questions\[1\].choices: expected 2 to 8 non-empty"),
        (["questions", 1, "choices"], ["one"], r"questions\[1\].choices: expected 2 to 8"),
        (["questions", 1, "choices"], ["a", "A "], "must differ from each other"),
        (["questions", 1, "choices"], ["a", CANNOT_ANSWER], "must differ from each other"),
        (["questions", 1, "choices", 0], 3, r"questions\[1\].choices: expected 2 to 8 non-empty"),
        (["questions", 1, "answer"], 3, r"questions\[1\].answer: expected an index from 0 to 2"),
        (["questions", 1, "answer"], True, r"questions\[1\].answer"),
        (["questions", 1, "answer"], None, r"questions\[1\].answer"),
    ],
)
def test_bad_questions_say_which_field_and_score_zero(make_row, path, value, words):
    row = copy.deepcopy(make_row())
    replace(row, path, value)
    with pytest.raises(QuestionError, match=words):
        read_questions(row)
    found = score("x", row, FakeJudge())
    assert (found.reward, found.error_class) == (0.0, "ground_truth")


def test_metadata_that_is_no_object_is_refused():
    with pytest.raises(QuestionError, match="expected an object, got NoneType"):
        read_questions(None)
