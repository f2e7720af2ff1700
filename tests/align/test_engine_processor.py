# SPDX-License-Identifier: Apache-2.0
"""Every family against the engine's own media processor: its ids, its geometry and its pixels, bit for bit."""

import numpy as np
import pytest
import torch
from PIL import Image

from nemo_rl_ext.align.evidence import Evidence
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import align_turn
from nemo_rl_ext.models.tiny_families import build_tiny_family

pytestmark = pytest.mark.engine

IMAGE = {"internvl": "<IMG_CONTEXT>"}
VIDEO = {"internvl": "<video>"}
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl")


@pytest.fixture(scope="module", params=FAMILIES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(name, tmp_path_factory):
    return build_tiny_family(name, tmp_path_factory.mktemp("tiny") / name)


@pytest.fixture(scope="module")
def engine(name, checkpoint):
    pytest.importorskip("vllm")
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config = ModelConfig(
        model=str(checkpoint),
        tokenizer=str(checkpoint),
        dtype="bfloat16" if name == "qwen3_5" else "float32",
        max_model_len=8192,
        limit_mm_per_prompt={"image": 8, "video": 4},
        mm_processor_cache_gb=0,
        seed=0,
    )
    return MULTIMODAL_REGISTRY.create_processor(config)


@pytest.fixture(scope="module")
def family(checkpoint):
    return family_of(checkpoint)


def smooth(frames, height, width, rng):
    coarse = rng.integers(0, 256, (frames, max(2, height // 16), max(2, width // 16), 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(one).resize((width, height))) for one in coarse])


def draw(rng, index):
    height, width = (int(side) for side in rng.integers(40, 420, 2))
    if rng.random() < 0.6:
        pixels = smooth(1, height, width, rng)
        return MediaItem(size=(height, width), source=f"{index}.png", load=lambda: pixels)
    frames, total = int(rng.choice([2, 4, 5, 8])), int(rng.integers(60, 300))
    clip = smooth(frames, height, width, rng)
    return MediaItem(
        kind="video",
        size=(height, width),
        source=f"{index}.mp4",
        load=lambda _: clip,
        frame_indices=tuple(int(i) for i in np.linspace(0, total - 1, frames).round()),
        fps=float(rng.choice([24.0, 25.0, 30.0])),
        total_frames=total,
    )


def metadata(item):
    return {
        "fps": item.fps,
        "duration": item.total_frames / item.fps,
        "total_num_frames": item.total_frames,
        "frames_indices": list(item.frame_indices),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def applied(engine, name, items, kwargs):
    """What the engine makes of a prompt of ids and these media."""
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    tokenizer = engine.info.get_tokenizer()
    image = IMAGE.get(name, "<|vision_start|><|image_pad|><|vision_end|>")
    video = VIDEO.get(name, "<|vision_start|><|video_pad|><|vision_end|>")
    text = "".join((image if item.kind == "image" else video) + " and " for item in items)
    data = {
        "image": [Image.fromarray(item.pixels()[0]) for item in items if item.kind == "image"],
        "video": [(item.pixels(), metadata(item)) for item in items if item.kind == "video"],
    }
    made = engine.apply(
        ProcessorInputs(
            prompt=tokenizer.encode(text, add_special_tokens=False),
            mm_data_items=engine.info.parse_mm_data({kind: media for kind, media in data.items() if media}),
            hf_processor_mm_kwargs=kwargs,
        ),
        TimingContext(),
    )
    values = {
        kind: [{key: element.data for key, element in one.items()} for one in media]
        for kind, media in made["mm_kwargs"].items()
    }
    return torch.tensor(made["prompt_token_ids"]), values


def small(values):
    return {key: value for key, value in values.items() if torch.is_tensor(value) and value.numel() <= 64}


def trained(pixels, family, kind):
    """The engine's pixels as a trainer has them: bytes that it normalises on the device are normalised here."""
    if pixels.dtype != torch.uint8:
        return pixels
    config = family.video_config if kind == "video" else family.image_config
    mean, std = (
        torch.tensor(config[key]) * (1.0 / config["rescale_factor"]) for key in ("image_mean", "image_std")
    )
    grouped = pixels.float().reshape(len(pixels), 3, -1)
    return ((grouped - mean[None, :, None]) / std[None, :, None]).reshape(len(pixels), -1)


def budget(name, rng):
    """Limits of one request, as a client may send them."""
    if name == "internvl":
        return {"max_patches": int(rng.integers(1, 12))}
    low = int(rng.integers(8, 40)) * 1024
    return {"size": {"shortest_edge": low, "longest_edge": low + int(rng.integers(20, 300)) * 1024}}


@pytest.mark.parametrize("own_limits", [False, True])
def test_what_the_engine_wrote_is_proven_and_made_again_bit_for_bit(engine, name, family, own_limits):
    rng = np.random.default_rng(3 + own_limits)
    compared = repaired = 0
    for _ in range(6):
        items = [draw(rng, index) for index in range(int(rng.integers(1, 4)))]
        ids, values = applied(engine, name, items, budget(name, rng) if own_limits else {})
        of_kind = {kind: iter(media) for kind, media in values.items()}
        theirs = [next(of_kind[item.kind]) for item in items]
        geometries = [family.captured(item, small(one)) for item, one in zip(items, theirs, strict=True)]
        assert all(geometries)
        evidence = [
            Evidence(grid=geometry.grid, tubelets=geometry.tubelets, frames=item.frame_indices or None)
            for item, geometry in zip(items, geometries, strict=True)
        ]
        aligned = align_turn(ids, items, family=family, evidence=evidence, ordered=True)
        assert not aligned.report.neutral, str(aligned.report)
        assert [judged.grid for judged in aligned.report.media] == [one.grid for one in geometries]
        repaired += aligned.report.repaired
        # Images are proven by their runs alone, too.
        if all(item.kind == "image" for item in items):
            alone = align_turn(ids, items, family=family, ordered=True)
            assert [judged.grid for judged in alone.report.media] == [one.grid for one in geometries]
        for item, geometry, one in zip(items, geometries, theirs, strict=True):
            keys = ("pixel_values_videos", "pixel_values") if item.kind == "video" else ("pixel_values",)
            pixels = next(one[key] for key in keys if key in one)
            ours = family.render(item, geometry.grid)
            # vLLM before 0.32 hands a bfloat16 model its pixels in bfloat16.
            theirs_as_trained = trained(pixels, family, item.kind)
            assert torch.equal(ours.to(theirs_as_trained.dtype), theirs_as_trained), (
                item.source,
                geometry,
            )
            compared += 1
        counted = family.sequence(ids, aligned.tensors.values).get("input_ids", ids)
        tokens = (
            {family.grammars[0].context_id} if name == "internvl" else {g.context_id for g in family.grammars}
        )
        assert sum(int((counted == token).sum()) for token in tokens) == family.num_features(aligned.tensors)
    assert compared >= 6
    assert bool(repaired) or not own_limits


QWEN_ARGUMENTS = (
    {"size": {"shortest_edge": 3136, "longest_edge": 20000}},
    {"max_pixels": 30000},
    {"min_pixels": 100000},
    {"min_pixels": 3136, "max_pixels": 30000},
    {"images_kwargs": {"min_pixels": 90000}},
    {"videos_kwargs": {"size": {"shortest_edge": 3136, "longest_edge": 20000}}},
    {"images_kwargs": {"max_pixels": 30000}, "videos_kwargs": {"max_pixels": 20000}},
)


def test_a_known_argument_does_what_the_family_says_and_another_is_refused(engine, name, family):
    """`mm_processor_kwargs`: what `served_with` makes of them is what the engine's processor does."""
    rng = np.random.default_rng(8)
    items = [draw(rng, index) for index in range(4)]
    assert {item.kind for item in items} == {"image", "video"}
    known = ({"max_patches": 3}, {"max_patches": 20}) if name == "internvl" else QWEN_ARGUMENTS
    differing = set()
    for arguments in known:
        _, values = applied(engine, name, items, arguments)
        of_kind = {kind: iter(media) for kind, media in values.items()}
        theirs = [family.captured(item, small(next(of_kind[item.kind]))) for item in items]
        ours = list(family.served_with(arguments).static(items))
        assert ours == theirs, arguments
        differing.add(ours != list(family.static(items)))
    assert True in differing
    for arguments in (
        {"device": "cuda"},
        {"do_sample_frames": True},
        {"fps": 1},
        {"cap_pixels_per_frame": True},
    ):
        with pytest.raises(ValueError, match=f"mm_processor_kwargs.{next(iter(arguments))}: what it does"):
            family.served_with(arguments)


def test_limits_of_one_kind_beside_limits_of_all_are_refused(name, family):
    """Qwen2.5-VL's processor drops the one, Qwen3-VL's keeps both."""
    with pytest.raises(ValueError, match="mm_processor_kwargs"):
        family.served_with({"max_pixels": 50000, "videos_kwargs": {"max_pixels": 20000}})
    with pytest.raises(ValueError, match="(images|videos)_kwargs: what it does"):
        family.served_with({"videos_kwargs": {"images_kwargs": {}}})
