# SPDX-License-Identifier: Apache-2.0
"""Qwen-VL: grids, pixels, ids and positions against transformers' processors and vLLM's own arithmetic."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from nemo_rl_ext.align.evidence import Evidence
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.positions import Block, media_positions
from nemo_rl_ext.align.smart_resize import SmartResizer
from nemo_rl_ext.align.turn import align_turn, verify_turn
from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.models.tiny_families import build_tiny_family
from nemo_rl_ext.rollout.fitting import TurnFitting, TurnRequest

transformers = pytest.importorskip("transformers")

OLD, NEW = "qwen2_5_vl", "qwen3_vl"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    return {name: build_tiny_family(name, folder / name) for name in (OLD, NEW)}


@pytest.fixture(params=[OLD, NEW])
def name(request):
    return request.param


@pytest.fixture
def processor(checkpoints, name):
    return transformers.AutoProcessor.from_pretrained(str(checkpoints[name]), local_files_only=True)


@pytest.fixture
def family(checkpoints, name):
    return family_of(checkpoints[name])


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def image(height, width, seed=0):
    pixels = noise(1, height, width, seed=seed)
    return MediaItem(size=(height, width), source=f"{seed}.png", load=lambda: pixels)


def clip(frames, height, width, total=96, fps=24.0, seed=0, source="clip.mp4"):
    pixels = noise(frames, height, width, seed=seed)
    indices = tuple(int(i) for i in np.linspace(0, total - 1, frames).round())
    return MediaItem(
        kind="video", size=(height, width), source=source, load=lambda _: pixels, frame_indices=indices,
        fps=fps, total_frames=total,
    )  # fmt: skip


def processed(processor, items):
    """Ids and tensors of transformers' own processor, for items in the order images, clips."""
    from transformers.video_utils import VideoMetadata

    images = [item.pixels()[0] for item in items if item.kind == "image"]
    clips = [item for item in items if item.kind == "video"]
    text = "".join(
        "<|vision_start|><|image_pad|><|vision_end|>." if item.kind == "image"
        else "<|vision_start|><|video_pad|><|vision_end|>."
        for item in items
    )  # fmt: skip
    more = {"images": images} if images else {}
    if clips:
        more |= {
            "videos": [item.pixels() for item in clips],
            "do_sample_frames": False,
            "video_metadata": [
                VideoMetadata(
                    fps=item.fps, duration=item.total_frames / item.fps, total_num_frames=item.total_frames,
                    frames_indices=list(item.frame_indices), video_backend="opencv",
                )
                for item in clips
            ],
        }  # fmt: skip
    return processor(text=[text], return_tensors="pt", **more)


def receipts(items):
    return [Evidence(frames=item.frame_indices or None) for item in items]


SETS = {
    "images": [image(150, 230), image(400, 111, 1), image(1200, 900, 2), image(31, 500, 3)],
    "a clip": [clip(8, 120, 168)],
    "an odd number of frames": [clip(5, 168, 120)],
    "an image and two clips": [
        image(150, 230),
        clip(4, 120, 168, seed=1),
        clip(7, 90, 400, total=300, seed=2),
    ],
}


@pytest.mark.parametrize("which", SETS)
def test_ids_tensors_and_counts_equal_the_processors(family, processor, which):
    items = SETS[which]
    theirs = processed(processor, items)
    ids = theirs["input_ids"][0]
    aligned = align_turn(ids, items, family=family, evidence=receipts(items))
    assert not aligned.report.neutral, str(aligned.report)
    assert {item.verdict for item in aligned.report.media} == {Verdict.MATCHED}
    for key, value in aligned.tensors.values.items():
        expected = theirs[key]
        expected = expected if torch.is_tensor(expected) else torch.tensor(expected)
        assert torch.equal(value, expected.to(value.dtype)), key
    assert set(aligned.tensors.values) == {key for key in family.keys() if key in theirs}
    assert family.num_features(aligned.tensors) == aligned.report.num_context_tokens
    assert torch.equal(
        family.sequence(ids, aligned.tensors.values)["mm_token_type_ids"], theirs["mm_token_type_ids"][0]
    )


def test_another_budget_on_the_engines_side_is_repaired_from_the_run_alone(family, processor):
    rng = np.random.default_rng(5)
    repaired = 0
    for seed in range(12):
        item = image(int(rng.integers(60, 900)), int(rng.integers(60, 900)), seed)
        size = {"shortest_edge": 4096, "longest_edge": int(rng.integers(20, 500)) * 1024}
        theirs = processor(
            text=["<|vision_start|><|image_pad|><|vision_end|>"],
            images=[item.pixels()[0]],
            images_kwargs={"size": size},
            return_tensors="pt",
        )
        aligned = align_turn(theirs["input_ids"][0], [item], family=family)
        assert not aligned.report.neutral
        assert torch.equal(aligned.tensors.values["image_grid_thw"], theirs["image_grid_thw"])
        assert torch.equal(aligned.tensors.values["pixel_values"], theirs["pixel_values"])
        repaired += aligned.report.repaired
    assert repaired > 4


def test_a_clip_of_one_run_needs_its_frames_said(checkpoints):
    family, item = family_of(checkpoints[OLD]), clip(8, 120, 168)
    processor = transformers.AutoProcessor.from_pretrained(str(checkpoints[OLD]), local_files_only=True)
    ids = processed(processor, [item])["input_ids"][0]
    report = verify_turn(ids, [item], family=family)
    assert report.reasons() == (Reason.FRAMES_UNKNOWN,)
    assert report.media[0].verdict is Verdict.AMBIGUOUS
    assert not verify_turn(ids, [item], family=family, evidence=receipts([item])).neutral
    other = [Evidence(frames=tuple(range(0, 64, 8)))]
    resampled = verify_turn(ids, [item], family=family, evidence=other)
    assert resampled.reasons() == (Reason.FRAMES_RESAMPLED,)


def test_times_before_tubelets_are_checked(checkpoints):
    family, item = family_of(checkpoints[NEW]), clip(8, 120, 168)
    processor = transformers.AutoProcessor.from_pretrained(str(checkpoints[NEW]), local_files_only=True)
    ids = processed(processor, [item])["input_ids"][0]
    assert not verify_turn(ids, [item], family=family).neutral
    other = dataclasses.replace(item, frame_indices=tuple(range(8)))
    report = verify_turn(ids, [other], family=family)
    assert report.reasons() == (Reason.FRAME_TIMES,)
    fewer = dataclasses.replace(item, frame_indices=item.frame_indices[:6])
    assert verify_turn(ids, [fewer], family=family).reasons() == (Reason.TUBELET_COUNT,)
    proven = verify_turn(ids, [other], family=family, evidence=receipts([item]))
    assert proven.media[0].frames == item.frame_indices


def test_clips_and_images_are_told_apart_and_counted(family, processor):
    items = SETS["an image and two clips"]
    ids = processed(processor, items)["input_ids"][0]
    fewer = verify_turn(ids, items[:2], family=family, evidence=receipts(items[:2]))
    assert fewer.reason is Reason.TUBELET_COUNT
    assert "1 image and 2 videos" in fewer.detail
    swapped = [items[1], items[0], items[2]]
    assert verify_turn(ids, swapped, family=family, evidence=receipts(swapped)).reason is Reason.TUBELET_COUNT


def test_phantoms_cut_runs_and_broken_files_stay_count_correct(family, processor):
    items = SETS["an image and two clips"]
    ids = processed(processor, items)["input_ids"][0].tolist()
    image_pad, video_pad = (grammar.context_id for grammar in family.grammars)
    for damaged in ([*ids, image_pad], [*ids, 60, video_pad, video_pad], ids[: len(ids) // 2], ids[9:]):
        aligned = align_turn(damaged, items, family=family, evidence=receipts(items))
        assert aligned.report.neutral
        values = aligned.tensors.values
        for token, key in ((image_pad, "image_grid_thw"), (video_pad, "video_grid_thw")):
            features = int(values[key].prod(-1).sum()) // 4 if key in values else 0
            assert features == damaged.count(token)
        assert family.sequence(torch.tensor(damaged), values)["position_ids"].shape == (3, len(damaged))


def test_blank_images_and_blank_clips_are_not_shared(family):
    fitting = TurnFitting(family=family, render=family.render, measure=lambda source: image(32, 32))
    grids = []
    for grammar, key in zip(family.grammars, ("image_grid_thw", "video_grid_thw"), strict=True):
        ids = np.array([1, *[grammar.context_id] * 6, 1])
        turn = TurnRequest(row_id="r", turn=0, token_ids=ids, media=())
        aligned = fitting.result(turn, (), fitting.judge(turn, (), None), 0.0)
        assert int(aligned.tensors.values[key].prod()) == 24
        grids.append(aligned.tensors.grids)
    assert grids[0] == grids[1]


def test_aspect_ratios_that_the_processor_refuses_have_no_grid(family):
    item = MediaItem(size=(10, 4000), source="thread.png")
    start, pad, end = family.grammar.start_id, family.grammar.context_id, family.grammar.end_id
    report = verify_turn([start, *[pad] * 100, end], [item], family=family)
    assert report.reasons() == (Reason.INFEASIBLE_LENGTH,)


def test_a_processor_that_lives_is_the_same_family(family, processor):
    made = family_of(processor)
    assert (made.grammars, made.image, made.video) == (family.grammars, family.image, family.video)


# Arithmetic.


def test_a_number_of_tokens_names_one_grid():
    """Every limit of pixels for pictures and clips of all shapes: the grid is found again, and it is the only one."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as of_image
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_clip

    rng, compared = np.random.default_rng(0), 0
    for _ in range(20_000):
        height, width = (int(side) for side in np.exp(rng.uniform(np.log(8), np.log(4000), 2)))
        if rng.random() < 0.3:
            width = max(1, height + int(rng.integers(-12, 13)))
        patch = int(rng.choice([14, 16]))
        low = int(np.exp(rng.uniform(np.log(100), np.log(3e6))))
        high, frames, whole = (
            int(low * math.exp(rng.uniform(0, 4))),
            int(rng.integers(2, 20)),
            rng.random() < 0.5,
        )
        tiler = SmartResizer(patch, 2, low, high, over_all_frames=whole)
        try:
            theirs = (
                of_clip(frames, height, width, 2, 2 * patch, low, high)
                if whole
                else of_image(height, width, 2 * patch, low, high)
            )
        except ValueError:
            continue
        grid = tiler.static_grid((height, width), frames)
        assert grid == (theirs[0] // patch, theirs[1] // patch)
        if grid.num_patches:
            assert tiler.feasible_grids((height, width), grid.num_tokens(), frames) == (grid,)
        compared += 1
    assert compared > 19_000


@pytest.mark.parametrize("interval", [1.0, 2.0, 0.7])
def test_what_follows_a_clip_starts_behind_its_largest_position(interval):
    positions = media_positions(12, [Block(2, 3, 1, 2, interval)])
    assert positions[:, :2].tolist() == [[0, 1]] * 3
    assert positions[0, 2:8].tolist() == [
        2 + int(tubelet * interval) for tubelet in range(3) for _ in range(2)
    ]
    largest = int(positions[:, 2:8].max())
    assert positions[:, 8:].tolist() == [list(range(largest + 1, largest + 5))] * 3


@pytest.mark.engine
def test_positions_equal_vllms(checkpoints, name, family, processor):
    """vLLM's own function on the same ids and geometry."""
    from types import SimpleNamespace

    pytest.importorskip("vllm")
    items = SETS["an image and two clips"]
    theirs = processed(processor, items)
    ids = theirs["input_ids"][0]
    aligned = align_turn(ids, items, family=family, evidence=receipts(items))
    ours = family.sequence(ids, aligned.tensors.values)["position_ids"]
    config = transformers.AutoConfig.from_pretrained(str(checkpoints[name]))
    features = []
    for kind, key, token in (
        ("image", "image_grid_thw", config.image_token_id),
        ("video", "video_grid_thw", config.video_token_id),
    ):
        at = np.flatnonzero(ids.numpy() == token)
        first = 0
        for place, grid in enumerate(theirs[key]):
            data = {key: SimpleNamespace(data=grid)}
            if "second_per_grid_ts" in theirs and kind == "video":
                seconds = torch.tensor(theirs["second_per_grid_ts"][place])
                data["second_per_grid_ts"] = SimpleNamespace(data=seconds)
            count = int(grid.prod()) // 4
            place_of = SimpleNamespace(offset=int(at[first]), length=count)
            features.append(SimpleNamespace(modality=kind, data=data, mm_position=place_of))
            first += count
    if name == OLD:
        from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model

        model = SimpleNamespace(config=config)
        model.iter_mm_grid_thw = lambda features: Model.iter_mm_grid_thw(model, features)
        expected, _ = Model.get_mrope_input_positions(model, ids.tolist(), features)
    else:
        from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Model

        for feature in features:
            if feature.modality == "video":
                # The engine's range of a clip starts with its first time, and ends with its last delimiter.
                feature.mm_position.offset -= len("<0.2 seconds>") + 1
        expected, _ = Model._get_mrope_input_positions(ids.tolist(), features, config)
    assert torch.equal(ours, expected)


def test_a_grid_is_that_of_a_tubelets_frame(family):
    item = clip(8, 120, 168)
    (geometry,) = family.static([item])
    assert geometry.tubelets == 4
    assert family.captured(item, {"video_grid_thw": [4, *geometry.grid]}) == geometry
    assert family.captured(image(1, 1), {"image_grid_thw": [[1, 4, 6]]}).grid == Grid(4, 6)
    assert family.captured(item, {}) is None
