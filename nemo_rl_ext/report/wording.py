# SPDX-License-Identifier: Apache-2.0
"""Verdicts and reasons in plain words, for readers who do not know this package."""

from __future__ import annotations

from nemo_rl_ext.align.verdict import Reason

WHY = {
    Reason.RESIZED: "The engine shared its token budget among the images and gave this one another size than the "
    "training processor would have.",
    Reason.FRAMES_RESAMPLED: "The engine used other frames of the clip than the training side had sampled.",
    Reason.EARLIER_TURN_RESIZED: "A later turn made the engine shrink an image of an earlier turn.",
    Reason.AMBIGUOUS_GRID: "Two patch grids explain the image's tokens equally well, and nothing tells them apart.",
    Reason.RUN_COUNT: "The prompt holds another number of placeholder runs than the row has media.",
    Reason.INFEASIBLE_LENGTH: "No patch budget gives an image of this size so many tokens.",
    Reason.ORDER_SUSPECT: "The runs would fit the media in another order, too, and nothing proves this one.",
    Reason.BARE_CONTEXT: "A media token stands in the text without any media.",
    Reason.SAMPLED_CONTEXT: "The policy sampled a media token.",
    Reason.UNEXPANDED_IDS: "The ids are the prompt as it was sent, not as the engine expanded it.",
    Reason.DOUBLY_EXPANDED: "A prompt that the engine had expanded was expanded once more.",
    Reason.TRUNCATED_RUN: "A placeholder run was cut off.",
    Reason.EMPTY_RUN: "An image was given no tokens at all.",
    Reason.CAPTURE_DISAGREES: "The grid that the engine recorded is none that this medium has with this run.",
    Reason.CONTENT_CHANGED: "The engine saw other pixels under this name.",
    Reason.MEDIA_GONE: "A medium of the row was not in the request that was generated from.",
    Reason.MEDIA_ADDED: "The request that was generated from has media that the row does not know.",
    Reason.FEATURES_MISPLACED: "The engine laid a medium's features on tokens outside its run.",
    Reason.PRUNED_VIDEO: "The engine pruned tokens of a video.",
    Reason.TUBELET_COUNT: "The clip has another number of tubelets in the prompt than its frames make.",
    Reason.FRAME_GRID: "The tubelets of one clip have different lengths.",
    Reason.FRAME_TIMES: "The timestamps in the prompt are not times of this clip's frames.",
    Reason.MIXED_SIZES: "The engine gave the row's images several sizes, and this training backend takes one size "
    "only.",
    Reason.PREVENTION_FAILED: "The engine re-sized an image although the run's limits were chosen to prevent it.",
    Reason.FRAMES_UNKNOWN: "The ids do not name the clip's frames, and nothing else does.",
    Reason.DECODE_FAILED: "The file could not be decoded.",
    Reason.WORKER_DIED: "The aligner process died twice over this row.",
    Reason.GENERATION_FAILED: "The engine refused this row: nothing was sampled for it.",
    Reason.CONTEXT_OUTGROWN: "A later turn of the conversation no longer fitted the engine's context; it ended there.",
    Reason.OVERLONG_FILTERED: "An answer or the conversation ran into its limit, and the run masks those.",
}
"""What happened, one sentence per reason; `Reason.advice` says what to do about it."""

REPAIRS = {reason.value for reason in Reason if reason.trains}
"""Names of the reasons that leave the row in training; all others mask it."""

REFUSED = Reason.GENERATION_FAILED.value
"""Name of the reason of rows that the engine refused: there was nothing to prove."""


def why(reason: str) -> str:
    """The sentence of a reason by its name; a name that is not known here stands for itself."""
    try:
        return WHY[Reason(reason)]
    except ValueError:
        return reason


def advice(reason: str) -> str:
    """What to do about a reason, by its name."""
    try:
        return Reason(reason).advice
    except ValueError:
        return ""
