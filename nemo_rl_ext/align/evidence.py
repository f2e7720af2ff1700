# SPDX-License-Identifier: Apache-2.0
"""What is known of a turn's media beside its ids: the engine's receipt, and the request that the runs come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_ext.align.families.family import Geometry
from nemo_rl_ext.align.grids import Grid, Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.runs import PlaceholderRuns, RunKind
from nemo_rl_ext.align.verdict import Fault, Reason


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the engine itself said of one media item of a request; every field may be unknown.

    `grid` and `tubelets` are what its processor chose, `frames` the indices of a clip's frames. `runs` are (offset,
    length) of the tokens that got the item's features, counted in the turn's own ids. `served` is the digest of the
    decoded pixels that made the tensors it used, as `MediaItem.digest` is. `named` says that a client gave the item an
    identity of its own, under which the engine may hold other pixels: such an item proves nothing by name.
    """

    grid: Grid | None = None
    tubelets: int | None = None
    frames: tuple[int, ...] | None = None
    runs: tuple[tuple[int, int], ...] | None = None
    served: str = ""
    named: bool = False

    def fits(self, geometry: Geometry) -> bool:
        """Whether a geometry is what the engine said, as far as it said anything."""
        return self.grid in (None, geometry.grid) and self.tubelets in (None, geometry.tubelets)


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The request that a turn's runs come from, as far as it is known; what settles ties without a receipt.

    `sizes` are the (height, width) of every image of the request in prompt order, `first` the position of the turn's
    first image among them, `lengths` the run lengths of all of them where they are known, and `max_model_len` the
    engine's context length. Only a request whose images were sized together says anything: with a processor cache an
    image keeps the grid of an earlier request, and none should be given.
    """

    max_model_len: int
    sizes: tuple[Size, ...]
    first: int = 0
    lengths: tuple[int, ...] | None = None


def placement_fault(runs: PlaceholderRuns, evidence: Sequence[Evidence]) -> Fault | None:
    """The first item whose features the engine laid elsewhere than on whole runs, or None."""
    spans = {(run.offset, run.length) for run in runs if run.kind is RunKind.WRAPPED}
    for place, item in enumerate(evidence):
        stray = [span for span in item.runs or () if span not in spans]
        if stray:
            offset, length = stray[0]
            return Fault(
                Reason.FEATURES_MISPLACED,
                f"the engine laid features of medium {place} on tokens {offset} to {offset + length - 1}, which are "
                "no placeholder run",
            )
    return None


def count_fault(items: Sequence[MediaItem], evidence: Sequence[Evidence]) -> Fault | None:
    """Media that the request lacks or has too many of, or None where the numbers agree."""
    if len(items) == len(evidence):
        return None
    served = [item.served for item in evidence]
    numbers = f"{len(evidence)} media in the request, {len(items)} in the row"
    if len(evidence) < len(items):
        gone = [item.source for item in items if item.digest and item.digest not in served]
        return Fault(Reason.MEDIA_GONE, numbers + (f"; {gone[0]} is not among them" if gone else ""))
    known = {item.digest for item in items}
    added = [place for place, digest in enumerate(served) if digest and digest not in known]
    return Fault(Reason.MEDIA_ADDED, numbers + (f"; the request's medium {added[0]} is new" if added else ""))


def identity_faults(items: Sequence[MediaItem], evidence: Sequence[Evidence]) -> list[Fault | None]:
    """Per item why the engine's pixels are not its own, where both are known."""
    places: dict[str, int] = {}
    for place, said in enumerate(evidence):
        if said.served and not said.named:
            places.setdefault(said.served, place)
    held = {item.digest: item for item in items if item.digest}
    faults: list[Fault | None] = []
    for item, said in zip(items, evidence, strict=True):
        if not _comparable(item, said) or said.served == item.digest:
            faults.append(None)
        elif item.digest in places and said.served in held:
            faults.append(
                Fault(
                    Reason.ORDER_SUSPECT,
                    f"the engine had {held[said.served].source} here, and this one at place {places[item.digest]}",
                )
            )
        elif said.served in held:
            faults.append(
                Fault(Reason.MEDIA_GONE, f"the engine had {held[said.served].source} here once more")
            )
        else:
            faults.append(Fault(Reason.CONTENT_CHANGED, other_pixels(item, said)))
    return faults


def _comparable(item: MediaItem, said: Evidence) -> bool:
    """Whether both digests are known, and are those of one choice of frames."""
    same_frames = item.kind == "image" or said.frames == item.frame_indices
    return bool(said.served and item.digest and same_frames and not said.named)


def other_pixels(item: MediaItem, said: Evidence) -> str:
    """What tells the engine's pixels and the item's own apart."""
    return (
        f"the engine's pixels have the digest {said.served[:12]}, those of {item.source} {item.digest[:12]}"
    )
