# SPDX-License-Identifier: Apache-2.0
"""Rows are read as Gym writes them, and give their media in prompt order."""

import pickle

import pytest
from pydantic import ValidationError

from nemo_rl_ext.manifest.rows import ManifestRow


def frame(url, source="clip", **keys):
    return {"type": "input_image", "image_url": url, "_is_video_frame": True, "_video_source": source, **keys}


def request(content, role="user"):
    return {"responses_create_params": {"input": [{"role": role, "content": content}]}}


def test_media_come_in_prompt_order_over_all_turns():
    picture = {"type": "input_image", "image_url": {"url": "b.png"}}
    clip = {"type": "input_video", "path": "d.mp4"}
    row = ManifestRow.from_json(
        {
            "id": "r1",
            "responses_create_params": {
                "input": [
                    {"role": "system", "content": "be brief"},
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": "a.png", "detail": "auto"},
                            {"type": "input_text", "text": "and"},
                            {"type": "input_video", "video_url": {"url": "clip.mp4"}},
                            frame("f0.png", _video_frame_index=0, _video_fps=2),
                            frame("f1.png", _video_frame_index=4, _video_fps=2.0),
                        ],
                    },
                ]
            },
            "turns": [
                [{"type": "function_call_output", "call_id": "1", "output": [picture]}],
                [{"role": "user", "content": "sure?"}, {"role": "user", "content": [clip]}],
            ],
        }
    )
    found = [(m.kind, m.ref, m.turn, m.message_index, m.part_index) for m in row.media_refs()]
    assert found == [
        ("image", "a.png", 0, 1, 0),
        ("video", "clip.mp4", 0, 1, 2),
        ("frame", "f0.png", 0, 1, 3),
        ("frame", "f1.png", 0, 1, 4),
        ("image", "b.png", 1, 0, 0),
        ("video", "d.mp4", 2, 1, 0),
    ]
    assert [m.frame_index for m in row.media_refs() if m.kind == "frame"] == [0, 4]
    assert {m.video_source for m in row.media_refs() if m.kind == "frame"} == {"clip"}
    assert row.num_turns == 3 and row.messages(1)[0].role == "tool"


def test_a_plain_string_is_a_user_message():
    row = ManifestRow.from_json({"responses_create_params": {"input": "What is 2+2?"}})
    (message,) = row.messages()
    assert (message.role, message.content) == ("user", "What is 2+2?")
    assert [part.text for part in message.parts] == ["What is 2+2?"] and row.media_refs() == ()


def test_unknown_keys_are_kept_and_known_ones_typed(make_row):
    row = ManifestRow.from_json(
        make_row(
            "hi", dataset="mine", image_max_num_tiles=4, num_frames=8, verifier_metadata={"answer": [1]}
        ),
        file="rows.jsonl",
        line=7,
    )
    assert row.model_extra == {"dataset": "mine"}
    assert (row.image_max_num_tiles, row.num_frames) == (4, 8)
    assert row.verifier_metadata == {"answer": [1]}
    assert (row.row_id, row.line, row.where) == ("line-7", 7, "rows.jsonl:7")


def test_rows_are_frozen_and_survive_pickling(make_row):
    row = ManifestRow.from_json(make_row("a.png", "?", id=3), file="rows.jsonl", line=2)
    with pytest.raises(ValidationError):
        row.num_frames = 3
    copy = pickle.loads(pickle.dumps(row))
    assert copy == row and copy.where == "rows.jsonl:2" and copy.row_id == "3"
    assert copy.media_refs() == row.media_refs()


@pytest.mark.parametrize(
    "damage, problem",
    [
        ({"num_frames": 0}, "num_frames"),
        ({"num_frames": 8.5}, "num_frames"),
        ({"image_max_num_tiles": "4"}, "image_max_num_tiles"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"agent_ref": {}}, "agent_ref.name"),
        ({"turns": [[]]}, "turns.0 has no message"),
        ({"turns": [[{"role": "assistant", "content": "x"}]]}, "the policy writes those"),
        ({"turns": [{"role": "user"}]}, "turns.0"),
        ({"responses_create_params": {}}, "input"),
        ({"responses_create_params": {"input": []}}, "role 'user'"),
        (request("x", role="system"), "role 'user'"),
        (request("x", role="robot"), "role"),
        (request([{"type": "input_audio"}]), "input_audio"),
        (request([frame("a", source="")]), "_video_source"),
        ({"responses_create_params": {"input": "x", "metadata": {"a": {}}}}, "metadata.a"),
    ],
)
def test_what_is_wrong_is_named(make_row, damage, problem):
    with pytest.raises(ValidationError, match=problem):
        ManifestRow.from_json(make_row("a.png", "?") | damage)
