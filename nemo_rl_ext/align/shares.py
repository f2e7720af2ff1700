# SPDX-License-Identifier: Apache-2.0
"""Which runs of a turn belong to which media item: in order, tubelets distinguished by their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.timestamps import TubeletLabel
from nemo_rl_ext.align.wording import counted


@dataclass(frozen=True, kw_only=True)
class RunShare:
    """One item's runs: lengths in context tokens, and a video's labels where they were read."""

    lengths: tuple[int, ...]
    labels: tuple[TubeletLabel, ...] = ()


def share_runs(
    lengths: Sequence[int],
    labels: Sequence[TubeletLabel | None] | None,
    items: Sequence[MediaItem],
    counts: Sequence[int],
) -> list[RunShare] | str:
    """Hand the runs out to the items, or say why they cannot be.

    With labels a video takes every run from its frame 1 on, however many, and an image one run without a label.
    Without labels item i takes `counts[i]` runs.
    """
    if labels is None:
        if len(lengths) != sum(counts):
            return f"{counted(sum(counts), 'run')} expected, {len(lengths)} found"
        starts = [sum(counts[:index]) for index in range(len(counts))]
        return [
            RunShare(lengths=tuple(lengths[start : start + count]))
            for start, count in zip(starts, counts, strict=True)
        ]
    groups = _group(lengths, labels)
    kinds = [("video" if group.labels else "image") for group in groups]
    if kinds != [item.kind for item in items]:
        return (
            f"{_count([item.kind for item in items])} expected ({counted(sum(counts), 'run')}), the text around the "
            f"{counted(len(lengths), 'run')} describes {_count(kinds)}"
        )
    return groups


def _group(lengths: Sequence[int], labels: Sequence[TubeletLabel | None]) -> list[RunShare]:
    """Neighbouring runs whose frame numbers continue are one video; a run without a label is an image."""
    groups: list[RunShare] = []
    following = 0
    for length, label in zip(lengths, labels, strict=True):
        if label is None:
            groups.append(RunShare(lengths=(length,)))
            following = 0
        elif following and label.numbers[0] == following:
            last = groups[-1]
            groups[-1] = RunShare(lengths=(*last.lengths, length), labels=(*last.labels, label))
            following = label.numbers[-1] + 1
        else:
            groups.append(RunShare(lengths=(length,), labels=(label,)))
            following = label.numbers[-1] + 1
    return groups


def _count(kinds: Sequence[str]) -> str:
    images, videos = kinds.count("image"), kinds.count("video")
    return f"{counted(images, 'image')} and {counted(videos, 'video')}"


def label_problem(labels: Sequence[TubeletLabel], frames_per_tubelet: int) -> str:
    """Why these labels are not those of one whole video, or nothing: frames 1, 2, ... in full tubelets."""
    for place, label in enumerate(labels):
        if not label.whole:
            return f"the text before tubelet {place} is damaged before frame {label.numbers[0]}"
    numbers = [number for label in labels for number in label.numbers]
    if numbers != list(range(1, len(numbers) + 1)):
        return f"frames are numbered {numbers[:6]}... instead of from 1 without gaps"
    sizes = [len(label.numbers) for label in labels]
    if any(size != frames_per_tubelet for size in sizes[:-1]) or sizes[-1] > frames_per_tubelet:
        return f"tubelets of {sorted(set(sizes))} frames where {frames_per_tubelet} make a tubelet"
    return ""
