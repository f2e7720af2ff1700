# SPDX-License-Identifier: Apache-2.0
"""InternVL: tiles and pixels of both implementations, bit for bit; ids as the forward counts them."""

import dataclasses

import numpy as np
import pytest
import torch

from nemo_rl_ext.align.evidence import Evidence
from nemo_rl_ext.align.families.internvl import Implementation
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.fixed_tiles import FixedTiler
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import align_turn, verify_turn
from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.models.tiny_families import build_tiny_family

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def native_dir(tmp_path_factory):
    return build_tiny_family("internvl", tmp_path_factory.mktemp("internvl") / "native")


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory):
    return build_tiny_family("internvl_chat", tmp_path_factory.mktemp("internvl") / "chat")


@pytest.fixture(scope="module")
def processor(native_dir):
    return transformers.AutoProcessor.from_pretrained(str(native_dir), local_files_only=True)


@pytest.fixture
def native(native_dir):
    return family_of(native_dir)


@pytest.fixture
def chat(chat_dir):
    return family_of(chat_dir)


def image(height, width, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (1, height, width, 3), dtype=np.uint8)
    return MediaItem(size=(height, width), source=f"{seed}.png", load=lambda: pixels)


def clip(frames, height, width, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return MediaItem(
        kind="video", size=(height, width), source="clip.mp4", load=lambda _: pixels,
        frame_indices=tuple(range(0, 10 * frames, 10)), fps=24.0, total_frames=10 * frames,
    )  # fmt: skip


def engine_ids(family, items, tokens_per_tile=4):
    """What vLLM writes: its video token where the processor has `<IMG_CONTEXT>`."""
    ids, pictures = [], family.image_grammar
    for item, geometry in zip(items, family.static(items), strict=True):
        if item.kind == "image":
            count = family.tiler.num_tokens(geometry.grid)
            ids += [pictures.start_id, *[pictures.context_id] * count, pictures.end_id]
        else:
            for frame in range(item.num_frames):
                ids += label(family, ("\n" if frame else "") + f"Frame{frame + 1}: ")
                ids += [
                    pictures.start_id,
                    *[family.video_grammar.context_id] * tokens_per_tile,
                    pictures.end_id,
                ]
        ids += label(family, ".")
    return torch.tensor(ids)


def label(family, text):
    """Ids of text in a byte vocabulary, found by decoding."""
    return [next(i for i in range(7, 263) if family.decode([i]) == char) for char in text]


def receipts(items):
    return [Evidence(frames=item.frame_indices or None) for item in items]


ITEMS = [image(150, 230), image(400, 111, 1), clip(3, 90, 120), image(56, 56, 2), clip(2, 120, 90, 3)]


def test_tensors_equal_the_native_processors(native, processor):
    theirs = processor(
        text=["<IMG_CONTEXT>.<IMG_CONTEXT>.<IMG_CONTEXT>."],
        images=[item.pixels()[0] for item in ITEMS if item.kind == "image"],
        return_tensors="pt",
    )
    images = [item for item in ITEMS if item.kind == "image"]
    aligned = align_turn(theirs["input_ids"][0], images, family=native)
    assert {item.verdict for item in aligned.report.media} == {Verdict.MATCHED}
    assert torch.equal(aligned.tensors.values["pixel_values"], theirs["pixel_values"])


def test_clips_equal_the_native_processors_and_ids_are_counted_as_the_forward_does(native, processor):
    theirs = processor(
        text=["<IMG_CONTEXT>.<IMG_CONTEXT>.<video>."],
        images=[item.pixels()[0] for item in ITEMS[:2]],
        videos=[ITEMS[2].pixels()],
        return_tensors="pt",
    )
    ids = engine_ids(native, ITEMS[:3])
    aligned = align_turn(ids, ITEMS[:3], family=native, evidence=receipts(ITEMS[:3]))
    assert not aligned.report.neutral, str(aligned.report)
    values = aligned.tensors.values
    assert torch.equal(values["pixel_values"], theirs["pixel_values"])
    counted = native.sequence(ids, values)["input_ids"]
    assert torch.equal(counted, theirs["input_ids"][0])
    assert native.sequence(counted, values) == {}, "nothing is left to map"
    assert ids[ids == native.video_grammar.context_id].numel() == 12, "the ids that are trained on stay"


def test_a_clip_needs_its_frames_said(native):
    ids = engine_ids(native, ITEMS)
    report = verify_turn(ids, ITEMS, family=native)
    assert set(report.reasons()) == {Reason.FRAMES_UNKNOWN}
    proven = verify_turn(ids, ITEMS, family=native, evidence=receipts(ITEMS))
    assert not proven.neutral
    other = [
        dataclasses.replace(one, frames=(1, 2, 3)) if place == 2 else one
        for place, one in enumerate(receipts(ITEMS))
    ]
    assert verify_turn(ids, ITEMS, family=native, evidence=other).media[2].reason is Reason.FRAMES_RESAMPLED
    fewer = [
        dataclasses.replace(one, frames=(1, 2)) if place == 2 else one
        for place, one in enumerate(receipts(ITEMS))
    ]
    assert verify_turn(ids, ITEMS, family=native, evidence=fewer).media[2].reason is Reason.TUBELET_COUNT


def test_another_number_of_tiles_is_repaired(native, processor):
    item = image(150, 460)
    theirs = processor(
        text=["<IMG_CONTEXT>"],
        images=[item.pixels()[0]],
        images_kwargs={"max_patches": 3},
        return_tensors="pt",
    )
    aligned = align_turn(theirs["input_ids"][0], [item], family=native)
    assert aligned.report.reasons() == (Reason.RESIZED,)
    assert torch.equal(aligned.tensors.values["pixel_values"], theirs["pixel_values"])


def test_damage_stays_count_correct_in_whole_tiles(native):
    ids = engine_ids(native, ITEMS).tolist()
    context = {grammar.context_id for grammar in native.grammars}
    for damaged in (
        [*ids, native.grammar.context_id],
        ids[3:],
        ids[: len(ids) // 2],
        [native.grammar.context_id],
    ):
        aligned = align_turn(damaged, ITEMS, family=native, evidence=receipts(ITEMS))
        assert aligned.report.neutral
        values = aligned.tensors.values
        counted = native.sequence(torch.tensor(damaged), values).get("input_ids", torch.tensor(damaged))
        features = 4 * len(values.get("pixel_values", ()))
        assert int((counted == native.grammar.context_id).sum()) == features
        assert sum(token in context for token in damaged) - features < 4
        assert not any(token == native.video_grammar.context_id for token in counted.tolist())


def test_the_implementation_is_known_and_its_pixels_differ(native, chat):
    assert native.implementation is Implementation.NATIVE
    assert chat.implementation is Implementation.CHAT
    item = image(150, 230)
    assert native.static([item]) != chat.static([item]) or native.tiler != chat.tiler
    assert [native.run_lengths(g, "image") for g in native.static([item])] == [
        chat.run_lengths(g, "image") for g in chat.static([item])
    ]
    ours = native.render(item, native.static([item])[0].grid)
    theirs = chat.render(item, chat.static([item])[0].grid)
    assert 0 < float((ours - theirs).abs().max()) < 0.4


@pytest.mark.engine
def test_tiles_equal_vllms_chat_model(chat):
    internvl = pytest.importorskip("vllm.transformers_utils.processors.internvl")
    from PIL import Image

    assert chat.video_grammar is None, "this tokenizer has no <|video_pad|>"
    for seed, size in enumerate(((150, 230), (400, 111), (56, 56), (31, 500), (900, 700))):
        item = image(*size, seed)
        (geometry,) = chat.static([item])
        theirs = internvl.image_to_pixel_values_internvl(
            Image.fromarray(item.pixels()[0]), input_size=56, min_num=1, max_num=12, use_thumbnail=True
        )
        assert torch.equal(chat.render(item, geometry.grid), theirs)
        assert chat.run_lengths(geometry, "image") == (4 * len(theirs),)
    frames = clip(3, 90, 120)
    theirs = internvl.video_to_pixel_values_internvl(
        frames.pixels(), input_size=56, min_num=1, max_num=1, use_thumbnail=False
    )
    assert torch.equal(chat.render(frames, chat.static([frames])[0].grid), theirs)


def test_tilings_equal_transformers_and_a_tile_count_names_one_canvas():
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    rng = np.random.default_rng(0)
    tiler = FixedTiler(tile_size=448, patch_size=14, merge_size=2, max_num_tiles=12, use_thumbnail=True)
    for _ in range(3000):
        size = tuple(int(side) for side in np.exp(rng.uniform(np.log(16), np.log(4000), 2)))
        most = int(rng.integers(1, 25))
        columns, rows = get_optimal_tiled_canvas(size, (448, 448), 1, most)
        grid = tiler.grid(size, most)
        assert grid == (rows * 32, columns * 32)
        assert tiler.feasible_grids(size, tiler.num_tokens(grid)) == (grid,)
        assert most in tiler.limits(size, tiler.num_tokens(grid))


def test_a_minimum_of_tiles_is_refused_by_name(native_dir, tmp_path):
    import json
    import shutil

    shutil.copytree(native_dir, tmp_path / "copy")
    path = tmp_path / "copy" / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["min_patches"] = 2
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="min_patches is 2"):
        family_of(tmp_path / "copy")
