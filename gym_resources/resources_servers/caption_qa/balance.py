# SPDX-License-Identifier: Apache-2.0
"""Keep as many questions with one answer as with its opposite, so that no answer is a good guess.

Most objects are always visible and most cameras follow what moves: without this, one constant caption would answer
most questions. Questions are paired by what a caption could say without looking: yes and no, left and right, up and
down, the larger object and the smaller one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any


def kept_questions(rows: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """`(row_id, question id)` of the questions to keep out of all rows' `verifier_metadata`.

    A question's kind is the part of its id after the last "-"; in each kind the choices 0 and 1 are opposites, and 2
    and 3. Of the more frequent answer of a pair those questions are kept that a hash of row and question picks, so that
    equal rows give equal questions and none is preferred for its place.
    """
    found: dict[tuple[str, int], dict[int, list[tuple[str, str]]]] = defaultdict(lambda: {0: [], 1: []})
    for row in rows:
        for question in row["questions"]:
            kind, answer = question["id"].rpartition("-")[2], question["answer"]
            found[kind, answer // 2][answer % 2].append((row["row_id"], question["id"]))
    kept = set()
    for pair in found.values():
        for names in pair.values():
            names.sort(key=lambda name: blake2b("\0".join(name).encode(), digest_size=8).digest())
            kept.update(names[: min(map(len, pair.values()))])
    return kept
