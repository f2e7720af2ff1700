# SPDX-License-Identifier: Apache-2.0
"""What a policy earns on a manifest without looking at a frame.

    python -m resources_servers.sav_tracks.baselines rows.jsonl

oracle    the true boxes (`pt`: the centre of each true box)
absent    every object absent in every frame
whole     the whole frame as every box (`pt`: the frame's centre)
centre    a box of half the frame's sides in its middle (`pt`: as `whole`)
still     the box that the prompt shows, in every frame (`pt`: its centre); as `centre` where the prompt shows none
empty     no answer
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from resources_servers.sav_tracks.answer import Shape
from resources_servers.sav_tracks.scoring import score_answer
from resources_servers.sav_tracks.truth import Task
from resources_servers.sav_tracks.validate import RowError, read_rows

_WHOLE, _CENTRE = [0, 0, 1000, 1000], [250, 250, 750, 750]

# the box of an object in a frame, or None for its absence
_Place = Callable[[dict[str, Any], int], list[int] | None]


def _still(item: dict[str, Any], _: int) -> list[int]:
    shown = item.get("prompt_frame")
    return _CENTRE if shown is None else item["boxes"][shown]


_PLACES: dict[str, _Place] = {
    "oracle": lambda item, frame: item["boxes"][frame],
    "absent": lambda item, frame: None,
    "whole": lambda item, frame: _WHOLE,
    "centre": lambda item, frame: _CENTRE,
    "still": _still,
}


def baselines(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """`accuracy`, `format` and `reward` of each baseline, each the mean over the rows' `verifier_metadata`."""
    rows = list(rows)
    answers = {name: [_answer(row, place) for row in rows] for name, place in _PLACES.items()}
    answers["empty"] = [""] * len(rows)
    found = {}
    for name, texts in answers.items():
        scores = [
            score_answer(text, row, region_metrics=False) for text, row in zip(texts, rows, strict=True)
        ]
        found[name] = {
            part: sum(getattr(score, part) for score in scores) / len(scores)
            for part in ("accuracy", "format", "reward")
        }
    return found


def _answer(row: dict[str, Any], place: _Place) -> str:
    """The answer that puts each object where `place` says."""
    shape = Task(row["task"]).shape
    tracks = []
    for item in row["objects"]:
        boxes = [place(item, frame) for frame in range(row["num_frames"])]
        frames = [
            {"frame": frame, "visible": False}
            if box is None
            else {"frame": frame, shape.value: box if shape is Shape.BOX else _middle(box)}
            for frame, box in enumerate(boxes)
        ]
        tracks.append({"id": item["id"], "frames": frames})
    return json.dumps({"tracks": tracks})


def _middle(box: list[int]) -> list[int]:
    return [(box[0] + box[2]) // 2, (box[1] + box[3]) // 2]


def main(arguments: list[str] | None = None) -> int:
    """Command line; 2 with one line on standard error for bad input."""
    parser = argparse.ArgumentParser(description="What a policy earns on sav_tracks rows without looking.")
    parser.add_argument("manifest", type=Path)
    options = parser.parse_args(arguments)
    try:
        rows = list(read_rows(options.manifest))
    except (OSError, RowError) as error:
        parser.exit(2, f"{error}\n")
    print(f"{len(rows)} rows\n\n| baseline | accuracy | format | reward |\n|---|---|---|---|")
    for name, values in baselines(rows).items():
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values.values()) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
