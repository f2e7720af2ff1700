# SPDX-License-Identifier: Apache-2.0
"""Alignment is total: whatever a rollout's ids and media, tensors fit the ids, and what is kept is proven.

Conversations are drawn from images and clips, segmented as training sees them, and damaged: cut, spliced, swapped,
duplicated, with runs and media inserted and deleted.
"""

import dataclasses
import re
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl_ext.align.families.nemotron import Layout
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import align_turn, verify_turn
from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.align.video_grids import VideoTiler
from nemo_rl_ext.rollout.segments import EngineTurn, to_segments

START, CONTEXT, END = 6, 5, 7
CHARS = {START: "\x01", CONTEXT: "\x02", END: "\x03"}
TIMES = re.compile(r"sampled at (\d+\.\d\d) seconds")
LABELLED = re.compile(r"((?:[Ff]rame \d+ sampled at \d+\.\d\d seconds(?: and )?)+): \x01\x02+\x03")


def characters(ids):
    return "".join(CHARS.get(int(token), chr(int(token))) for token in ids)


@pytest.fixture(scope="module", params=[1, 2, 4])
def family(request):
    from nemo_rl_ext.align.families.nemotron import NemotronFamily
    from nemo_rl_ext.align.grids import DynamicTiler
    from nemo_rl_ext.align.runs import Grammar

    return NemotronFamily(
        grammar=Grammar(START, CONTEXT, END),
        tiler=DynamicTiler(patch_size=16, merge_size=2, min_num_patches=4, max_num_patches=64),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        layout=Layout.NATIVE,
        video=VideoTiler(16, 2, 16, True, request.param),
        decoder=lambda ids: "".join(chr(token) if token > 7 else f"<{token}>" for token in ids),
    )


SIDES = st.sampled_from([1, 8, 17, 40, 64, 65, 100, 130, 200])


def item(size, name, frames=None, total=0, fps=24.0, broken=False):
    def load(indices=(0,)):
        if broken:
            raise ValueError(f"{name}: the file ends early")
        return np.stack([np.full((*size, 3), index % 256, np.uint8) for index in indices])

    kind = (
        {}
        if frames is None
        else {"kind": "video", "frame_indices": frames, "fps": fps, "total_frames": total}
    )
    return MediaItem(size=size, source=name, content_hash=name, load=load, **kind)


@st.composite
def media(draw, index=0):
    size, broken = (draw(SIDES), draw(SIDES)), draw(st.integers(0, 19)) == 0
    name = f"{index}-{size[0]}x{size[1]}"
    if draw(st.booleans()):
        return item(size, name + ".png", broken=broken)
    total = draw(st.integers(1, 90))
    frames = tuple(sorted(draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=5))))
    return item(size, name + ".mp4", frames, total, draw(st.sampled_from([7.5, 24.0, 29.97])), broken)


def run(tokens):
    return [START, *[CONTEXT] * tokens, END]


def engine_ids(family, things, budget):
    """Ids of one message's media as the engine writes them when every image has `budget` patches."""
    ids, grids = [], []
    for thing in things:
        if thing.kind == "image":
            grids.append(family.tiler.grid(thing.size, budget))
            ids += [*run(grids[-1].num_tokens()), 10]
            continue
        grids.append(family.video.static_grid(thing.size))
        step, duration = family.frames_per_tubelet(), int(1000 / thing.fps)
        for first in range(0, thing.num_frames, step):
            words = " and ".join(
                f"{'frame' if place else 'Frame'} {first + place + 1} sampled at {index * duration / 1000:.2f} seconds"
                for place, index in enumerate(thing.frame_indices[first : first + step])
            )
            ids += [ord(char) for char in ("\n" if first else "") + words + ": "] + run(
                grids[-1].num_tokens()
            )
        ids.append(10)
    return ids, tuple(grids)


@st.composite
def conversations(draw, family):
    """Requests of a conversation, each with all media so far; a later one may give earlier images another size."""
    per_turn = [
        [draw(media(10 * turn + place)) for place in range(draw(st.integers(0, 2)))]
        for turn in range(draw(st.integers(1, 3)))
    ]
    captured = draw(st.booleans())
    turns, answers, chosen_grids = [], [], []
    for last in range(len(per_turn)):
        budget = draw(st.sampled_from([64, 64, 40, 16]))
        ids, grids = [20], ()
        for turn, things in enumerate(per_turn[: last + 1]):
            more, chosen = engine_ids(family, things, budget)
            ids += [30, *more, 63]
            grids += chosen
            if turn < last:
                ids += answers[turn]
        answers.append(draw(st.lists(st.sampled_from([40, 41, START, CONTEXT, END]), min_size=1, max_size=4)))
        turns.append(
            EngineTurn(
                prompt_token_ids=np.array(ids),
                token_ids=np.array(answers[-1]),
                logprobs=np.zeros(len(answers[-1]), np.float32),
                num_media=len(grids),
            )
        )
        chosen_grids.append(grids if captured else None)
    return turns, [thing for things in per_turn for thing in things], chosen_grids


def captured_of(grids, turn):
    """The engine's grids of a user turn's media, where they were recorded."""
    own = grids[turn.turn]
    return None if own is None else own[turn.first_media : turn.last_media]


@st.composite
def damaged(draw, ids, things):
    """Ids and media after up to three kinds of damage."""
    ids, things = list(ids), list(things)
    for kind in draw(st.lists(st.integers(0, 8), max_size=3)):
        begin, end = sorted((draw(st.integers(0, len(ids))), draw(st.integers(0, len(ids)))))
        place = draw(st.integers(0, max(0, len(things) - 1)))
        if kind == 0:
            ids = ids[:end]
        elif kind == 1:
            ids = ids[:begin] + ids[end:]
        elif kind == 2:
            ids = ids[:end] + ids[begin:end] + ids[end:]
        elif kind == 3:
            ids = ids[end:] + ids[begin:end] + ids[:begin]
        elif kind == 4:
            ids[begin:begin] = draw(st.lists(st.sampled_from([START, CONTEXT, END, 30]), max_size=8))
        elif kind == 5:
            ids[begin:begin] = run(draw(st.integers(0, 16)))
        elif kind == 6 and things:
            del things[place]
        elif kind == 7 and things:
            things.insert(place, things[place])
        elif kind == 8 and things:
            things[0], things[place] = things[place], things[0]
    return ids, things


def num_features(family, tensors):
    """Features of the tensors themselves, by the pixels that are there."""
    values = tensors.values
    grids = values["image_grid_hw"].tolist()
    frames = values.get("num_frames", torch.zeros(len(grids), dtype=torch.int64)).tolist()
    patches = [height * width for height, width in grids]
    assert values["pixel_values"].shape[0] == sum(max(n, 1) * p for n, p in zip(frames, patches, strict=True))
    step = family.frames_per_tubelet()
    return sum(max(1, -(-n // step)) * p // 4 for n, p in zip(frames, patches, strict=True))


def check(family, ids, things, captured):
    """Align, and hold the outcome against the ids alone. Returns the report."""
    aligned = align_turn(np.array(ids, np.int64), things, family=family, captured=captured, row_id="r")
    report = aligned.report
    context = list(ids).count(CONTEXT)
    assert (num_features(family, aligned.tensors) if aligned.tensors is not None else 0) == context
    if report.neutral:
        assert report.reasons()
        assert report.reasons()[0].advice in str(report)
        return report
    written = [len(run) for run in re.findall("\x01(\x02*)\x03", characters(ids))]
    assert (
        written == [grid.num_tokens() for grid in aligned.tensors.grids]
        if written
        else aligned.tensors is None
    )
    for judged, thing in zip(report.media, things, strict=True):
        assert judged.verdict in (Verdict.MATCHED, Verdict.REPAIRED)
        tiler = family.video if thing.kind == "video" else family.tiler
        reachable = {tiler.grid(thing.size, budget) for budget in range(1, 257)}
        alike = [grid for grid in reachable if grid.num_tokens() == judged.grid.num_tokens()]
        assert judged.grid in reachable
        assert len(alike) == 1 or captured is not None, "a grid was guessed"
    if any(thing.kind == "video" for thing in things):
        told = [time for label in LABELLED.findall(characters(ids)) for time in TIMES.findall(label)]
        used = [
            f"{index * int(1000 / thing.fps) / 1000:.2f}"
            for judged, thing in zip(report.media, things, strict=True)
            for index in judged.frames or ()
        ]
        assert used == told, "frames that the rollout does not tell of"
    return report


SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ],
)


@SETTINGS
@given(data=st.data())
def test_an_undamaged_conversation_is_aligned_turn_by_turn_through_all_segments(family, data):
    turns, things, grids = data.draw(conversations(family))
    segments = to_segments(turns, (family.grammar,))
    sampled = [m["token_ids"].tolist() for s in segments for m in s.message_log if m["role"] == "assistant"]
    assert sampled == [turn.token_ids.tolist() for turn in turns], "every sampled token trains once"
    seen = []
    for segment in segments:
        whole = [token for message in segment.message_log for token in message["token_ids"].tolist()]
        last = turns[segment.user_turns[-1].turn]
        assert whole == [*last.prompt_token_ids.tolist(), *last.token_ids.tolist()]
        for turn in segment.user_turns:
            ids = segment.message_log[turn.message]["token_ids"].tolist()
            mine = things[turn.first_media : turn.last_media]
            report = check(family, ids, mine, captured_of(grids, turn))
            seen += mine
            # A restarted segment repeats earlier answers, whose sampled context tokens are phantoms.
            phantoms = any(CONTEXT in answer or START in answer for answer in sampled)
            explained = {Reason.AMBIGUOUS_GRID, Reason.DECODE_FAILED, Reason.ORDER_SUSPECT}
            if report.neutral and not (phantoms and turn.first_media == 0):
                assert set(report.reasons()) & explained, str(report)
    assert {id(thing) for thing in seen} == {id(thing) for thing in things}, "a medium was lost"


@SETTINGS
@given(data=st.data())
def test_damage_never_loses_a_turn_and_nothing_unproven_is_attached(family, data):
    turns, things, grids = data.draw(conversations(family))
    for segment in to_segments(turns, (family.grammar,)):
        for turn in segment.user_turns:
            ids = segment.message_log[turn.message]["token_ids"].tolist()
            mine = things[turn.first_media : turn.last_media]
            broken_ids, broken_things = data.draw(damaged(ids, mine))
            captured = captured_of(grids, turn) if len(broken_things) == len(mine) else None
            check(family, broken_ids, broken_things, captured)


@SETTINGS
@given(data=st.data())
def test_any_ids_at_all_beside_any_media(family, data):
    ids = data.draw(st.lists(st.sampled_from([START, CONTEXT, END, 10, ord("F"), 300]), max_size=60))
    things = [data.draw(media(index)) for index in range(data.draw(st.integers(0, 3)))]
    check(family, ids, things, None)


@SETTINGS
@given(data=st.data())
def test_judging_again_gives_the_same_and_touches_no_pixel(family, data):
    turns, things, grids = data.draw(conversations(family))
    shown = accumulate([things[a:b] for a, b in spans(turns)])
    for turn, mine, chosen in zip(turns, shown, grids, strict=True):
        ids, blind = turn.prompt_token_ids, [dataclasses.replace(thing, load=None) for thing in mine]
        first = verify_turn(ids, blind, family=family, captured=chosen)
        assert first == verify_turn(ids.tolist(), blind, family=family, captured=chosen)
        assert sum(first.found) == int((ids == CONTEXT).sum())


def spans(turns):
    return pairwise([0, *(turn.num_media for turn in turns)])
