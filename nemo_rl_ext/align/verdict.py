# SPDX-License-Identifier: Apache-2.0
"""What alignment concluded about each media item and turn, and how it says so."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nemo_rl_ext.align.grids import Grid, Size
from nemo_rl_ext.align.wording import counted

MediaKind = Literal["image", "video"]


class Verdict(enum.Enum):
    """The outcome for one media item."""

    MATCHED = "matched"
    """The static tensors already are what the engine saw."""
    REPAIRED = "repaired"
    """The engine's grid is proven and differs from the static one; the tensors were made again."""
    AMBIGUOUS = "ambiguous"
    """Several grids explain the run and nothing tells them apart; the row is masked."""
    UNALIGNABLE = "unalignable"
    """No grid explains the run, or the turn's structure contradicts its media; the row is masked."""


class GridSource(enum.Enum):
    """What proves a grid, best first."""

    RECEIPT = "receipt"
    """The engine's receipt names it, and names the very pixels that are trained on."""
    CAPTURED = "captured"
    """The engine's processor said so, and the item can have it with this run."""
    STATIC = "static"
    """The run has the static grid's length and no other grid does."""
    UNIQUE = "unique"
    """Exactly one reachable grid has the run's length."""
    REPLAYED = "replayed"
    """Every budget that reproduces the runs of the whole request names it."""


class Reason(enum.Enum):
    """Why a media item is not simply matched; `advice` says what a user can do about it."""

    RESIZED = "resized"
    AMBIGUOUS_GRID = "ambiguous_grid"
    RUN_COUNT = "run_count"
    INFEASIBLE_LENGTH = "infeasible_length"
    ORDER_SUSPECT = "order_suspect"
    BARE_CONTEXT = "bare_context"
    SAMPLED_CONTEXT = "sampled_context"
    UNEXPANDED_IDS = "unexpanded_ids"
    DOUBLY_EXPANDED = "doubly_expanded"
    TRUNCATED_RUN = "truncated_run"
    EMPTY_RUN = "empty_run"
    CAPTURE_DISAGREES = "capture_disagrees"
    CONTENT_CHANGED = "content_changed"
    MEDIA_GONE = "media_gone"
    MEDIA_ADDED = "media_added"
    FEATURES_MISPLACED = "features_misplaced"
    PRUNED_VIDEO = "pruned_video"
    TUBELET_COUNT = "tubelet_count"
    FRAME_GRID = "frame_grid"
    FRAME_TIMES = "frame_times"
    FRAMES_UNKNOWN = "frames_unknown"
    FRAMES_RESAMPLED = "frames_resampled"
    EARLIER_TURN_RESIZED = "earlier_turn_resized"
    MIXED_SIZES = "mixed_sizes"
    PREVENTION_FAILED = "prevention_failed"
    DECODE_FAILED = "decode_failed"
    WORKER_DIED = "worker_died"
    GENERATION_FAILED = "generation_failed"
    CONTEXT_OUTGROWN = "context_outgrown"
    OVERLONG_FILTERED = "overlong_filtered"

    @property
    def advice(self) -> str:
        return _ADVICE[self]

    @property
    def trains(self) -> bool:
        """Whether a row with this reason alone trains: its media were made again, or it ended early."""
        return self in (
            Reason.RESIZED,
            Reason.FRAMES_RESAMPLED,
            Reason.EARLIER_TURN_RESIZED,
            Reason.CONTEXT_OUTGROWN,
        )


_ADVICE = {
    Reason.RESIZED: "no action is needed: the tensors were made again on the engine's grid; give the engine a larger "
    "max_model_len, or fewer images per prompt, if the lower resolution is not wanted",
    Reason.AMBIGUOUS_GRID: "record the engine's grids (evidence: receipt), or crop the image away from "
    "a square",
    Reason.RUN_COUNT: "compare the prompt's media parts with the runs: a chat template that drops or repeats an "
    "image, or literal media tokens in the text, changes their number",
    Reason.INFEASIBLE_LENGTH: "check that engine and trainer read the same file and the same patch limits "
    "(min_num_patches, max_num_patches, patch_size)",
    Reason.ORDER_SUSPECT: "check the order of the media: the runs fit each other's images; some chat templates "
    "move images to the front; where the order is right, only the engine's receipt can prove it",
    Reason.BARE_CONTEXT: "find the text that carries a literal media token (`nemo-rl-ext census`) and escape it; in "
    "a turn that repeats earlier answers it may be one that the policy sampled",
    Reason.SAMPLED_CONTEXT: "ban media tokens from sampling (grpo.media_alignment.ban_media_tokens): the policy drew "
    "one in its answer",
    Reason.UNEXPANDED_IDS: "hand over the ids that the engine returns (prompt_token_ids), not those that were sent "
    "to it: these still have one token where the engine writes a whole run",
    Reason.DOUBLY_EXPANDED: "send the engine ids with one media token per item: a prompt that it had expanded before "
    "was expanded once more",
    Reason.TRUNCATED_RUN: "raise max_model_len or max_total_sequence_length, or shorten the prompt: a run was cut",
    Reason.EMPTY_RUN: "an image was given no tokens at all: check the engine's budget for this request",
    Reason.CAPTURE_DISAGREES: "the grid that the engine recorded is none that this medium has with this run: the "
    "record belongs to another request, or the medium is another one",
    Reason.CONTENT_CHANGED: "keep media as they are while a run reads them, or send them as data URLs: the engine saw "
    "other pixels under this name",
    Reason.MEDIA_GONE: "take the media from the agent's own requests: the one named above was not in the request that "
    "was generated from",
    Reason.MEDIA_ADDED: "take the media from the agent's own requests: the one that was generated from holds media "
    "that the row does not know",
    Reason.FEATURES_MISPLACED: "find the literal media token in this prompt (`nemo-rl-ext census`): the engine laid "
    "the features of a medium on tokens outside its run, which is a fault of the engine's that no count shows",
    Reason.PRUNED_VIDEO: "switch token pruning off (video_pruning_rate: 0): pruned tubelets cannot be trained on",
    Reason.TUBELET_COUNT: "compare the frames that were sampled on both sides (num_frames, fps, temporal patch size)",
    Reason.FRAME_GRID: "check video_target_num_patches and video_maintain_aspect_ratio on both sides",
    Reason.FRAME_TIMES: "compare the timestamps in the prompt with the clip's own timing: another decoder, frame "
    "rate or sampler was used",
    Reason.FRAMES_UNKNOWN: "record the engine's frames (evidence: receipt): the ids of this family's clips do not name "
    "them",
    Reason.FRAMES_RESAMPLED: "no action is needed: the frames were decoded again at the engine's timestamps",
    Reason.EARLIER_TURN_RESIZED: "no action is needed: a later turn made the engine shrink an earlier image, so the "
    "conversation trains as one sequence per prompt that the engine saw",
    Reason.MIXED_SIZES: "train with policy.megatron_cfg.enabled: true, or give the engine a context in which images "
    "keep their size",
    Reason.PREVENTION_FAILED: "find what the check at the start did not know (an agent that adds images or text, other "
    "limits in the engine), and pin the checkpoint lower or give the engine a larger max_model_len; "
    "grpo.media_alignment.prevent: false trains such rows on tensors that are made again",
    Reason.DECODE_FAILED: "replace or remove the file named above",
    Reason.GENERATION_FAILED: "fix or remove the row named above: nothing was sampled for it",
    Reason.CONTEXT_OUTGROWN: "no action is needed: the turns before it train; if conversations are to end, give the "
    "engine a larger max_model_len, or allow fewer turns or shorter answers; grpo.overlong_filtering masks such rows",
    Reason.OVERLONG_FILTERED: "no action is needed: grpo.overlong_filtering masks rollouts that ran into a limit",
    Reason.WORKER_DIED: "look for the aligner's last log lines: the row ended it twice (out of memory, or a file "
    "that crashes the decoder)",
}


class Fault(NamedTuple):
    """Why something is not proven: the reason, and the facts of this case."""

    reason: Reason
    detail: str


@dataclass(frozen=True, kw_only=True)
class MediaReport:
    """What was concluded about one media item of a turn.

    `expected` and `found` are run lengths in context tokens: one per image, one per video tubelet. `frames` are the
    indices of the frames that the engine used, where they were read from the rollout. `content_proven` says that the
    engine's receipt names the pixels themselves; without it the item is the request's by its place alone.
    """

    index: int
    kind: MediaKind
    size: Size
    source: str
    verdict: Verdict
    expected: tuple[int, ...]
    found: tuple[int, ...]
    static_grid: Grid | None = None
    grid: Grid | None = None
    grid_source: GridSource | None = None
    reason: Reason | None = None
    detail: str = ""
    num_frames: int = 1
    frames: tuple[int, ...] | None = None
    content_proven: bool = False

    @property
    def evidence(self) -> str:
        """What the verdict rests on, in a few words; empty where nothing is proven."""
        if self.grid_source is None:
            return ""
        grid = {
            "receipt": "",
            "captured": "",
            "static": "runs",
            "unique": "runs",
            "replayed": "replayed budget",
        }
        words = (
            ["receipt"] if self.content_proven or self.grid_source.value in ("receipt", "captured") else []
        )
        return " and ".join(dict.fromkeys(filter(None, (*words, grid[self.grid_source.value]))))

    def __str__(self) -> str:
        height, width = self.size
        frames = f", {self.num_frames} frames" if self.kind == "video" else ""
        text = (
            f"{self.kind} {self.index} ({self.source}, height {height} x width {width}{frames}): "
            f"{self.verdict.value}, expected runs {_lengths(self.expected)}, found {_lengths(self.found)}"
        )
        if self.grid is not None and self.grid_source is not None:
            text += f", grid {self.static_grid} -> {self.grid} ({self.grid_source.value})"
        return text + (f"; {self.detail}" if self.detail else "")


@dataclass(frozen=True, kw_only=True)
class TurnReport:
    """What was concluded about one turn of a rollout.

    `found` holds the lengths of all runs of the turn, `expected` what the static processor would have written.
    A neutral turn carries count-correct media without content, and its row's loss is zeroed.
    """

    row_id: str
    turn: int
    media: tuple[MediaReport, ...]
    expected: tuple[int, ...]
    found: tuple[int, ...]
    neutral: bool = False
    reason: Reason | None = None
    detail: str = ""
    repair_ms: float = field(default=0.0, compare=False)

    @property
    def num_context_tokens(self) -> int:
        return sum(self.found)

    @property
    def token_delta(self) -> int:
        """Context tokens that the static tensors would have had too many (positive) or too few (negative)."""
        return sum(self.expected) - sum(self.found)

    @property
    def repaired(self) -> bool:
        return not self.neutral and any(item.verdict is Verdict.REPAIRED for item in self.media)

    @property
    def first_mismatch(self) -> int | None:
        """Index of the first run whose length is not the static one, or None when all agree."""
        for index, (expected, found) in enumerate(zip(self.expected, self.found, strict=False)):
            if expected != found:
                return index
        same_count = len(self.expected) == len(self.found)
        return None if same_count else min(len(self.expected), len(self.found))

    def verdicts(self) -> set[Verdict]:
        """The verdicts of the turn's media; a neutral turn that blames no medium is unalignable as a whole."""
        found = {item.verdict for item in self.media}
        if self.neutral and not found & {Verdict.AMBIGUOUS, Verdict.UNALIGNABLE}:
            found.add(Verdict.UNALIGNABLE)
        return found

    def reasons(self) -> tuple[Reason, ...]:
        """Every reason of this turn, once for the turn itself or once per media item."""
        if self.reason is not None:
            return (self.reason,)
        return tuple(item.reason for item in self.media if item.reason is not None)

    def __str__(self) -> str:
        """The whole story in one paragraph: where, what was expected and found, and what to do."""
        head = (
            f"row {self.row_id!r}, turn {self.turn}: {counted(len(self.found), 'placeholder run')} "
            f"{_lengths(self.found)} ({counted(sum(self.found), 'context token')}) for "
            f"{counted(len(self.media), 'media item')} whose static runs are {_lengths(self.expected)} "
            f"({counted(sum(self.expected), 'feature')})"
        )
        if self.first_mismatch is not None:
            head += f"; first differing run: {self.first_mismatch}"
        parts = [head, *(str(item) for item in self.media)]
        for reason in dict.fromkeys(self.reasons()):
            detail = f"{self.detail}; " if self.detail and reason is self.reason else ""
            parts.append(f"{reason.value}: {detail}{reason.advice}")
        return ". ".join(parts)


class MediaAlignmentError(ValueError):
    """A turn that cannot be trained on as it is: where, what was expected, what was found, and what to do."""


def _lengths(values: tuple[int, ...]) -> str:
    """Run lengths for people: equal neighbours are counted, so a long clip stays one short list."""
    out: list[str] = []
    index = 0
    while index < len(values):
        end = index
        while end < len(values) and values[end] == values[index]:
            end += 1
        count, value = end - index, str(values[index])
        out.append(f"{count}x{value}" if count > 2 else ", ".join([value] * count))
        index = end
    return "[" + ", ".join(out) + "]"
