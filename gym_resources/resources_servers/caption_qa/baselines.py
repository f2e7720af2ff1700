# SPDX-License-Identifier: Apache-2.0
"""What a policy earns on a manifest without looking, given a judge that makes no mistake.

    python -m resources_servers.caption_qa.baselines rows.jsonl

oracle    states every right answer
silent    a caption that answers no question
empty     no caption
guess     states one choice of each question at random, in expectation
constant  one caption for all rows, made with all answers at hand: of questions with the same choices it states the
          most frequent answer; where a set of choices comes up fewer than ten times it can only guess

Ends with status 1 when guessing or a constant caption earns more than a silent one.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from resources_servers.caption_qa.questions import Question
from resources_servers.caption_qa.scoring import ACCURACY_WEIGHT, FORMAT_WEIGHT
from resources_servers.caption_qa.validate import RowError, read_rows

_SEEN_OFTEN = 10


def baselines(rows: Iterable[Iterable[Question]]) -> dict[str, dict[str, float]]:
    """`accuracy`, `net` and `reward` of each baseline, each the mean over the rows."""
    rows = [list(questions) for questions in rows]
    answers: dict[frozenset[str], Counter[str]] = defaultdict(Counter)
    for question in (question for questions in rows for question in questions):
        answers[_choices(question)][_folded(question.choices[question.answer])] += 1

    def guess(question: Question) -> tuple[float, float]:
        worths = [question.worth(choice) for choice in range(len(question.choices))]
        return 1 / len(worths), sum(worths) / len(worths)

    def constant(question: Question) -> tuple[float, float]:
        known = answers[_choices(question)]
        if known.total() < _SEEN_OFTEN:
            return guess(question)
        stated = [_folded(choice) for choice in question.choices].index(known.most_common(1)[0][0])
        return float(stated == question.answer), question.worth(stated)

    answered = {
        "oracle": lambda question: (1.0, question.worth(question.answer)),
        "silent": lambda question: (0.0, question.worth(None)),
        "empty": lambda question: (0.0, question.worth(None)),
        "guess": guess,
        "constant": constant,
    }
    found = {}
    for name, answer in answered.items():
        results = [[answer(question) for question in questions] for questions in rows]
        accuracy, net = (
            sum(sum(result[part] for result in row) / len(row) for row in results) / len(results)
            for part in (0, 1)
        )
        reward = ACCURACY_WEIGHT * net + FORMAT_WEIGHT * (name != "empty")
        found[name] = {"accuracy": accuracy, "net": net, "reward": reward}
    return found


def _choices(question: Question) -> frozenset[str]:
    return frozenset(map(_folded, question.choices))


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 when not looking pays, 2 with one line on standard error for bad input."""
    parser = argparse.ArgumentParser(description="What a policy earns on caption_qa rows without looking.")
    parser.add_argument("manifest", type=Path)
    options = parser.parse_args(arguments)
    try:
        rows = [questions.questions for questions in read_rows(options.manifest)]
    except (OSError, RowError) as error:
        parser.exit(2, f"{error}\n")
    found = baselines(rows)
    print(f"{len(rows)} rows, {sum(map(len, rows))} questions\n")
    print("| baseline | accuracy | net | reward |\n|---|---|---|---|")
    for name, values in found.items():
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values.values()) + " |")
    paying = [name for name in ("guess", "constant") if found[name]["reward"] > found["silent"]["reward"]]
    if paying:
        print(f"\n{' and '.join(paying)} earns more than silence: the questions are not balanced")
    return 1 if paying else 0


if __name__ == "__main__":
    raise SystemExit(main())
