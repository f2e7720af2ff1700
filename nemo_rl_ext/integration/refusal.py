# SPDX-License-Identifier: Apache-2.0
"""Verdicts that a recipe wants raised, wherever they arise: in the actor, and where static tensors are compared."""

from __future__ import annotations

from collections.abc import Iterable

from nemo_rl_ext.align.verdict import MediaAlignmentError, TurnReport, Verdict
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig


def raise_if_asked(reports: Iterable[TurnReport], settings: MediaAlignmentConfig) -> None:
    """Stop at the first report whose verdict `on_ambiguous` or `on_unalignable` wants raised.

    Raises:
        MediaAlignmentError: with the whole report: runs and lengths, the first that differs, frames and sizes.
    """
    asked = {
        verdict
        for verdict, action in (
            (Verdict.AMBIGUOUS, settings.on_ambiguous),
            (Verdict.UNALIGNABLE, settings.on_unalignable),
        )
        if action == "raise"
    }
    for report in reports:
        if report.verdicts() & asked:
            raise MediaAlignmentError(str(report))
