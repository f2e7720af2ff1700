# SPDX-License-Identifier: Apache-2.0
"""Still images as the engine's loader sees them.

Mirrors vLLM 0.32.0: `ImageMediaIO.load_bytes` (vllm/multimodal/media/image.py) and `open_image`,
`normalize_image`, `convert_image_mode` (vllm/multimodal/image.py). That is, in this order: open the first
frame with one of the allowed formats, apply the EXIF orientation, load, then bring the mode to RGB,
transparency composited over white. CMYK, palette and 16-bit images go through Pillow's own conversion, as
there (Pillow 13 clips 16-bit grey at 255 rather than scaling it: such pictures come out nearly white).
Truncated files are refused, as there: `ImageFile.LOAD_TRUNCATED_IMAGES` is left alone and off by default.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from nemo_rl_ext.media.errors import MediaDecodeError, describe
from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.media.policy import MediaPolicy, check_num_bytes
from nemo_rl_ext.media.sources import read_media_bytes

ALLOWED_FORMATS: tuple[str, ...] = tuple(
    """AVIF BLP BMP CUR DCX DDS DIB FITS FLI FTEX GBR GIF ICNS ICO IM IMT IPTC JPEG JPEG2000 MCIDAS MSP PCD
    PCX PIXAR PNG PPM PSD QOI SGI SPIDER SUN TGA TIFF WEBP XBM XPM XVTHUMB""".split()
)
"""Pillow formats that the engine opens, tried in this order. Left out are those that hand the bytes to
another program (EPS, WMF) or only identify a file (BUFR, GRIB, HDF5, MPEG)."""

# Formats whose header tells the size before orientation; TIFF is not among them, as Pillow may turn it early.
_HEADER_SIZED = {"AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "QOI", "WEBP"}
_SIDEWAYS = (5, 6, 7, 8)
# Without one of these names in its bytes a PNG has no orientation: EXIF chunk, ImageMagick's text form, XMP.
_PNG_EXIF = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodedImage:
    """One decoded image: what the engine's processor gets."""

    pixels: np.ndarray
    """uint8 `[height, width, 3]`, RGB, C-contiguous, upright."""
    source: str
    """The reference that it was read from, or `<bytes>`."""

    @cached_property
    def content_hash(self) -> str:
        """`identity.pixel_digest` of the pixels, made when it is first asked for."""
        return pixel_digest(self.pixels)

    @property
    def size(self) -> tuple[int, int]:
        """`(height, width)` in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]


def load_image(
    ref: str | bytes, policy: MediaPolicy, *, base_dir: Path | None = None, where: str = ""
) -> DecodedImage:
    """Decode an image to upright RGB pixels, equal to the engine's.

    `ref` is a reference (`read_media_bytes`) or the encoded bytes themselves; `where` names the row in
    errors. Raises `MediaDecodeError` for whatever is wrong; the pixel limit is checked before decoding.
    """
    data, source = _bytes_of(ref, policy, base_dir, where)
    try:
        rgb = _to_rgb(_open(data, policy, source, where))
        # An array of its own: `asarray` alone cannot be written to, and `array` asks Pillow for the pixels twice.
        pixels = np.asarray(rgb, dtype=np.uint8).copy(order="C")
    except MediaDecodeError:
        raise
    # Pillow's plugins raise almost anything on a damaged file (struct.error, SyntaxError, KeyError, ...).
    except Exception as error:
        raise _undecodable(source, where, error) from None
    if pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise _undecodable(source, where, ValueError(f"it decodes to an array of shape {pixels.shape}"))
    return DecodedImage(pixels=pixels, source=source)


def image_size(
    ref: str | bytes, policy: MediaPolicy, *, base_dir: Path | None = None, where: str = ""
) -> tuple[int, int]:
    """`(height, width)` of the upright image, from the header where the format allows it.

    A header says nothing about the rest of the file: only `load_image` proves that an image decodes.
    """
    data, source = _bytes_of(ref, policy, base_dir, where)
    try:
        image = _open(data, policy, source, where)
        if image.format not in _HEADER_SIZED:
            image = _upright(image)
            image.load()
            return image.height, image.width
        sideways = False
        with contextlib.suppress(Exception):
            # Pillow decodes a whole PNG to look for EXIF behind the pixels: only where there can be any.
            if image.format != "PNG" or any(marker in data for marker in _PNG_EXIF):
                sideways = image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
        return (image.width, image.height) if sideways else (image.height, image.width)
    except MediaDecodeError:
        raise
    except Exception as error:
        raise _undecodable(source, where, error) from None


def _bytes_of(ref: str | bytes, policy: MediaPolicy, base_dir: Path | None, where: str) -> tuple[bytes, str]:
    if isinstance(ref, bytes):
        check_num_bytes(len(ref), "<bytes>", policy, where)
        return ref, "<bytes>"
    return read_media_bytes(ref, policy, base_dir, where=where), ref


def _open(data: bytes, policy: MediaPolicy, source: str, where: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=ALLOWED_FORMATS)
    except Image.DecompressionBombError as error:
        problem = f"expected at most {policy.max_pixels} pixels, but Pillow says: {error}"
        raise MediaDecodeError(describe("image", source, where, problem, "shrink the image")) from None
    except UnidentifiedImageError:
        problem = f"no image format fits its {len(data)} bytes, which start with {data[:8]!r}"
        raise MediaDecodeError(describe("image", source, where, problem, "replace the file")) from None
    if image.width * image.height > policy.max_pixels:
        problem = (
            f"it is {image.height}x{image.width} (height x width), {image.width * image.height} pixels, "
            f"over the limit of {policy.max_pixels}"
        )
        raise MediaDecodeError(describe("image", source, where, problem, "shrink it or raise max_pixels"))
    return image


def _upright(image: Image.Image) -> Image.Image:
    # The engine ignores orientation data that it cannot read, so this must too.
    with contextlib.suppress(Exception):
        image = ImageOps.exif_transpose(image)
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    image = _upright(image)
    image.load()
    if image.mode == "RGB":
        # A transparent colour key of an RGB image is ignored, as in the engine.
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", rgba.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image.convert("RGB")


def _undecodable(source: str, where: str, error: Exception) -> MediaDecodeError:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    problem = f"expected a complete image, decoding stopped with {reason}"
    return MediaDecodeError(describe("image", source, where, problem, "replace the file"))
