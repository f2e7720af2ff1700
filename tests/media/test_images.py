# SPDX-License-Identifier: Apache-2.0
"""Images decode to what the engine's loader makes of them, and broken ones to one clear error."""

import io
import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from nemo_rl_ext.media.errors import MediaDecodeError
from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.media.images import ALLOWED_FORMATS, image_size, load_image
from nemo_rl_ext.media.policy import MediaPolicy

POLICY = MediaPolicy()


@pytest.fixture(scope="session")
def engine_load():
    """vLLM's own loader."""
    media = pytest.importorskip("vllm.multimodal.media.image")
    return lambda data: np.asarray(media.ImageMediaIO().load_bytes(data).media)


@pytest.mark.engine
def test_every_odd_kind_equals_the_engine(odd_images, engine_load):
    assert len(odd_images) > 45
    for name, data in odd_images.items():
        np.testing.assert_array_equal(load_image(data, POLICY).pixels, engine_load(data), err_msg=name)


@pytest.mark.engine
def test_what_the_engine_refuses_is_refused(odd_images, engine_load):
    """Every prefix of a file, a bit flipped here and there: same pixels, or refused on both sides."""
    rng = np.random.default_rng(0)
    outcomes = {"same": 0, "refused": 0}
    for name, data in odd_images.items():
        cuts = [data[: len(data) * k // 8] for k in range(1, 8)]
        flips = []
        for _ in range(12):
            damaged = bytearray(data)
            damaged[rng.integers(len(data))] ^= 1 << rng.integers(8)
            flips.append(bytes(damaged))
        for damaged in cuts + flips:
            try:
                expected = engine_load(damaged)
            except Exception:
                with pytest.raises(MediaDecodeError):
                    load_image(damaged, POLICY, where=name)
                outcomes["refused"] += 1
            else:
                np.testing.assert_array_equal(load_image(damaged, POLICY).pixels, expected, err_msg=name)
                outcomes["same"] += 1
    assert min(outcomes.values()) > 100, outcomes


@pytest.mark.engine
def test_allowed_formats_are_the_engines():
    image = pytest.importorskip("vllm.multimodal.image")
    assert ALLOWED_FORMATS == image.ALLOWED_IMAGE_FORMATS


@pytest.mark.engine
@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize(
    "height, width",
    [
        (1, 1),
        (1, 2),
        (1, 9),
        (3, 3),
        (3, 4),
        (9, 1),
        (3, 900),
        (4, 3),
        (2, 10000),
        (10000, 2),
        (16, 4000),
        (2000, 40),
    ],
)
def test_tiny_and_thin_pictures_keep_their_shape(height, width, fmt, picture, encode, engine_load):
    """A side of 1 or 3 is no channel: height stays height, whatever a processor would guess from the array."""
    data = encode(Image.fromarray(picture(height, width)), fmt)
    decoded = load_image(data, POLICY)
    assert decoded.pixels.shape == (height, width, 3) == (*image_size(data, POLICY), 3)
    np.testing.assert_array_equal(decoded.pixels, engine_load(data))


def test_size_agrees_with_the_decoded_pixels(odd_images):
    for name, data in odd_images.items():
        decoded = load_image(data, POLICY)
        assert image_size(data, POLICY) == decoded.size == decoded.pixels.shape[:2], name
        assert decoded.pixels.dtype == np.uint8 and decoded.pixels.flags.c_contiguous, name


def test_the_size_of_a_png_without_exif_is_read_from_its_header_alone(odd_images, monkeypatch):
    loads = []
    original = PngImagePlugin.PngImageFile.load
    monkeypatch.setattr(
        PngImagePlugin.PngImageFile, "load", lambda image: loads.append(image) or original(image)
    )
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, "PNG")
    assert image_size(buffer.getvalue(), POLICY) == (20, 30)
    assert loads == []
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, "PNG", exif=exif)
    assert image_size(buffer.getvalue(), POLICY) == (30, 20)


@pytest.mark.parametrize(
    "orientation, upright",
    [
        (1, lambda p: p),
        (2, lambda p: p[:, ::-1]),
        (3, lambda p: p[::-1, ::-1]),
        (4, lambda p: p[::-1]),
        (5, lambda p: p.transpose(1, 0, 2)),
        (6, lambda p: np.rot90(p, -1)),
        (7, lambda p: np.rot90(p, 2).transpose(1, 0, 2)),
        (8, lambda p: np.rot90(p)),
        (9, lambda p: p),
    ],
)
def test_exif_orientation(odd_images, orientation, upright):
    stored = load_image(odd_images["oriented_1.jpg"], POLICY).pixels
    turned = load_image(odd_images[f"oriented_{orientation}.jpg"], POLICY)
    np.testing.assert_array_equal(turned.pixels, upright(stored))


def test_transparency_is_composited_over_white(encode):
    rgba = np.zeros((2, 3, 4), np.uint8)
    rgba[..., 0] = 200
    rgba[:, :, 3] = [255, 128, 0]
    pixels = load_image(encode(Image.fromarray(rgba, "RGBA"), "PNG"), POLICY).pixels
    assert pixels[0].tolist() == [[200, 0, 0], [227, 127, 127], [255, 255, 255]]


def test_transparent_palette_entry_becomes_white(encode):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    assert load_image(encode(image, "PNG"), POLICY).pixels.tolist() == [[[10, 20, 30], [40, 50, 60]]]
    keyed = load_image(encode(image, "PNG", transparency=0), POLICY).pixels
    assert keyed.tolist() == [[[255, 255, 255], [40, 50, 60]]]


def test_grey_sixteen_bit_and_cmyk(encode):
    # Pillow clips 16-bit grey where one would expect scaling; the engine gets the same.
    deep = np.array([[0, 200, 256, 65535]], np.uint16)
    pixels = load_image(encode(Image.fromarray(deep), "PNG"), POLICY).pixels
    assert pixels[0, :, 1].tolist() == [0, 200, 255, 255]
    grey = load_image(encode(Image.fromarray(np.array([[7, 200]], np.uint8)), "PNG"), POLICY).pixels
    assert grey.tolist() == [[[7, 7, 7], [200, 200, 200]]]
    cmyk = Image.new("CMYK", (1, 1), (0, 255, 255, 0))
    assert load_image(encode(cmyk, "TIFF"), POLICY).pixels.tolist() == [[[255, 0, 0]]]


def test_animations_give_their_first_frame(odd_images, picture):
    for name in ("animated.webp", "animated.png", "pages.tiff"):
        decoded = load_image(odd_images[name], POLICY)
        np.testing.assert_array_equal(decoded.pixels, picture(seed=1), err_msg=name)


def test_equal_pixels_share_their_hash_whatever_the_file(encode, picture):
    image = Image.fromarray(picture())
    png, bmp = load_image(encode(image, "PNG"), POLICY), load_image(encode(image, "BMP"), POLICY)
    assert png.content_hash == bmp.content_hash == pixel_digest(picture())


def _png_header(width, height):
    png = b"\x89PNG\r\n\x1a\n"
    for body in (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT"):
        png += struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return png


@pytest.mark.parametrize("size", [(20000, 20000), (9460, 9460), (89_478_486, 1)])
def test_pixel_limit_is_read_from_the_header(size):
    """The file holds no pixels at all: only a check before decoding can answer so."""
    with pytest.raises(MediaDecodeError, match="pixels"):
        load_image(_png_header(*size), POLICY, where="train.jsonl:3")
    with pytest.raises(MediaDecodeError, match="pixels"):
        image_size(_png_header(*size), POLICY)


def test_pixel_limit_is_the_policys(encode, picture):
    data = encode(Image.fromarray(picture(10, 10)), "PNG")
    assert load_image(data, MediaPolicy(max_pixels=100)).size == (10, 10)
    with pytest.raises(MediaDecodeError, match="over the limit of 99"):
        load_image(data, MediaPolicy(max_pixels=99))


def test_broken_files_are_one_clear_error(tmp_path, odd_images):
    broken = {
        "half.png": odd_images["rgb.png"][: len(odd_images["rgb.png"]) // 2],
        "truncated.jpg": odd_images["rgb.jpg"][:-200],
        "truncated_turned.jpg": odd_images["oriented_6.jpg"][:-200],
        "empty.png": b"",
        "text.png": b"this is not an image at all",
        "script.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\nshowpage\n",
        "svg.svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='4' height='4'/>",
        "numpy.npy": b"\x93NUMPY\x01\x00" + b"\x00" * 64,
        "zeros.bin": b"\x00" * 4096,
    }
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(MediaDecodeError) as caught:
            load_image(name, POLICY, base_dir=tmp_path, where="train.jsonl:7")
        message = str(caught.value)
        assert name in message and "train.jsonl:7" in message and "\n" not in message, message
        copy = pickle.loads(pickle.dumps(caught.value))
        assert type(copy) is MediaDecodeError and copy.args == (message,)
        assert not copy.infrastructure


def test_a_picture_from_a_path_equals_one_from_bytes(tmp_path, odd_images):
    (tmp_path / "a.png").write_bytes(odd_images["rgba.png"])
    decoded = load_image("a.png", POLICY, base_dir=tmp_path)
    assert decoded.source == "a.png"
    np.testing.assert_array_equal(decoded.pixels, load_image(odd_images["rgba.png"], POLICY).pixels)
    assert load_image(odd_images["rgba.png"], POLICY).source == "<bytes>"


def test_random_bytes_never_do_anything_else_than_refuse(odd_images):
    rng = np.random.default_rng(1)
    heads = [data[:24] for data in odd_images.values()]
    for index in range(300):
        data = heads[index % len(heads)] + rng.bytes(int(rng.integers(0, 400)))
        try:
            size = load_image(data, MediaPolicy(max_pixels=1 << 20)).size
        except MediaDecodeError:
            continue
        assert Image.open(io.BytesIO(data)).size == size[::-1]
