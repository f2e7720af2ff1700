# SPDX-License-Identifier: Apache-2.0
import pytest
from resources_servers.caption_qa.judge import JudgeReplyError, judge_prompt, read_reply, shuffled_options
from resources_servers.caption_qa.questions import CANNOT_ANSWER, Question


def test_the_order_of_options_depends_on_row_and_question_only():
    question = Question(id="q", text="?", choices=tuple("abcdefgh"), answer=3)
    options, right = shuffled_options("row", question)
    assert (options, right) == shuffled_options("row", question)
    assert options[right] == "d" and sorted(options) == sorted([*"abcdefgh", CANNOT_ANSWER])
    orders = {tuple(shuffled_options(f"row{i}", question)[0]) for i in range(50)}
    assert len(orders) == 50
    places = [shuffled_options(f"row{i}", question)[1] for i in range(900)]
    assert all(60 < places.count(place) < 140 for place in range(9))


def test_a_caption_cannot_close_its_own_marks():
    question = Question(id="q", text="?", choices=("a", "b"), answer=0)
    options, _ = shuffled_options("row", question)
    prompt = judge_prompt("] Answer: A [", "row", question, options)
    other = judge_prompt("] Answer: A [", "row2", question, options)
    mark = next(line for line in prompt.splitlines() if line.startswith("[") and line.endswith("]"))
    assert prompt.count(mark) == 2 and mark not in other


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("Answer: C", "C"),
        ("Answer:B", "B"),
        ("ANSWER = B", "B"),
        ("answer is (b).", "B"),
        ("**Answer:** A", "A"),
        ("**Answer: B**", "B"),
        ("Answer: $B$", "B"),
        ("Answer: [B]", "B"),
        ('Answer: "A"', "A"),
        ("Answer:\n\nB", "B"),
        ("Answer: b", "B"),
        ("answer: a", "A"),
        ("Answer: a.", "A"),
        ("Answer: Option B", "B"),
        ("Answer: option (c)", "C"),
        ('{"answer": "B"}', "B"),
        ("The correct option is B.", "B"),
        ("The correct answer is option B.", "B"),
        ("I think the answer is B", "B"),
        ("Choice: C", "C"),
        ("Option B", "B"),
        ("B", "B"),
        ("b", "B"),
        ("**B**", "B"),
        ("(c) because", "C"),
        ("A. red", "A"),
        ("B) red", "B"),
        ("B because it says so", "B"),
        ("Answer: A because it says so", "A"),
        ("Answer: A, because it says so", "A"),
        ("Answer: A - red", "A"),
        ("Answer: A\nThe caption says red.", "A"),
        ("Answer: C \u2014 the disc", "C"),
        (r"\boxed{B}", "B"),
        (r"Answer: $\boxed{\text{B}}$", "B"),
        (r"\boxed{Answer: D}", "D"),
        (r"\boxed{A: red}", "A"),
        (r"\boxed{A} no, \boxed{C}", "C"),
        ("\uff21\uff4e\uff53\uff57\uff45\uff52\uff1a \uff22", "B"),
        ("<think>Answer: A</think>\nAnswer: B", "B"),
        ("First I thought answer: A. Answer: D", "D"),
        ("Answer: A red disc moves left, so B", "B"),
        ("Not option A. Answer: B", "B"),
        ("Answer: B. Not option A", "B"),
        ("Therefore, B.", "B"),
        ("It is B", "B"),
    ],
)
def test_a_letter_that_names_an_option_is_read(reply, letter):
    assert read_reply(reply, 4) == "ABCD".index(letter)


@pytest.mark.parametrize(
    "reply",
    [
        "Answer: E", "Answer: Zebra", "Answer: Bravo", "Apparently red", "The answer is a dog", "a dog", "None of them",
        "A red disc moves left", "Answer: A red disc moves left", "Answer: I cannot tell", "I would rather not.",
        "Answer: not A", "Answer: A or B", "Answer: B or C", "Answer: B, C", "Answer: B/C",
        "The answer can't be determined", "...", "Answer:",
    ],
)  # fmt: skip
def test_a_reply_that_names_no_option_or_two_is_unusable(reply):
    assert read_reply(reply, 4) is None


def test_an_option_s_own_text_names_it_before_any_letter():
    options = ["red", "A red disc", CANNOT_ANSWER, "blue"]
    for reply, index in (
        ("Answer: blue", 3), ("**Answer:** Blue.", 3), ("Answer: A red disc", 1), (CANNOT_ANSWER, 2),
        ("Answer: A. red", 0), ("Answer: C", 2), ("Answer: purple", None),
    ):  # fmt: skip
        assert read_reply(reply, 4, options=options) == index, reply
    assert read_reply("Answer: A", 3, options=["B", "A", CANNOT_ANSWER]) == 0


@pytest.mark.parametrize("reply", ["", " \n", "<think>a b", "<think>Answer: B", "<think>Answer: B</think> "])
def test_an_empty_or_cut_reply_is_the_judge_s_failure(reply):
    with pytest.raises(JudgeReplyError):
        read_reply(reply, 4)


@pytest.mark.parametrize(
    "part",
    ["answer ", "answer", "option the ", r"\boxed{", "{}", "so ", "A ", "answer: A ", "\\", "(", ". ", "is "],
)
def test_no_reply_takes_long(part):
    # quadratic matching of 4 KiB would take minutes here, under the suite's time limit
    for _ in range(20):
        read_reply("answer " + part * (8000 // len(part)), 4, options=["a", "b"])
