# SPDX-License-Identifier: Apache-2.0
"""Reward of one answer against one row's ground truth. Plain Python, NumPy and SciPy: no Gym, no server.

    object   = V * (num_visible + A * num_absent) / (num_visible + num_absent) * num_frames / (num_frames + extra)
    accuracy = sum(object) / (num_objects + extra tracks)
    reward   = 0.9 * accuracy + 0.1 * format

V is the mean quality over the frames that show the object (IoU of the boxes, or 1 for a point inside the mask), A the
share of the other frames in which the answer says explicitly that it is absent. Absence earns in proportion to V, so
claiming absence everywhere earns nothing, and silence about an absent object earns nothing either.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from resources_servers.sav_tracks.answer import Answer, Problem, Shape, Track, parse_answer
from resources_servers.sav_tracks.boxes import box_boundary_accuracy, box_region_similarity
from resources_servers.sav_tracks.regions import GRID, box_iou, grid_to_pixels
from resources_servers.sav_tracks.truth import (
    GroundTruth,
    GroundTruthError,
    Task,
    TrueObject,
    TruthCache,
    read_truth,
)
from scipy.optimize import linear_sum_assignment

logger = logging.getLogger("nemo_rl_ext.gym.sav_tracks")

ACCURACY_WEIGHT = 0.9
FORMAT_WEIGHT = 0.1
SUCCESS_THRESHOLDS = np.linspace(0, 1, 21)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Result of one answer; `metrics` are reported, not rewarded, `dropped` counts what broke which rule."""

    accuracy: float = 0.0
    format: float = 0.0
    metrics: dict[str, float]
    task: str | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    error_class: str | None = None

    @property
    def reward_components(self) -> dict[str, float]:
        """Weighted parts; `sum` of the values is the reward, bit for bit."""
        return {"accuracy": ACCURACY_WEIGHT * self.accuracy, "format": FORMAT_WEIGHT * self.format}

    @property
    def reward(self) -> float:
        """In [0, 1]."""
        return sum(self.reward_components.values())

    def as_fields(self) -> dict[str, Any]:
        """Flat JSON fields of a verify response."""
        return {
            "reward": self.reward,
            "reward_components": self.reward_components,
            "accuracy": self.accuracy,
            "format": self.format,
            "task": self.task,
            "dropped": dict(self.dropped),
            "error": self.error,
            "error_class": self.error_class,
            **self.metrics,
        }


def score_answer(
    text: Any, metadata: Any, *, cache: TruthCache | None = None, region_metrics: bool = True
) -> Score:
    """Score a policy's final text against a row's `verifier_metadata`; never raises.

    Ground truth that cannot be used gives reward 0 with `error` and error class `ground_truth`. An answer that cannot
    be read gives reward 0 with `error` naming the problem and error class `answer`. `region_metrics` switches the J&F
    report, the costly part for rows with masks.
    """
    try:
        truth = read_truth(metadata) if cache is None else cache.get(metadata)
        return _score(text, truth, region_metrics)
    except GroundTruthError as error:
        return Score(metrics={}, error=str(error), error_class="ground_truth")
    except Exception as error:
        # one exception in /verify ends a whole rollout batch, so even our own mistake must not leave this function
        logger.exception("scoring failed")
        return Score(metrics={}, error=f"{type(error).__name__}: {error}"[:500], error_class="internal")


def _score(text: Any, truth: GroundTruth, region_metrics: bool) -> Score:
    answer = parse_answer(
        text, shape=truth.task.shape, num_frames=truth.num_frames, num_objects=len(truth.objects)
    )
    quality = np.stack([_quality(item, answer.tracks, truth.task.shape) for item in truth.objects])
    scores = np.stack(
        [_object_scores(item, answer.tracks, quality[i]) for i, item in enumerate(truth.objects)]
    )
    matched = _match(truth, answer, scores)
    num_extra = answer.num_tracks - len(matched)
    format = _format(truth, answer)
    error = answer.problem.value if answer.problem else _why_nothing(answer) if format == 0 else None
    accuracy = sum(float(scores[i, j]) for i, j in matched.items()) / (len(truth.objects) + num_extra)
    return Score(
        accuracy=accuracy,
        format=format,
        metrics=_metrics(truth, answer, matched, quality, num_extra, region_metrics),
        task=truth.task.value,
        dropped={fault.value: count for fault, count in answer.dropped.items()},
        error=error,
        error_class="answer" if error else None,
    )


def _quality(item: TrueObject, tracks: tuple[Track, ...], shape: Shape) -> np.ndarray:
    """`[tracks, frames]` in [0, 1]: how well each track places the object; 0 where it is absent or not placed."""
    if not tracks:
        return np.zeros((0, len(item.visible)))
    coordinates = np.stack([track.coordinates for track in tracks])
    placed = np.stack([track.visible for track in tracks]) & item.visible
    if shape is Shape.BOX:
        return np.where(placed, box_iou(coordinates, item.boxes), 0.0)
    inside = np.zeros(placed.shape)
    for frame in np.flatnonzero(placed.any(axis=0)):
        mask = item.masks[frame]
        # the grid's last line is the frame's far edge, which belongs to the last pixel
        column = np.minimum(coordinates[:, frame, 0] * mask.width // GRID, mask.width - 1).astype(np.int64)
        row = np.minimum(coordinates[:, frame, 1] * mask.height // GRID, mask.height - 1).astype(np.int64)
        inside[:, frame] = mask.contains(row, column)
    return np.where(placed, inside, 0.0)


def _object_scores(item: TrueObject, tracks: tuple[Track, ...], quality: np.ndarray) -> np.ndarray:
    """`[tracks]` in [0, 1]."""
    if not tracks:
        return np.zeros(0)
    shown, hidden = item.visible & item.scored, ~item.visible & item.scored
    num_shown, num_hidden = int(shown.sum()), int(hidden.sum())
    placed_well = quality[:, shown].mean(axis=1)
    claims = np.stack([track.absent for track in tracks])[:, hidden].sum(axis=1)
    num_frames = len(item.visible)
    entries = num_frames + np.array([track.num_extra_entries for track in tracks])
    return placed_well * (num_shown + claims) / (num_shown + num_hidden) * num_frames / entries


def _match(truth: GroundTruth, answer: Answer, scores: np.ndarray) -> dict[int, int]:
    """True object -> track: by id where the prompt gave ids, by the best assignment where the policy chose them."""
    if truth.task is Task.REF:
        rows, columns = linear_sum_assignment(scores, maximize=True)
        return dict(zip(rows.tolist(), columns.tolist(), strict=True))
    first: dict[str | None, int] = {}
    for index, track in enumerate(answer.tracks):
        first.setdefault(track.id, index)
    return {i: first[item.id] for i, item in enumerate(truth.objects) if item.id in first}


def _format(truth: GroundTruth, answer: Answer) -> float:
    """1 for an answer that keeps every rule, 0.5 for one with something usable, else 0."""
    if not any(track.visible.any() or track.absent.any() for track in answer.tracks):
        return 0.0
    ids = [track.id for track in answer.tracks]
    asked = {item.id for item in truth.objects}
    complete = (
        len(answer.tracks) == answer.num_tracks
        and all(track.is_complete for track in answer.tracks)
        and all(ids)
        and len(set(ids)) == len(ids)
        and (len(ids) == len(asked) if truth.task is Task.REF else set(ids) == asked)
    )
    return 1.0 if complete else 0.5


def _why_nothing(answer: Answer) -> str:
    """The most frequent fault of an answer that has nothing usable in it."""
    return max(answer.dropped, key=answer.dropped.get).value if answer.dropped else "no_usable_track"


def _metrics(
    truth: GroundTruth,
    answer: Answer,
    matched: dict[int, int],
    quality: np.ndarray,
    num_extra: int,
    region_metrics: bool,
) -> dict[str, float]:
    placed, absences = [], []
    for i, item in enumerate(truth.objects):
        track = answer.tracks[matched[i]] if i in matched else None
        shown, hidden = item.visible & item.scored, ~item.visible & item.scored
        placed.append(quality[i, matched[i], shown] if track else np.zeros(int(shown.sum())))
        absences.append(track.absent[hidden] if track else np.zeros(int(hidden.sum())))
    qualities, claims = np.concatenate(placed), np.concatenate(absences)
    found = {
        "num_objects": len(truth.objects),
        "num_tracks": answer.num_tracks,
        "num_extra_tracks": num_extra,
        "unreadable": float(answer.problem not in (None, Problem.EMPTY)),
    }
    if truth.task is Task.PT:
        found["point_accuracy"] = float(qualities.mean())
    else:
        found["mean_iou"] = float(qualities.mean())
        found["success@0.5"] = float((qualities > 0.5).mean())
        found["success_auc"] = float((qualities[:, None] > SUCCESS_THRESHOLDS).mean())
    if claims.size:
        found["absence_recall"] = float(claims.mean())
    if region_metrics and truth.task.shape is Shape.BOX and truth.regions:
        found["J"], found["F"] = _region_scores(truth, answer, matched)
        found["J&F"] = (found["J"] + found["F"]) / 2
    return {f"{truth.task.value}/{name}": float(value) for name, value in found.items()}


def _region_scores(truth: GroundTruth, answer: Answer, matched: dict[int, int]) -> tuple[float, float]:
    """Mean J and F over the scored frames of the objects with masks.

    As in video object segmentation no prediction is an empty region: right where there is nothing to see.
    """
    regions, numbers = truth.regions
    nothing = np.zeros(truth.num_frames, dtype=bool)
    boxes, of_mask, num_right_absences, num_places = [], [], 0, 0
    for i, item in enumerate(truth.objects):
        if item.masks is None:
            continue
        track = answer.tracks[matched[i]] if i in matched else None
        placed = track.visible if track else nothing
        num_places += int(item.scored.sum())
        num_right_absences += int((item.scored & ~item.visible & ~placed).sum())
        frames = np.flatnonzero(item.scored & item.visible & placed)
        if frames.size:
            boxes.append(grid_to_pixels(track.coordinates[frames], regions.height, regions.width))
            of_mask.append(numbers[i, frames])
    similarity = accuracy = 0.0
    if boxes:
        pairs = np.concatenate(boxes), np.concatenate(of_mask)
        similarity = float(box_region_similarity(*pairs, regions).sum())
        accuracy = float(box_boundary_accuracy(*pairs, regions).sum())
    return (similarity + num_right_absences) / num_places, (accuracy + num_right_absences) / num_places
