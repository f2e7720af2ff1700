# SPDX-License-Identifier: Apache-2.0
"""The one error of this package, and its variant for faults that a retry may cure."""

from __future__ import annotations


class MediaDecodeError(ValueError):
    """A media reference cannot be turned into pixels; the data is at fault.

    Carries one string, so that it pickles across Ray. `infrastructure` says whether the fault lies in the
    machine or the network (retry it) rather than in the data (do not).
    """

    infrastructure = False


class MediaUnavailableError(MediaDecodeError):
    """The media may well be fine, but cannot be read now: a timeout, a server error, no free handle."""

    infrastructure = True


def shorten(ref: str, limit: int = 200) -> str:
    """`ref` fit for a message: a data URL keeps only its head, a long reference its two ends."""
    if ref[:5].lower() == "data:":
        head = ref.partition(",")[0][:40]
        return f"{head},... ({len(ref)} characters)"
    if len(ref) <= limit:
        return ref
    return f"{ref[: limit // 2]}...{ref[-limit // 2 :]}"


def describe(kind: str, source: str, where: str, problem: str, advice: str) -> str:
    """One sentence per fault: which media, which row, what is wrong, what to do."""
    place = f" ({where})" if where else ""
    return f"cannot use {kind} {shorten(source)!r}{place}: {problem}; {advice}"
