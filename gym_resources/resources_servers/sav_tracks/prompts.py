# SPDX-License-Identifier: Apache-2.0
"""The words of a row: what the policy is told about the frames, the objects and the form of its answer."""

from typing import Any

from resources_servers.sav_tracks.answer import Shape
from resources_servers.sav_tracks.truth import Task

_PLACE = {
    Shape.BOX: 'a box "box": [x1, y1, x2, y2] (left, top, right, bottom)',
    Shape.POINT: 'a point "point": [x, y] that lies on the object',
}
_EXAMPLE = {Shape.BOX: '"box": [105, 220, 340, 615]', Shape.POINT: '"point": [222, 418]'}


def instruction(task: Task, *, num_frames: int, objects: list[dict[str, Any]]) -> str:
    """The question that follows the media; `objects` are the row's ground-truth objects.

    For `box` and `pt` each object is introduced by its name, or, where SA-V gives none, by its box in the frame
    `prompt_frame`, which is then not scored. For `ref` only the number of objects is told.
    """
    frames = f"frames 0 to {num_frames - 1}" if num_frames > 1 else "frame 0"
    if task is Task.REF:
        count = f"{len(objects)} objects" if len(objects) > 1 else "1 object"
        subject = f"Find the {count} tracked through {frames}; give each an id."
    else:
        subject = f"Track these objects through {frames}:\n" + "\n".join(_introduce(item) for item in objects)
    return (
        f"{subject}\n"
        f'For every frame give either {_PLACE[task.shape]}, or "visible": false when the object cannot be seen. '
        "Coordinates are integers from 0 to 1000, measured from the top left corner across the whole frame. "
        "Answer with one JSON object of this form and nothing after it:\n"
        f'{{"tracks": [{{"id": "1", "frames": [{{"frame": 0, {_EXAMPLE[task.shape]}}}, '
        '{"frame": 1, "visible": false}]}]}'
    )


def frame_times(times: list[float]) -> str:
    """Where the frames lie in a video, for rows that carry the video itself."""
    return "Frames of this video: " + ", ".join(f"{i} at {t:.2f} s" for i, t in enumerate(times)) + "."


def _introduce(item: dict[str, Any]) -> str:
    if item.get("name"):
        return f'- id "{item["id"]}": {item["name"]}'
    shown = item["prompt_frame"]
    return f'- id "{item["id"]}": the object inside the box {item["boxes"][shown]} of frame {shown}'
