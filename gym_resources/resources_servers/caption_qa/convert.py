# SPDX-License-Identifier: Apache-2.0
"""Turn SA-V videos and annotations into caption rows whose questions are about where named objects are and go.

    python -m resources_servers.caption_qa.convert SAV_DIR --names names.json --out rows.jsonl

SA-V names no object, so the names come from a file. The frames are those of `sav_tracks.convert`, whose options for
media apply. Answers are read off the annotation; a question whose answer would be doubtful is not asked, and of each
kind of question as many are kept with the one answer as with its opposite (`balance.py`).
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resources_servers.caption_qa.balance import kept_questions
from resources_servers.caption_qa.questions import read_questions
from resources_servers.caption_qa.validate import AGENT
from resources_servers.sav_tracks.convert import ConvertConfig, Media, convert_folder, write_rows
from resources_servers.sav_tracks.truth import Task

INSTRUCTION = (
    "Describe what happens in these frames for somebody who cannot see them: which objects there are, where in the "
    "picture they are, how they move, and whether they are hidden for a while. Write plain text."
)
_CLEAR = 150  # grid units; a smaller difference is not worth a question


def caption_row(row: dict[str, Any]) -> dict[str, Any] | None:
    """The caption row for a `ref` row of `sav_tracks`, or None when no question has a clear answer."""
    truth = row["verifier_metadata"]
    names = Counter(_folded(item.get("name")) for item in truth["objects"])
    # of two objects with one name nobody could say which is asked about
    objects = [
        item for item in truth["objects"] if _folded(item.get("name")) and names[_folded(item["name"])] == 1
    ]
    questions = [question for item in objects for question in _questions_about(item)]
    if len(objects) > 1:
        questions += _questions_between(objects)
    if not questions:
        return None
    content = row["responses_create_params"]["input"][0]["content"][:-1]
    metadata = {"row_id": f"{truth['row_id']}_caption", "questions": questions}
    read_questions(metadata)
    return {
        "responses_create_params": {
            "input": [{"role": "user", "content": [*content, {"type": "input_text", "text": INSTRUCTION}]}]
        },
        "verifier_metadata": metadata,
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
    }


def _questions_about(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    name = item["name"]
    hidden = None in item["boxes"]
    yield {
        "id": f"{item['id']}-hidden",
        "question": f"Is the {name} out of sight for part of the time?",
        "choices": ["Yes, for part of the time", "No, it is always visible"],
        "answer": 0 if hidden else 1,
    }
    places = [_centre(box) for box in item["boxes"] if box is not None]
    across, down = (places[-1][axis] - places[0][axis] for axis in (0, 1))
    if max(abs(across), abs(down)) >= _CLEAR and not 0.6 < abs(across) / max(abs(down), 1) < 1.6:
        directions = ["To the left", "To the right", "Upwards", "Downwards"]
        moves = (across > 0) if abs(across) > abs(down) else 2 + (down > 0)
        yield {
            "id": f"{item['id']}-direction",
            "question": f"In which direction does the {name} move, mainly?",
            "choices": directions,
            "answer": int(moves),
        }


def _questions_between(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    first, second = objects[:2]
    if first["boxes"][0] is None or second["boxes"][0] is None:
        return
    gap = _centre(first["boxes"][0])[0] - _centre(second["boxes"][0])[0]
    if abs(gap) >= _CLEAR:
        names = [first["name"], second["name"]]
        yield {
            "id": "leftmost",
            "question": "Which of the two is further to the left at the beginning?",
            "choices": [f"The {name}" for name in names],
            "answer": int(gap > 0),
        }


def _folded(name: str | None) -> str:
    return " ".join((name or "").split()).casefold()


def _centre(box: list[int]) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def write_balanced(rows: Iterator[dict[str, Any]], out: Path) -> int:
    """Write the rows with their kept questions, those without one left out; returns the number of rows written.

    Which questions are kept depends on all rows, and these can be larger than memory: they wait in a file beside `out`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        waiting = Path(scratch) / "rows.jsonl"
        asked = []
        with waiting.open("w", encoding="utf-8") as file:
            for row in rows:
                asked.append(row["verifier_metadata"])
                file.write(json.dumps(row) + "\n")
        kept = kept_questions(asked)
        with waiting.open(encoding="utf-8") as file:
            return write_rows((row for row in map(json.loads, file) if _keep_questions(row, kept)), out)


def _keep_questions(row: dict[str, Any], kept: set[tuple[str, str]]) -> bool:
    """Drop the row's other questions in place; whether one is left."""
    metadata = row["verifier_metadata"]
    metadata["questions"] = [
        item for item in metadata["questions"] if (metadata["row_id"], item["id"]) in kept
    ]
    return bool(metadata["questions"])


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 on success, 2 with one line on standard error for bad input."""
    defaults = ConvertConfig(task=Task.REF)
    parser = argparse.ArgumentParser(description="Turn SA-V videos and annotations into caption rows.")
    parser.add_argument(
        "folder", type=Path, help="folder with {id}.mp4 and {id}_manual.json or {id}_auto.json"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--names", type=Path, required=True, help='JSON {"video id": {"object id": "name"}}')
    parser.add_argument("--media", type=Media, choices=list(Media), default=defaults.media)
    parser.add_argument("--source", choices=["manual", "auto"], default=defaults.source)
    parser.add_argument("--num-frames", type=int, default=defaults.num_frames)
    parser.add_argument("--frame-side", type=int, default=defaults.frame_side)
    parser.add_argument("--jpeg-quality", type=int, default=defaults.jpeg_quality)
    options = parser.parse_args(arguments)
    try:
        config = ConvertConfig(
            task=Task.REF,
            media=options.media,
            source=options.source,
            num_frames=options.num_frames,
            frame_side=options.frame_side,
            jpeg_quality=options.jpeg_quality,
            mask_side=0,
            names=json.loads(options.names.read_text(encoding="utf-8")),
        )
        rows = convert_folder(
            options.folder, frames_folder=options.out.parent / f"{options.out.stem}_frames", config=config
        )
        asked = (row for row in map(caption_row, rows) if row is not None)
        num_rows = write_balanced(asked, options.out)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    print(f"{num_rows} rows written to {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
