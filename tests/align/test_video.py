# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest
import torch

from nemo_rl_ext.align.families.nemotron import Layout
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.shares import label_problem
from nemo_rl_ext.align.timestamps import frame_indices, read_label
from nemo_rl_ext.align.turn import align_turn, verify_turn
from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.align.video_grids import VideoTiler

LAYOUTS = [Layout.REMOTE, Layout.NATIVE]
START, CONTEXT, END = 6, 5, 7


def decode(ids):
    """Bytes as text; the three media tokens by name."""
    names = {START: "<img>", CONTEXT: "<image>", END: "</img>"}
    return "".join(names.get(token, chr(token)) for token in ids)


def encode(text):
    return [ord(char) for char in text]


def tubelets(indices, fps, per_tubelet, length, lengths=None):
    """What the engine writes for a clip: label and run of every tubelet, joined by newlines."""
    duration, ids = int(1000 / fps), []
    for group, start in enumerate(range(0, len(indices), per_tubelet)):
        parts = [
            f"{'F' if place == 0 else 'f'}rame {start + place + 1} sampled at {index * duration / 1000:.2f} seconds"
            for place, index in enumerate(indices[start : start + per_tubelet])
        ]
        ids += encode(("\n" if group else "") + " and ".join(parts) + ": ")
        count = length if lengths is None else lengths[group]
        ids += [START, *[CONTEXT] * count, END]
    return ids


@pytest.fixture
def family_of(make_family):
    def make(layout=Layout.REMOTE, per_tubelet=2, target=64):
        tiler = VideoTiler(16, 2, target, True, per_tubelet)
        return dataclasses.replace(make_family(layout), video=tiler, decoder=decode)

    return make


def clip(indices, *, size=(144, 176), fps=24.0, total=120, load=None):
    def frames(wanted):
        return np.stack([np.full((*size, 3), index, np.uint8) for index in wanted])

    return MediaItem(
        kind="video",
        size=size,
        source="clip.mp4",
        content_hash="clip",
        load=load or frames,
        frame_indices=tuple(indices),
        fps=fps,
        total_frames=total,
    )


def static_of(family, items):
    grids = family.static_grids(items)
    return family.pack(
        items, grids, [family.render(item, grid) for item, grid in zip(items, grids, strict=True)]
    )


def features(tensors, layout, per_tubelet):
    """Features of the tensors themselves: every image, and every started tubelet of a clip."""
    if layout is Layout.REMOTE:
        total, sizes = 0, tensors.values["imgs_sizes"].tolist()
        assert (
            len(sizes) == tensors.values["pixel_values"].shape[0] == int(tensors.values["num_frames"].sum())
        )
        for count in tensors.values["num_frames"].tolist():
            height, width = sizes[0]
            steps = 1 if count == 1 else -(-count // per_tubelet)
            total += steps * (height // 16) * (width // 16) // 4
            sizes = sizes[count:]
        return total
    grids = tensors.values["image_grid_hw"].tolist()
    frames = tensors.values.get("num_frames", torch.zeros(len(grids), dtype=torch.int64)).tolist()
    patches = sum(
        max(count, 1) * height * width for count, (height, width) in zip(frames, grids, strict=True)
    )
    assert tensors.values["pixel_values"].shape[0] == patches
    return sum(
        max(1, -(-count // per_tubelet)) * height * width // 4
        for count, (height, width) in zip(frames, grids, strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_tubelet", [1, 2, 4])
@pytest.mark.parametrize("num_frames", [1, 2, 3, 5, 8])
def test_a_clip_with_the_sampled_frames_is_matched(family_of, layout, per_tubelet, num_frames):
    family, item = family_of(layout, per_tubelet), clip(range(0, 12 * num_frames, 12))
    static = static_of(family, [item])
    ids = tubelets(item.frame_indices, item.fps, per_tubelet, static.grids[0].num_tokens())
    aligned = align_turn(ids, [item], family=family, static=static)
    assert aligned.tensors is static
    assert aligned.report.media[0].verdict is Verdict.MATCHED
    assert aligned.report.media[0].frames == item.frame_indices
    assert features(static, layout, per_tubelet) == ids.count(CONTEXT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("used", [(0, 30, 60, 90), (0, 12, 24), (5,), (0, 12, 24, 36, 48, 60, 72)])
def test_other_frames_are_decoded_again_exactly(family_of, layout, used):
    family, item = family_of(layout), clip((0, 12, 24, 36))
    static = static_of(family, [item])
    ids = tubelets(used, item.fps, 2, static.grids[0].num_tokens())
    aligned = align_turn(ids, [item], family=family, static=static)
    assert aligned.changed
    assert aligned.report.reasons() == (Reason.FRAMES_RESAMPLED,)
    assert aligned.report.media[0].frames == used
    expected = family.render(dataclasses.replace(item, frame_indices=used), static.grids[0])
    assert torch.equal(aligned.tensors.values["pixel_values"], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_target_on_the_engines_side_is_repaired_when_its_grid_is_the_only_one(family_of, layout):
    family, item = family_of(layout, target=64), clip((0, 12, 24, 36))
    engine_grid = VideoTiler(16, 2, 40, True, 2).grid(item.size)
    assert engine_grid != family.static_grids([item])[0]
    ids = tubelets(item.frame_indices, item.fps, 2, engine_grid.num_tokens())
    aligned = align_turn(ids, [item], family=family, static=static_of(family, [item]))
    assert aligned.tensors.grids == (engine_grid,) * 2
    assert aligned.report.reasons() == (Reason.RESIZED,)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_and_videos_of_one_turn_keep_their_order(family_of, make_image, layout):
    family = family_of(layout)
    items = [make_image((96, 128)), clip((0, 12, 24, 36)), make_image((480, 640), 2), clip((0, 6))]
    first, video = family.static_grids(items[:2])
    ids = [
        *encode("a "), START, *[CONTEXT] * first.num_tokens(), END,
        *encode("\n"), *tubelets((0, 12, 24, 36), 24.0, 2, video.num_tokens()),
        *encode("\nb "), START, *[CONTEXT] * 165, END,
        *encode("\n"), *tubelets((0, 6), 24.0, 2, video.num_tokens()),
    ]  # fmt: skip
    aligned = align_turn(ids, items, family=family, static=static_of(family, items))
    assert [item.verdict.value for item in aligned.report.media] == [
        "matched",
        "matched",
        "repaired",
        "matched",
    ]
    assert aligned.tensors.grids == (first, video, video, Grid(22, 30), video)
    assert features(aligned.tensors, layout, 2) == ids.count(CONTEXT)
    if layout is Layout.NATIVE:
        assert aligned.tensors.values["num_frames"].tolist() == [0, 4, 0, 2]
    else:
        assert aligned.tensors.values["num_frames"].tolist() == [1, 4, 1, 2]


def damaged(name, item, length):
    good = tubelets(item.frame_indices, item.fps, 2, length)
    return {
        "pruned tokens": tubelets(item.frame_indices, item.fps, 2, length, lengths=[2 * length, 0]),
        "a dropped first tubelet": good[good.index(END) + 1 :],
        "times of another frame rate": tubelets(item.frame_indices, 7.3, 2, length),
        "frames beyond the end": tubelets((0, 12, 24, 1200), item.fps, 2, length),
        "a frame in the middle beyond the end": tubelets((0, 1200, 24, 36), item.fps, 2, length),
        "times that run backwards": tubelets((0, 36, 24, 48), item.fps, 2, length),
        "another tubelet size": tubelets(item.frame_indices, item.fps, 3, length),
        "runs of unequal length": tubelets(
            item.frame_indices, item.fps, 2, length, lengths=[length, length + 1]
        ),
        "no labels": [START, *[CONTEXT] * length, END] * 2,
        "two clips for one": [*good, *encode("\n"), *good],
        "an impossible length": tubelets(item.frame_indices, item.fps, 2, 7),
        "a cut run": good[:-3],
    }[name]


DAMAGE = {
    "pruned tokens": Reason.PRUNED_VIDEO,
    "a dropped first tubelet": Reason.TUBELET_COUNT,
    "times of another frame rate": Reason.FRAME_TIMES,
    "frames beyond the end": Reason.FRAME_TIMES,
    "a frame in the middle beyond the end": Reason.FRAME_TIMES,
    "times that run backwards": Reason.FRAME_TIMES,
    "another tubelet size": Reason.TUBELET_COUNT,
    "runs of unequal length": Reason.FRAME_GRID,
    "no labels": Reason.TUBELET_COUNT,
    "two clips for one": Reason.TUBELET_COUNT,
    "an impossible length": Reason.INFEASIBLE_LENGTH,
    "a cut run": Reason.TRUNCATED_RUN,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_proven_is_refused_by_name(family_of, layout, name):
    family, item = family_of(layout), clip((0, 12, 24, 36))
    static = static_of(family, [item])
    ids = damaged(name, item, static.grids[0].num_tokens())
    aligned = align_turn(ids, [item], family=family, static=static, row_id="r5")
    assert aligned.report.neutral
    assert aligned.report.reasons() == (DAMAGE[name],)
    assert sum(grid.num_tokens() for grid in aligned.tensors.grids) == ids.count(CONTEXT)
    text = str(aligned.report)
    for part in ("r5", "clip.mp4", "4 frames", "height 144 x width 176", DAMAGE[name].advice):
        assert part in text


def test_static_video_is_verified_before_any_attach_and_the_diagnostic_is_complete(family_of):
    def never(indices):
        raise AssertionError("verification must not decode")

    family, item = family_of(), clip((0, 12, 24, 36), load=never)
    (grid,) = family.static_grids([item])
    good = tubelets(item.frame_indices, item.fps, 2, grid.num_tokens())
    assert [m.verdict for m in verify_turn(good, [item], family=family).media] == [Verdict.MATCHED]
    bad = tubelets((0, 12, 24, 36, 48, 60), item.fps, 2, 12, lengths=[grid.num_tokens(), 6, 6])
    report = verify_turn(bad, [item], family=family, row_id="r9", turn=2)
    assert report.first_mismatch == 1
    text = str(report)
    for part in (
        "'r9'",
        "turn 2",
        "3 placeholder runs",
        "first differing run: 1",
        "4 frames",
        "height 144 x width 176",
    ):
        assert part in text


def test_a_clip_that_no_longer_decodes_is_a_named_neutral_turn(family_of):
    def broken(indices):
        raise ValueError("clip.mp4: the decoder stopped at frame 17")

    family, item = family_of(), clip((0, 12, 24, 36), load=broken)
    tokens = family.static_grids([item])[0].num_tokens()
    aligned = align_turn(tubelets((0, 12), 24.0, 2, tokens), [item], family=family)
    assert aligned.report.reasons() == (Reason.DECODE_FAILED,)
    assert "frame 17" in str(aligned.report)


@pytest.mark.parametrize(
    ("text", "numbers", "times"),
    [
        (
            "x\nFrame 3 sampled at 0.50 seconds and frame 4 sampled at 1.00 seconds: ",
            (3, 4),
            ("0.50", "1.00"),
        ),
        ("Frame 1 sampled at 12.25 seconds: ", (1,), ("12.25",)),
        ("Frame 1 sampled at 12.25 seconds:", None, None),
        # A line break after the label: its own run is gone, and the next run is no tubelet of it.
        ("Frame 1 sampled at 12.25 seconds: \n", None, None),
        ("Frame 1 sampled at 1.2 seconds: ", None, None),
        ("an image: ", None, None),
        ("", None, None),
    ],
)
def test_labels_are_read_in_the_engines_form_only(text, numbers, times):
    label = read_label(text)
    assert (label and label.numbers, label and label.times) == (numbers, times)


@pytest.mark.parametrize(
    "text, number",
    [
        ("Frame 3 sampled at 0.86 secondsand frame 4 sampled at 0.89 seconds: ", 4),
        ("rame 1 sampled at 0.00 seconds: ", 1),
    ],
)
def test_a_damaged_beginning_still_tells_a_clip_from_an_image(text, number):
    label = read_label(text)
    assert (label.numbers, label.whole) == ((number,), False)
    assert f"damaged before frame {number}" in label_problem([label], 2)


@pytest.mark.parametrize("fps", [0.5, 1.0, 2.0, 7.5, 15.0, 23.976, 24.0, 25.0, 29.97, 30.0, 59.94, 60.0])
def test_times_give_back_the_indices_at_every_usual_rate(fps):
    duration = int(1000 / fps)
    indices = tuple(range(0, 500, 7))
    times = [f"{index * duration / 1000:.2f}" for index in indices]
    assert frame_indices(times, fps) == indices


def test_times_that_several_frames_share_need_the_samplers_word():
    times = ["0.00", "0.01"]
    assert frame_indices(times, 240.0) is None
    assert frame_indices(times, 240.0, hint=(0, 2)) == (0, 2)
    assert frame_indices(times, 0.0) is None
    assert frame_indices(["0.03"], 24.0) is None


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("per_tubelet", [1, 2, 4])
def test_grids_text_and_pixels_equal_vllms_on_real_sizes(make_family, per_tubelet, tmp_path_factory):
    """20 (frames, size) combinations: vLLM's own prompt text aligns, and its pixels are ours, bit for bit."""
    processors = pytest.importorskip("vllm.transformers_utils.processors.nano_nemotron_vl")
    from nemo_rl_ext.models.tokenizer import build_byte_tokenizer

    tokenizer = build_byte_tokenizer()
    rng = np.random.default_rng(per_tubelet)
    mean, std = make_family().mean, make_family().std
    for num_frames in (1, 2, 5, 8):
        for size in ((144, 176), (720, 1280), (96, 128), (176, 144), (300, 310)):
            tiler = VideoTiler(16, 2, 64, True, per_tubelet)
            pixels = rng.integers(0, 256, (num_frames, *size, 3), dtype=np.uint8)
            indices = sorted(rng.choice(240, num_frames, replace=False).tolist())
            theirs = processors.video_to_pixel_values(
                pixels,
                input_size=64,
                video_target_num_patches=64,
                video_maintain_aspect_ratio=True,
                norm_mean=torch.tensor(mean).reshape(1, 3, 1, 1),
                norm_std=torch.tensor(std).reshape(1, 3, 1, 1),
                dtype=torch.bfloat16,
            )
            grid = tiler.static_grid(size)
            ids = processors.NanoNemotronVLProcessor.get_video_repl(
                tokens_per_frame=[grid.num_tokens()] * tiler.num_tubelets(num_frames),
                frames_indices=indices,
                frame_duration_ms=int(1000 / 24.0),
                tokenizer=tokenizer,
                img_start_token_ids=[6],
                img_end_token_ids=[7],
                img_context_token_ids=[5],
                video_temporal_patch_size=per_tubelet,
            ).full
            family = dataclasses.replace(
                make_family(dtype=torch.bfloat16),
                video=tiler,
                decoder=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False),
            )
            item = dataclasses.replace(
                clip(indices, size=size, total=240), load=lambda wanted, pixels=pixels: pixels
            )
            aligned = align_turn(ids, [item], family=family)
            assert aligned.report.media[0].verdict is Verdict.MATCHED, str(aligned.report)
            assert torch.equal(aligned.tensors.values["pixel_values"], theirs)
