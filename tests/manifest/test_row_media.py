# SPDX-License-Identifier: Apache-2.0
"""One grouping of a row's media: what the prompt names, what is read, what is checked and forecast agree."""

import itertools
import random

import pytest

from nemo_rl_ext.manifest.row_media import media_by_turn, media_items, template_content
from nemo_rl_ext.manifest.rows import ManifestRow


def frame(ref, source="clip.mp4", **keys):
    return {"type": "input_image", "image_url": ref, "_is_video_frame": True, "_video_source": source, **keys}


def image(ref):
    return {"type": "input_image", "image_url": ref}


def clip(ref):
    return {"type": "input_video", "video_url": ref}


def text(value):
    return {"type": "input_text", "text": value}


def row_of(*messages, turns=()):
    content = [{"role": "user", "content": list(parts)} for parts in messages]
    return ManifestRow.from_json(
        {"responses_create_params": {"input": content}, "turns": list(turns)}, line=1
    )


F = [frame(f"{i}.png") for i in range(4)]
CASES = {
    "neighbours": ([F], ["0123"], ["V"]),
    "text between": ([[F[0], F[1], text("then"), F[2], F[3]]], ["0123"], ["V", "then"]),
    "an empty text part between": ([[F[0], text(""), F[1], F[2], F[3]]], ["0123"], ["V", ""]),
    "text around": ([[text("a"), *F[:2], text("b")]], ["01"], ["a", "V", "b"]),
    "an image between": ([[F[0], image("i"), F[1]]], ["0", "i", "1"], ["V", "I", "V"]),
    "a clip between": ([[F[0], clip("c"), F[1]]], ["0", "c", "1"], ["V", "V", "V"]),
    "two sources": ([[F[0], frame("x", "b"), F[1]]], ["0", "x", "1"], ["V", "V", "V"]),
    "two sources and text": (
        [[F[0], text("t"), frame("x", "b"), frame("y", "b")]],
        ["0", "xy"],
        ["V", "t", "V"],
    ),
    "two messages": ([F[:2], F[2:]], ["01", "23"], ["V", "V"]),
    "images and clips": ([[image("i"), image("i"), clip("c"), clip("c")]], list("iicc"), list("IIVV")),
}


def prompt_of(row):
    """`V`, `I` and texts as a template is given them."""
    names = {"video": "V", "image": "I"}
    messages = [message for turn in range(row.num_turns) for message in row.messages(turn)]
    contents = [template_content(message) for message in messages]
    return [names.get(part["type"]) or part["text"] for content in contents for part in content]


@pytest.mark.parametrize("messages,refs,prompt", CASES.values(), ids=CASES.keys())
def test_prompt_and_media_agree(messages, refs, prompt):
    row = row_of(*messages)
    found = ["".join(ref.ref.removesuffix(".png") for ref in item.refs) for item in media_items(row)]
    assert found == refs
    assert prompt_of(row) == prompt
    sources = [source for turn in media_by_turn(row) for source in turn]
    assert [{"image": "I", "video": "V"}[source.kind] for source in sources] == [
        part for part in prompt if part in "VI" and part
    ]


def test_any_row_names_as_many_media_in_its_prompt_as_are_read_for_it():
    random.seed(0)
    parts = [*F, frame("x", "b.mp4"), image("i"), clip("c"), text("t"), text("")]
    for _ in range(500):
        messages = [random.choices(parts, k=random.randrange(1, 7)) for _ in range(random.randrange(1, 4))]
        turns = [
            [{"role": "tool", "content": random.choices(parts, k=3)}] for _ in range(random.randrange(3))
        ]
        row = row_of(*messages, turns=turns)
        by_turn = media_by_turn(row)
        for turn in range(row.num_turns):
            named = [
                part["type"]
                for message in row.messages(turn)
                for part in template_content(message)
                if part["type"] != "text"
            ]
            assert named == [source.kind for source in by_turn[turn]]
        shown = itertools.chain.from_iterable(item.refs for item in media_items(row))
        assert list(shown) == list(row.media_refs()), "every reference belongs to one item, in order"


def test_frames_of_two_rows_that_share_a_source_name_are_two_sources():
    sources = []
    for k in range(8):
        timed = [
            frame(f"{k}-{i}.png", "movie.mp4", _video_frame_index=2 * k + i, _video_fps=2.0) for i in range(2)
        ]
        sources += [source for turn in media_by_turn(row_of(timed)) for source in turn]
    assert len(set(sources)) == 8 and len({source.frame_refs for source in sources}) == 8
    assert {source.ref for source in sources} == {"movie.mp4"}, "the name is for messages"
