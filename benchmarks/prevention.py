# SPDX-License-Identifier: Apache-2.0
"""Does the advised `max_num_patches` keep every grid static? Random requests on vLLM's own arithmetic.

    python -m benchmarks prevention --requests 10000

A cell is a processor's limits, a context length and a number of images. Its requests have images of random sizes, 0 to
200 tokens of text, which the engine deducts or not, and come in three turns; a warm cache takes a random part of the
images out of the sharing. Prints a line per cell: grids that differ from the static ones with the number for these
images, with the number for any images, and, for comparison, without a pin.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from typing import Any

from PIL import Image

from nemo_rl_ext.align.grids import DynamicTiler, Size
from nemo_rl_ext.manifest.advice import RowImages, advise
from nemo_rl_ext.manifest.shared_context import limit_for_any

LIMITS = {
    "released (1024 to 13312)": DynamicTiler(16, 2, 1024, 13312),
    "tiny (16 to 1024)": DynamicTiler(16, 2, 16, 1024),
}
CONTEXTS = (2048, 8192, 16_384, 32_768)
IMAGES = (1, 2, 4, 8, 16, 32)
OWN_NUMBERS, COMPARED = 500, 500
"""Requests per cell for which the number of their own images is computed (each takes some milliseconds), and that are
tried without a pin."""


class Engine:
    """vLLM's own tiler under one pair of limits; its grids for a list of sizes and the text of the prompt."""

    def __init__(self, tiler: DynamicTiler, max_model_len: int) -> None:
        from vllm.transformers_utils.processors.nano_nemotron_vl import DynamicResolutionImageTiler

        self._tiler = DynamicResolutionImageTiler(
            max_model_len=max_model_len,
            patch_size=tiler.patch_size,
            min_num_patches=tiler.min_num_patches,
            max_num_patches=tiler.max_num_patches,
            downsample_ratio=1 / tiler.merge_size,
            norm_mean=(0.5, 0.5, 0.5),
            norm_std=(0.5, 0.5, 0.5),
        )
        self._patch = tiler.patch_size

    def grids(self, sizes: list[Size], text_tokens: int) -> list[tuple[int, int]] | None:
        """Patch grids (height, width); None where the engine refuses the request."""
        media = [_picture(size) for size in sizes]
        try:
            found = self._tiler.compute_params(media, self._tiler.max_num_tokens_available(text_tokens))
        except (ValueError, ZeroDivisionError):
            return None
        return [(param.patch_size[1], param.patch_size[0]) for param in found]


def _picture(size: Size) -> Image.Image:
    """A picture of which only the size is ever asked."""
    picture = Image.Image()
    picture._size = size[::-1]
    return picture


def random_size(rng: random.Random) -> Size:
    """Pictures of all shapes: screens, photographs, near-squares, slivers."""
    height = int(2 ** rng.uniform(5, 12))
    aspect = rng.choice((1.0, 1.001, rng.uniform(0.98, 1.02), rng.uniform(0.4, 2.5), 2 ** rng.uniform(-4, 4)))
    return height, min(max(16, round(height * aspect)), 8192)


def request(rng: random.Random, num_images: int) -> tuple[list[list[Size]], int]:
    """Images by turn, and the text of the last one."""
    sizes = [random_size(rng) for _ in range(num_images)]
    first, second = sorted(rng.randrange(1, num_images + 1) for _ in range(2))
    return [sizes[:first], sizes[first:second], sizes[second:]], rng.randrange(0, 201)


def differing(
    engine: Engine, static: dict[Size, Any], turns: list[list[Size]], text: int, rng: random.Random
) -> int:
    """Grids that are not the static ones: each turn with text deducted and not, cold and with a warm cache."""
    wrong = 0
    shown: list[Size] = []
    for turn in turns:
        shown = shown + turn
        uncached = [size for size in shown if rng.random() < 0.5]
        for sizes in (shown, uncached):
            for deducted in (0, text):
                grids = engine.grids(sizes, deducted) if sizes else []
                wrong += (
                    len(sizes)
                    if grids is None
                    else sum(grid != static[size] for grid, size in zip(grids, sizes, strict=True))
                )
    return wrong


def cell(
    name: str, tiler: DynamicTiler, max_model_len: int, num_images: int, num_requests: int
) -> dict[str, Any]:
    """One line of the table."""
    rng = random.Random(f"{name} {max_model_len} {num_images}")
    requests = [request(rng, num_images) for _ in range(num_requests)]
    rows = [
        RowImages(kind="", sizes=tuple(size for turn in turns for size in turn), text_tokens=text)
        for turns, text in requests
    ]
    line: dict[str, Any] = {"limits": name, "max_model_len": max_model_len, "images": num_images}
    limit = limit_for_any(num_images, 200, tiler, max_model_len)
    line["for any images"] = _differing_under(tiler, limit, max_model_len, requests, rng)
    line["unpinned"] = _differing_under(tiler, tiler.max_num_patches, max_model_len, requests[:COMPARED], rng)
    # Its own number for each request, as `check` gives it for a manifest of one row.
    line["for these images"] = {"requests": 0, "differing": 0}
    for (turns, text), row in list(zip(requests, rows, strict=True))[:OWN_NUMBERS]:
        limit = advise([row], tiler, max_model_len).limit
        if limit is not None:
            one = _differing_under(tiler, limit, max_model_len, [(turns, text)], rng)
            line["for these images"]["requests"] += 1
            line["for these images"]["differing"] += one["differing"]
    return line


def _differing_under(
    tiler: DynamicTiler, limit: int | None, max_model_len: int, requests: list[Any], rng: random.Random
) -> dict[str, Any] | None:
    if limit is None:
        return None
    pinned = dataclasses.replace(tiler, max_num_patches=limit)
    engine = Engine(pinned, max_model_len)
    wrong = 0
    for turns, text in requests:
        sizes = {size for turn in turns for size in turn}
        static = {size: tuple(pinned.static_grid(size)) for size in sizes}
        wrong += differing(engine, static, turns, text, rng)
    return {"max_num_patches": limit, "requests": len(requests), "differing": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="requests per cell")
    parser.add_argument("--images", type=int, nargs="*", default=IMAGES)
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    parser.add_argument("--limits", default="", help="only those whose name begins so")
    args = parser.parse_args()
    for name, tiler in LIMITS.items():
        if not name.startswith(args.limits):
            continue
        for max_model_len in args.contexts:
            for num_images in args.images:
                print(json.dumps(cell(name, tiler, max_model_len, num_images, args.requests)), flush=True)


if __name__ == "__main__":
    main()
