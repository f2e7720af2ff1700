# SPDX-License-Identifier: Apache-2.0
"""Pictures for the demo's task: crops of real photographs, one half of which may be lit.

The photographs are those that the scikit-image wheel carries, read from the installed package; nothing is
downloaded. Training and validation use different photographs.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PHOTOGRAPHS = {
    "train": (
        "astronaut.png",
        "brick.png",
        "clock_motion.png",
        "coffee.png",
        "coins.png",
        "grass.png",
        "hubble_deep_field.jpg",
        "ihc.png",
        "motorcycle_left.png",
        "motorcycle_right.png",
        "retina.jpg",
    ),
    "validation": ("camera.png", "cell.png", "chelsea.png", "gravel.png", "moon.png", "rocket.jpg"),
}

# Both halves of a crop are brought to this mean and near this spread; the lit one is then raised.
_MEAN, _SPREAD, LIGHT = 70.0, 14.0, 150


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What one picture of the demo is to look like."""

    photograph: str
    size: tuple[int, int]
    """`(height, width)` of the upright picture in pixels."""
    kind: str
    """One of `KINDS`: the file format and its peculiarity."""
    lit: str
    """`l` or `r`: the half that is lit; empty for none."""
    crop: tuple[float, float, float]
    """Where to cut: scale of the crop, and its vertical and horizontal place, each within 0..1."""


def render(picture: Picture) -> np.ndarray:
    """uint8 `[height, width, 3]`: the crop, its halves evened out, then one of them lit."""
    height, width = picture.size
    photograph = _photograph(picture.photograph)
    scale, top, left = picture.crop
    # The largest window of the picture's aspect ratio, shrunk by the scale.
    unit = min(photograph.height / height, photograph.width / width) * (0.5 + 0.5 * scale)
    crop_height, crop_width = max(1.0, unit * height), max(1.0, unit * width)
    y, x = top * (photograph.height - crop_height), left * (photograph.width - crop_width)
    crop = photograph.resize(
        (width, height), Image.Resampling.BICUBIC, box=(x, y, x + crop_width, y + crop_height)
    )
    pixels = np.asarray(crop, dtype=np.float32)
    middle = width // 2
    halves = [even(pixels[:, :middle]), even(pixels[:, width - middle :])]
    evened = np.concatenate([halves[0], even(pixels[:, middle : width - middle]), halves[1]], axis=1)
    if picture.lit == "l":
        evened[:, :middle] += LIGHT
    elif picture.lit == "r":
        evened[:, width - middle :] += LIGHT
    rounded: np.ndarray = np.clip(np.rint(evened), 0, 255).astype(np.uint8)
    return rounded


def encode(picture: Picture) -> tuple[bytes, str]:
    """The file of a picture and its suffix. Decoded as the engine decodes, it shows `render(picture)`."""
    return KINDS[picture.kind](render(picture))


def even(half: np.ndarray) -> np.ndarray:
    """Equal mean and spread for every half, so that the photograph itself gives no hint."""
    if not half.size:
        return half
    centred = half - half.mean()
    evened: np.ndarray = _MEAN + centred * (_SPREAD / max(float(centred.std()), _SPREAD / 2))
    return evened


@cache
def _photograph(name: str) -> Image.Image:
    return Image.open(photograph_dir() / name).convert("RGB")


def photograph_dir() -> Path:
    """The data directory of the installed scikit-image. Raises `ValueError` when it is not installed."""
    spec = find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the demo's pictures come with scikit-image, which is missing: pip install scikit-image"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _save(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def _jpeg(pixels: np.ndarray) -> tuple[bytes, str]:
    return _save(Image.fromarray(pixels), "JPEG", quality=65), "jpg"


def _png(pixels: np.ndarray) -> tuple[bytes, str]:
    return _save(Image.fromarray(pixels), "PNG"), "png"


def _turned_jpeg(pixels: np.ndarray) -> tuple[bytes, str]:
    """Stored upside down: a decoder that ignores the orientation sees the other half lit."""
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = Image.fromarray(np.ascontiguousarray(pixels[::-1, ::-1]))
    return _save(turned, "JPEG", quality=80, exif=exif), "jpg"


def _sideways_jpeg(pixels: np.ndarray) -> tuple[bytes, str]:
    """Stored on its side: a decoder that ignores the orientation sees another size, lit top or bottom."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(pixels)))
    return _save(turned, "JPEG", quality=80, exif=exif), "jpg"


def _grey_png(pixels: np.ndarray) -> tuple[bytes, str]:
    return _save(Image.fromarray(pixels).convert("L"), "PNG"), "png"


def _palette_png(pixels: np.ndarray) -> tuple[bytes, str]:
    return _save(Image.fromarray(pixels).quantize(64), "PNG"), "png"


def _transparent_png(pixels: np.ndarray) -> tuple[bytes, str]:
    """A transparent rim; the colours under it are dark, so dropping alpha shows another picture."""
    height, width = pixels.shape[:2]
    rim = max(1, min(height, width) // 8)
    rgba = np.dstack([pixels, np.zeros((height, width), np.uint8)])
    rgba[rim:-rim, rim:-rim, 3] = 255
    rgba[..., :3] *= rgba[..., 3:] // 255
    return _save(Image.fromarray(rgba, "RGBA"), "PNG"), "png"


def _webp(pixels: np.ndarray) -> tuple[bytes, str]:
    return _save(Image.fromarray(pixels), "WEBP", quality=80), "webp"


def _cmyk_jpeg(pixels: np.ndarray) -> tuple[bytes, str]:
    return _save(Image.fromarray(pixels).convert("CMYK"), "JPEG", quality=85), "jpg"


def _animated_gif(pixels: np.ndarray) -> tuple[bytes, str]:
    """Later frames are mirrored: only the first one tells the truth."""
    mirrored = Image.fromarray(np.ascontiguousarray(pixels[:, ::-1]))
    return _save(Image.fromarray(pixels), "GIF", save_all=True, append_images=[mirrored, mirrored]), "gif"


KINDS: dict[str, Callable[[np.ndarray], tuple[bytes, str]]] = {
    "jpeg": _jpeg,
    "png": _png,
    "turned_jpeg": _turned_jpeg,
    "sideways_jpeg": _sideways_jpeg,
    "grey_png": _grey_png,
    "palette_png": _palette_png,
    "transparent_png": _transparent_png,
    "webp": _webp,
    "cmyk_jpeg": _cmyk_jpeg,
    "animated_gif": _animated_gif,
}
ODD_KINDS = tuple(kind for kind in KINDS if kind not in ("jpeg", "png"))
