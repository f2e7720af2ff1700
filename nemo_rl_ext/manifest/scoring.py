# SPDX-License-Identifier: Apache-2.0
"""How the embedded run scores a row by itself, and whether a manifest has anything to be scored by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nemo_rl_ext.manifest.loading import Manifest, ManifestError
from nemo_rl_ext.manifest.rows import ManifestRow

NO_ANSWERS = (
    "no row has anything to be scored by, so that every reward would be 0; give rows an answer in "
    "verifier_metadata.answer (a single letter for the embedded run's own scoring), or an agent in agent_ref whose "
    "verifier scores them"
)


def score(row: Any, text: str) -> float:
    """1.0 when the first letter of `text` is the row's answer, else 0.0; never raises.

    `row` is a `ManifestRow` or a mapping with `verifier_metadata`.
    """
    try:
        metadata = row["verifier_metadata"] if isinstance(row, dict) else row.verifier_metadata
        answer = metadata["answer"]
        return float(isinstance(answer, str) and answer != "" and text.strip()[:1] == answer)
    except (AttributeError, KeyError, TypeError):
        return 0.0


def has_answer(row: ManifestRow) -> bool:
    """Whether anything could score the row: an answer, or an agent with what its verifier reads."""
    return bool(row.verifier_metadata.get("answer")) or row.agent_ref is not None


def own_score_can_hit(row: ManifestRow) -> bool:
    """Whether the embedded run without a Gym can give the row another reward than 0."""
    answer = row.verifier_metadata.get("answer")
    if "answer" in row.verifier_metadata or row.agent_ref is None:
        return isinstance(answer, str) and len(answer) == 1 and not answer.isspace()
    return True


def require_answers(manifest: Manifest, *, own_score: bool) -> None:
    """Refuse a manifest that nothing can score; with `own_score`, one on which `score` is always 0.

    Raises:
        ManifestError: naming the manifest and what its rows need.
    """
    if not any(map(has_answer, manifest)):
        raise ManifestError(f"{manifest.path}: {NO_ANSWERS}")
    if own_score and not any(map(own_score_can_hit, manifest)):
        raise ManifestError(
            f"{manifest.path}: the embedded run compares the first letter of what was sampled with "
            f"verifier_metadata.answer, and no row's answer is a single letter: every reward would be 0; found "
            f"{_first_answer(manifest)!r}"
        )


def _first_answer(rows: Iterable[ManifestRow]) -> Any:
    return next((row.verifier_metadata["answer"] for row in rows if "answer" in row.verifier_metadata), None)
