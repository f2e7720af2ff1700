# SPDX-License-Identifier: Apache-2.0
import json
from collections import Counter

import numpy as np
import pytest
from resources_servers.caption_qa import convert, validate
from resources_servers.caption_qa.balance import kept_questions
from resources_servers.caption_qa.convert import caption_row

FRAME = {"type": "input_image", "image_url": "data:image/jpeg;base64,", "detail": "auto"}


def tracks_row(*objects):
    content = [FRAME, {"type": "input_text", "text": "Find the objects."}]
    metadata = {"row_id": "r", "task": "ref", "num_frames": 2, "objects": list(objects)}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        "verifier_metadata": metadata,
    }


def answers(row):
    return {q["id"]: q["choices"][q["answer"]] for q in row["verifier_metadata"]["questions"]}


def test_questions_are_read_off_the_tracks():
    disc = {"id": "0", "name": "red disc", "boxes": [[0, 0, 100, 100], [600, 50, 700, 150]]}
    square = {"id": "1", "name": "blue square", "boxes": [[500, 800, 600, 900], None]}
    row = caption_row(tracks_row(disc, square))
    assert answers(row) == {
        "0-hidden": "No, it is always visible",
        "0-direction": "To the right",
        "1-hidden": "Yes, for part of the time",
        "leftmost": "The red disc",
    }
    content = row["responses_create_params"]["input"][0]["content"]
    assert content == [FRAME, {"type": "input_text", "text": convert.INSTRUCTION}]
    assert row["agent_ref"]["name"] == "caption_qa_simple_agent"


@pytest.mark.parametrize(
    ("end", "direction"),
    [([400, 0, 500, 100], "Upwards"), ([400, 900, 500, 1000], "Downwards"), ([0, 450, 100, 550], "To the left"),
     ([420, 420, 520, 520], None), ([700, 750, 800, 850], None)],
)  # fmt: skip
def test_a_doubtful_direction_is_not_asked(end, direction):
    item = {"id": "0", "name": "disc", "boxes": [[400, 450, 500, 550], end]}
    assert answers(caption_row(tracks_row(item))).get("0-direction") == direction


def test_objects_that_share_a_name_are_not_asked_about():
    disc = {"id": "0", "name": "White  dog", "boxes": [[0, 0, 100, 100], [600, 50, 700, 150]]}
    twin = {"id": "1", "name": "white dog", "boxes": [[500, 800, 600, 900], None]}
    cat = {"id": "2", "name": "cat", "boxes": [[0, 0, 9, 9]] * 2}
    assert set(answers(caption_row(tracks_row(disc, twin, cat)))) == {"2-hidden"}
    assert caption_row(tracks_row(disc, twin)) is None


def test_of_each_kind_as_many_questions_are_kept_as_have_the_opposite_answer():
    def row(number, **answers):
        questions = [
            {"id": f"{i}-{kind}", "answer": answer} for i, (kind, answer) in enumerate(answers.items())
        ]
        return {"row_id": f"r{number}", "questions": questions}

    rows = [row(i, hidden=0, direction=2) for i in range(30)] + [
        row(i, hidden=1, direction=3) for i in range(30, 40)
    ]
    rows += [row(40, direction=1)]
    kept = kept_questions(rows)
    answers = Counter(
        (item["id"].rpartition("-")[2], item["answer"])
        for row in rows
        for item in row["questions"]
        if (row["row_id"], item["id"]) in kept
    )
    assert answers == {("hidden", 0): 10, ("hidden", 1): 10, ("direction", 2): 10, ("direction", 3): 10}
    assert kept == kept_questions(rows[::-1])


def test_rows_that_keep_no_question_are_left_out(tmp_path):
    still = {"id": "0", "name": "disc", "boxes": [[0, 0, 9, 9]] * 2}
    gone = {"id": "0", "name": "disc", "boxes": [[0, 0, 9, 9], None]}
    rows = [caption_row(tracks_row(item)) for item in (still, gone, still)]
    for number, row in enumerate(rows):
        row["verifier_metadata"]["row_id"] = f"r{number}"
    out = tmp_path / "new" / "rows.jsonl"
    assert convert.write_balanced(iter(rows), out) == 2
    assert [path.name for path in out.parent.iterdir()] == ["rows.jsonl"]
    assert (
        len([answer for row in map(json.loads, out.read_text().splitlines()) for answer in answers(row)]) == 2
    )


def test_rows_without_names_or_without_a_clear_order_ask_nothing_about_it():
    assert caption_row(tracks_row({"id": "0", "boxes": [[0, 0, 9, 9]] * 2})) is None
    one = {"id": "0", "name": "a", "boxes": [[0, 0, 9, 9]] * 2}
    assert "leftmost" not in answers(caption_row(tracks_row(one, {**one, "id": "1", "name": "b"})))
    hidden = {"id": "1", "name": "b", "boxes": [None, [900, 0, 909, 9]]}
    assert "leftmost" not in answers(caption_row(tracks_row(one, hidden)))


def test_the_command_converts_a_folder_and_the_validator_accepts_it(tmp_path, capsys):
    synthetic = pytest.importorskip(
        "resources_servers.sav_tracks.synthetic", reason="uses sav_tracks' converter"
    )
    pytest.importorskip("decord", reason="reads videos (pip install decord2)")
    pytest.importorskip("cv2", reason="writes the synthetic video")
    synthetic._write_video(tmp_path / "clip.mp4", np.zeros((9, 96, 128, 3), dtype=np.uint8))
    arguments = [
        "--num-videos",
        "2",
        "--num-frames",
        "24",
        "--height",
        "96",
        "--clip",
        str(tmp_path / "clip.mp4"),
    ]
    synthetic.main([str(tmp_path / "set"), *arguments])
    out = tmp_path / "rows.jsonl"
    names = str(tmp_path / "set" / "names.json")
    assert (
        convert.main([str(tmp_path / "set"), "--names", names, "--media", "inline", "--out", str(out)]) == 0
    )
    assert validate.main([str(out)]) == 0
    assert "2 rows can be scored" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        convert.main([str(tmp_path), "--names", str(tmp_path / "none.json"), "--out", str(out)])
    assert caught.value.code == 2


def test_the_validator_names_file_line_and_row(tmp_path, make_row, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"agent_ref": {"name": "other_agent"}},
        {"agent_ref": {"name": validate.AGENT}, "verifier_metadata": make_row()},
        {"verifier_metadata": make_row(row_id="second", questions=[])},
    ]
    path.write_text("\n".join(map(json.dumps, rows[:2])) + "\n\n")
    assert validate.validate_file(path) == 1
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(validate.RowError, match="rows.jsonl:3: row 'second': questions: expected a list"):
        validate.validate_file(path)
    with pytest.raises(SystemExit) as caught:
        validate.main([str(path)])
    assert caught.value.code == 2 and "rows.jsonl:3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ":1: not JSON"),
        ("3", ":1: expected an object"),
        ("{}", "row None: verifier_metadata"),
        ("", "no row for"),
    ],
)
def test_the_validator_refuses_what_is_no_manifest(tmp_path, content, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(validate.RowError, match=words):
        validate.validate_file(path)
