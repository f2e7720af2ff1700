# SPDX-License-Identifier: Apache-2.0
"""The catalogue in docs/diagnostics.md is what the code says: every reason, its own words, its advice."""

import dataclasses
from pathlib import Path

import pytest

from nemo_rl_ext.align.evidence import Evidence
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.plan import plan_turn
from nemo_rl_ext.align.runs import Grammar, find_runs
from nemo_rl_ext.align.turn import AlignedTurn, verify_turn
from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.align.video_grids import VideoTiler
from nemo_rl_ext.integration.neutral import mixed_sizes
from nemo_rl_ext.rollout.prevention import refuse_resized
from nemo_rl_ext.rollout.segments import Resize

CATALOGUE = Path(__file__).parents[2] / "docs" / "diagnostics.md"
START, CONTEXT, END = 6, 5, 7
CUP = MediaItem(size=(480, 640), source="cup.jpg")
MAP = MediaItem(size=(1024, 300), source="map.png")
CLIP = MediaItem(
    kind="video",
    size=(144, 176),
    source="clip.mp4",
    frame_indices=(0, 12, 24, 36),
    fps=24.0,
    total_frames=120,
)


def run(length):
    return [START, *[CONTEXT] * length, END]


def text(string):
    return [ord(char) for char in string]


def tubelets(indices, lengths, fps=24.0):
    """The engine's text and runs of a clip, two frames to a tubelet."""
    ids = []
    for place, length in zip(range(0, len(indices), 2), lengths, strict=True):
        times = [f"{index * int(1000 / fps) / 1000:.2f}" for index in indices[place : place + 2]]
        label = f"Frame {place + 1} sampled at {times[0]} seconds"
        label += f" and frame {place + 2} sampled at {times[1]} seconds" if len(times) > 1 else ""
        ids += text(("\n" if place else "") + label + ": ") + run(length)
    return ids


@pytest.fixture
def stories(make_family):
    """A real message for every reason, without the advice at its end."""
    family = dataclasses.replace(
        make_family(),
        video=VideoTiler(16, 2, 64, True, 2),
        decoder=lambda ids: "".join(
            "<>"[token % 2] if token in (START, CONTEXT, END) else chr(token) for token in ids
        ),
    )

    def report(*ids, media=(CUP,), **known):
        return verify_turn(sum(ids, []), list(media), family=family, row_id="r17", **known)

    clip = {"media": (CLIP,)}
    known = dataclasses.replace(CUP, digest="01cd" * 16)
    whole = tubelets((0, 12, 24, 36), (12, 12))
    second_tubelet = whole[whole.index(END) + 1 :]
    reports = [
        report(text("a"), run(165)),
        report(run(210), media=(MediaItem(size=(500, 512), source="tile.png"),)),
        report(run(252), media=(CUP, MAP)),
        report(run(7)),
        report(run(232), run(252), media=(CUP, MAP)),
        report(run(252), text("see "), [CONTEXT]),
        report(text("I see "), [CONTEXT], media=(), sampled=True),
        report(text("a"), [CONTEXT]),
        report([START], run(252), [CONTEXT] * 251, [END]),
        report(run(252)[:-60]),
        report(run(0)),
        report(run(165), captured=[Grid(28, 36)]),
        report(run(252), media=(known,), evidence=[Evidence(served="99aa" * 16)]),
        report(run(252), media=(known, MAP), evidence=[Evidence(served="99aa" * 16)]),
        report(run(252), media=(), evidence=[Evidence(served="99aa" * 16)]),
        report(text("a "), run(252), evidence=[Evidence(grid=Grid(28, 36), runs=((0, 252),))]),
        report(tubelets((0, 12, 24, 36), (24, 0)), **clip),
        report(second_tubelet, **clip),
        report(tubelets((0, 12, 24, 36), (12, 10)), **clip),
        report(tubelets((0, 12, 24, 36), (12, 12), fps=7.3), **clip),
        plan_turn(
            find_runs(run(252), Grammar(START, CONTEXT, END)),
            (),
            family,
            row_id="r17",
            fault=(Reason.FRAMES_UNKNOWN, "one run of 252 tokens for all tubelets names no frames"),
        ),
        report(tubelets((0, 30), (12,)), **clip),
        report(
            run(252), media=(MediaItem(size=(1, 1), source="cup.jpg", error="cup.jpg: the file ends early"),)
        ),
        plan_turn(
            find_runs(run(252), Grammar(START, CONTEXT, END)),
            (),
            family,
            row_id="r17",
            fault=(Reason.WORKER_DIED, "the aligner died twice over this work"),
        ),
    ]
    (mixed,) = mixed_sizes([report(run(165), run(232), media=(CUP, MAP))])
    refused = refuse_resized(AlignedTurn(tensors=None, report=report(run(165), media=(CUP,)), changed=True))
    reports += [mixed, refused.report]
    told = {}
    for made in reports:
        (reason,) = set(made.reasons())
        told[reason] = str(made).removesuffix(f". {reason.value}: {reason.advice}")
        told[reason] = told[reason].removesuffix(f"; {reason.advice}")
    told[Reason.EARLIER_TURN_RESIZED] = f"row 'r17': {Resize(turn=1, media=0, before=252, after=165)}"
    return told


def table():
    """`{reason: (what is seen, what to do)}` of the catalogue."""
    rows = {}
    for line in CATALOGUE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 3 and cells[0].startswith("`"):
            rows[cells[0].strip("`")] = (cells[1].strip("`"), cells[2])
    return rows


def test_every_reason_has_a_row_with_its_advice():
    rows = table()
    assert list(rows) == [reason.value for reason in Reason]
    for reason in Reason:
        assert rows[reason.value][1].startswith(reason.advice[0].upper() + reason.advice[1:]), reason


def test_what_a_user_sees_is_what_the_code_says(stories):
    rows = table()
    of_the_run = {Reason.GENERATION_FAILED, Reason.CONTEXT_OUTGROWN, Reason.OVERLONG_FILTERED}
    assert set(stories) == set(Reason) - of_the_run, "those are made of the engine's own words"
    for reason, story in stories.items():
        assert rows[reason.value][0] == story, reason
    for refused in (Reason.GENERATION_FAILED, Reason.CONTEXT_OUTGROWN):
        assert "the engine refused it: VLLMValidationError" in rows[refused.value][0]
