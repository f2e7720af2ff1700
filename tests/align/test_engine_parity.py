# SPDX-License-Identifier: Apache-2.0
"""Repaired pixels against the engine's own processor, bit for bit, on real photographs of every odd kind."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from nemo_rl_ext.align.families.nemotron import Layout
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.pixels import patchify
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.aligner import AlignerConfig, RolloutAligner

pytestmark = pytest.mark.engine


def photograph(name):
    data = pytest.importorskip("skimage.data")
    return Image.fromarray(getattr(data, name)())


def encoded(image, fmt, **options):
    buffer = io.BytesIO()
    image.save(buffer, fmt, **options)
    return buffer.getvalue()


def rotated(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(photograph("astronaut").resize((300, 200)), "JPEG", exif=exif, quality=90)


def rgba():
    image = photograph("astronaut").convert("RGBA")
    image.putalpha(ImageOps.invert(photograph("camera").resize(image.size)))
    return image


KINDS = {
    "jpeg": lambda: encoded(photograph("coffee"), "JPEG"),
    **{f"rotated-{value}": (lambda value=value: rotated(value)) for value in range(2, 9)},
    "rgba": lambda: encoded(rgba(), "PNG"),
    "grey-alpha": lambda: encoded(rgba().convert("LA"), "PNG"),
    "palette": lambda: encoded(photograph("chelsea").quantize(64), "PNG"),
    "palette-transparent": lambda: encoded(photograph("chelsea").quantize(64), "PNG", transparency=3),
    "grey": lambda: encoded(photograph("camera"), "PNG"),
    "16-bit": lambda: encoded(
        Image.fromarray(np.asarray(photograph("camera")).astype(np.uint16) * 200), "PNG"
    ),
    "cmyk": lambda: encoded(photograph("coffee").convert("CMYK"), "JPEG"),
    "animated-gif": lambda: encoded(
        photograph("chelsea").quantize(32),
        "GIF",
        save_all=True,
        append_images=[photograph("coffee").quantize(32)],
    ),
    "animated-webp": lambda: encoded(
        photograph("chelsea"), "WEBP", save_all=True, append_images=[photograph("coffee").resize((451, 300))]
    ),
    "bilevel": lambda: encoded(photograph("camera").convert("1"), "PNG"),
}


@pytest.fixture(scope="module")
def engine():
    processors = pytest.importorskip("vllm.transformers_utils.processors.nano_nemotron_vl")
    from vllm.multimodal.media.image import ImageMediaIO

    tiler = processors.DynamicResolutionImageTiler(
        max_model_len=16384,
        patch_size=16,
        min_num_patches=16,
        max_num_patches=1024,
        downsample_ratio=0.5,
        norm_mean=[0.48145466, 0.4578275, 0.40821073],
        norm_std=[0.26862954, 0.26130258, 0.27577711],
    )

    def process(data: bytes, budget: int, dtype: torch.dtype):
        media = ImageMediaIO().load_bytes(data)
        params, _ = tiler.process_media(getattr(media, "media", media), budget)
        (pixels,) = tiler.apply_params(params, dtype=dtype)
        return Grid(params.patch_size[1], params.patch_size[0]), pixels

    return process


@pytest.mark.usefixtures("kernels_or_not")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_equal_the_engines_bit_for_bit(kind, dtype, engine, make_family):
    data = KINDS[kind]()
    image = load_image(data, MediaPolicy())
    item = MediaItem(size=image.size, source=kind, load=lambda: image.pixels[None])
    remote, native = make_family(Layout.REMOTE, dtype), make_family(Layout.NATIVE, dtype)
    for budget in (16, 90, 700, 1024):
        grid, theirs = engine(data, budget, dtype)
        assert remote.tiler.grid(image.size, budget) == grid
        assert torch.equal(remote.render(item, grid), theirs)
        assert torch.equal(native.render(item, grid), patchify(theirs[None], 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_static_tensors_of_an_aligned_run_are_the_engines_pixels(engine, dtype, tiny_checkpoint, tmp_path):
    """What `matched` leaves to training. The checkpoint's own processor, a run without alignment, is a rounding off."""
    sources = tuple(MediaSource(ref=kind) for kind in KINDS)
    for kind, encode in KINDS.items():
        (tmp_path / kind).write_bytes(encode())
    config = AlignerConfig(
        model_dir=tiny_checkpoint,
        media_policy=MediaPolicy(roots=(tmp_path,)),
        base_dir=tmp_path,
        dtype=dtype,
        render_static=True,
    )
    (rendered,) = RolloutAligner(config).static([sources])
    (processed,) = RolloutAligner(dataclasses.replace(config, render_static=False)).static([sources])
    theirs = [engine((tmp_path / kind).read_bytes(), 1024, dtype) for kind in KINDS]
    assert rendered.tensors.grids == processed.tensors.grids == tuple(grid for grid, _ in theirs)
    assert rendered.tensors.values.keys() == processed.tensors.values.keys()
    engines = torch.cat([patchify(pixels[None], 16) for _, pixels in theirs])
    assert torch.equal(rendered.tensors.values["pixel_values"], engines)
    tolerance = {torch.bfloat16: 0.016, torch.float32: 2e-6}[dtype]
    assert torch.allclose(processed.tensors.values["pixel_values"], engines, atol=tolerance, rtol=0)
