# SPDX-License-Identifier: Apache-2.0
"""Refuses limits under which the engine may re-size an image of a run, with the numbers that would do."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from nemo_rl_ext.align.grids import DynamicTiler
from nemo_rl_ext.align.sizer import Sizer
from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.manifest.advice import RowImages, advise, row_images
from nemo_rl_ext.manifest.check import measured_items
from nemo_rl_ext.manifest.forecast import EngineModel, forecast
from nemo_rl_ext.manifest.loading import Manifest
from nemo_rl_ext.manifest.measuring import CheckConfig, Measurements
from nemo_rl_ext.manifest.shared_context import context_for_any, limit_for_any
from nemo_rl_ext.media.video import Backend

logger = logging.getLogger(__name__)


def require_prevention(
    manifest: Manifest, engine: EngineModel, *, video_backend: Backend, any_images: bool
) -> None:
    """Check that no request of a manifest's rows makes `engine` re-size an image.

    With `any_images`, that of an agent which adds images, none of up to `engine.limit_images` images of any size
    beside the longest text does. A row that no limit helps is named in a warning, and one with a medium that cannot be
    measured takes no part: the engine refuses such rows, or the run names them when they come up.

    Raises:
        ValueError: with the limits, and every number that would do in their place.
    """
    rows = list(_rows(manifest, engine, video_backend))
    advice = advise(rows, engine.sizer, engine.max_model_len, trainer=engine.family.sizer)
    place = f"at {engine.limits}"
    if advice.num_hopeless:
        logger.warning(
            "%s: no limit helps %s, whose text leaves no room for the smallest grids %s: the engine refuses them, or "
            "they are masked as prevention_failed",
            manifest.path,
            counted(advice.num_hopeless, "row"),
            place,
        )
    if advice.num_resized > advice.num_hopeless:
        numbers = [] if advice.limit is None else [f"{advice.limit_name} {advice.limit} (`nemo-rl-ext pin`)"]
        numbers += [] if advice.max_model_len is None else [f"max_model_len {advice.max_model_len}"]
        raise ValueError(
            f"grpo.media_alignment.prevent: {place} the engine may re-size images in {advice.num_resized} of "
            f"{counted(advice.num_rows, 'row')} with images of {manifest.path}. One of these would do: "
            f"{', '.join([*numbers, 'or the manifest'])} that `nemo-rl-ext fit` makes of this one"
        )
    if any_images and engine.limit_images:
        text = max((row.text_tokens for row in rows), default=0)
        require_any_images(engine.limit_images, text, engine.sizer, engine.max_model_len)


def require_any_images(num_images: int, text_tokens: int, sizer: Sizer, max_model_len: int) -> None:
    """Check that no `num_images` images of any size beside so much text make the engine re-size one.

    Raises:
        ValueError: with every number that would do.
    """
    if not isinstance(sizer, DynamicTiler):
        return
    limit = limit_for_any(num_images, text_tokens, sizer, max_model_len)
    if limit is not None and limit == sizer.limit:
        return
    numbers = [] if limit is None else [f"{sizer.limit_name} {limit} (`nemo-rl-ext pin`)"]
    if sizer.limit:
        numbers.append(f"max_model_len {context_for_any(num_images, text_tokens, sizer)}")
        fewer = next(
            (
                count
                for count in range(num_images - 1, 0, -1)
                if context_for_any(count, text_tokens, sizer) <= max_model_len
            ),
            0,
        )
        numbers += [f"limit_mm_per_prompt.image {fewer}"] if fewer else []
    raise ValueError(
        f"grpo.media_alignment.prevent: an agent may send {counted(num_images, 'image')} (limit_mm_per_prompt.image) "
        f"beside {text_tokens} tokens of text, and at max_model_len {max_model_len} and {sizer.limit_name} "
        f"{sizer.limit} the engine re-sizes some of them. "
        + (f"One of these would do: {', '.join(numbers)}" if numbers else "No limit of patches helps")
    )


def _rows(manifest: Manifest, engine: EngineModel, video_backend: Backend) -> Iterator[RowImages]:
    config = CheckConfig(policy=manifest.policy, engine=engine, decode=False, video_backend=video_backend)
    measure = Measurements(config, manifest.base_dir)
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        for row in manifest:
            measure.start(row, threads)
    for row in manifest:
        try:
            sizes = {media: measure.result(row, media) for media in row.media_refs()}
        except (ValueError, OSError) as error:
            logger.warning("%s: whether its images are re-sized is not known: %s", row.where, error)
            continue
        items = measured_items(row, sizes)
        yield row_images(items, forecast(row, items, engine), engine.max_new_tokens)
