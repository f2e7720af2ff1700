# SPDX-License-Identifier: Apache-2.0
"""Every family on the real engine, with limits of its own: what is repaired fits, and what is wrong shows."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("vllm")

from benchmarks.families import MARKS, MEDIA, cell, publish, tables
from benchmarks.family_scene import (
    WRONG,
    Exchange,
    Scene,
    gap_at_trainers_positions,
    gap_of_wrong,
    medium,
)
from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.media.identity import pixel_digest

pytestmark = pytest.mark.engine

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "internvl")
PROMPTS = {"image": ("image",), "clip": ("video",), "both": ("image", "video"), "two": ("image", "image")}


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request, tmp_path_factory):
    scene = Scene(request.param, tmp_path_factory.mktemp("families"))
    yield scene
    scene.engine.shutdown()


def alone(scene, shown):
    """One request and what becomes of its media by the engine's receipt."""
    result = scene.generate(shown)
    turn = scene.align(Exchange(result=result, shown=tuple(shown), first=0, offset=0))
    assert not turn.report.neutral, str(turn.report)
    return result, turn


@pytest.mark.parametrize("name", PROMPTS)
def test_what_the_engine_saw_is_what_is_trained_on(scene, name):
    result, turn = alone(scene, [medium(kind, seed, frames=8) for seed, kind in enumerate(PROMPTS[name])])
    gap = scene.gap(result, turn.tensors.values)
    print(name, turn.report.repaired, f"{gap:.1e}")
    assert gap < 1e-5
    assert turn.report.repaired or "image" not in PROMPTS[name]


def test_a_conversation_of_several_turns_is_aligned_turn_by_turn(scene):
    """The cell of the alignment table, in small."""
    found = cell(scene, MEDIA["several turns"], 1, seed=3)
    counts = found["counts"]
    assert counts["turns"] == 3 and counts["media"] >= 4 and not counts["masked"]
    assert counts.get("repaired", 0) and found["evidence"]["receipt"] > 0
    assert max(found["gaps"].values()) < 1e-5


@pytest.mark.parametrize("how", [how for how in WRONG if how != "clip transposed"])
def test_wrong_pixels_of_the_right_count_show(scene, how):
    gap = gap_of_wrong(scene, how)
    print(how, f"{gap:.1e}")
    assert gap > 1e-3


def test_a_transposed_image_is_masked_with_the_receipt(scene):
    """An EXIF orientation that one side alone heeds: as many tokens, and other pixels."""
    shown = (medium("image", 0),)
    result = scene.generate(shown)
    ((value, item),) = shown
    turned = np.ascontiguousarray(item.load().swapaxes(1, 2))
    held = dataclasses.replace(
        item, size=item.size[::-1], digest=pixel_digest(turned[0]), load=lambda: turned
    )
    turn = scene.align(Exchange(result=result, shown=((value, held),), first=0, offset=0))
    assert turn.report.neutral and Reason.CONTENT_CHANGED in turn.report.reasons()


def test_a_clip_at_the_trainers_own_positions_shows(scene):
    if scene.name != "qwen2_5_vl":
        pytest.skip("transformers' positions are the engine's")
    result, turn = alone(scene, [medium("video", 0)])
    right, wrong = scene.gap(result, turn.tensors.values), gap_at_trainers_positions(scene)
    print("positions", f"{right:.1e} {wrong:.1e}")
    assert right < 1e-5 and wrong > 1e-3


def test_trained_weights_reach_the_engine(scene):
    from nemo_rl_ext.grpo.training.batch import PolicyRow, collate

    shown = [medium("image", 5)]
    before, turn = alone(scene, shown)
    values = turn.tensors.values
    ids = np.concatenate((before.prompt_token_ids, before.outputs[0].token_ids))
    row = PolicyRow(token_ids=ids, media=(values,))
    scene.policy.forward_logprobs(collate([row], pad_token_id=0)).mean().backward()
    assert scene.policy.optimizer_step() > 0
    assert scene.gap(before, values) > 1e-4
    scene.engine.load_weights(scene.policy.state_dict_for_engine(), scene.engine.version + 1)
    after = scene.generate(shown)
    assert scene.gap(after, values) < 1e-5


def test_a_second_versions_rows_stand_beside_the_first(tmp_path):
    one = {
        "counts": {"turns": 2, "media": 4, "matched": 3, "repaired": 1},
        "evidence": {"receipt": 4},
        "gaps": {},
    }
    result = {
        "transformers": "5.19.0",
        "families": {"qwen3_vl": {"cells": dict.fromkeys(MEDIA, one), "wrong": {"another image": 0.5}}},
        "sound": "refused",
    }
    (tmp_path / "families.md").write_text(f"# Page\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    publish({**result, "vllm": "0.32.0"}, tmp_path)
    publish({**result, "vllm": "0.25.1"}, tmp_path)
    page = (tmp_path / "families.md").read_text()
    assert page.startswith("# Page\n") and page.endswith("after\n") and "old" not in page
    rows = [line for line in page.splitlines() if line.startswith("| qwen3_vl | image |")]
    assert ["0.25.1" in row for row in rows] == [True, False] and "0.32.0" in rows[1]
    lines = tables([{**result, "vllm": "0.32.0"}]).splitlines()
    assert sum(line.startswith("| qwen3_vl |") and "0.32.0" in line for line in lines) == len(MEDIA)
