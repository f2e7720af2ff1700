# SPDX-License-Identifier: Apache-2.0
"""`grpo.media_alignment.prevent` in a recipe: the limits that it names, before NeMo-RL starts anything.

A recipe's rows come from data sets that are not read here, so the rule is checked for any images: as many of them as a
request may carry, of any size. What it leaves for text is said, because the longest text is not known.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nemo_rl_ext.align.grids import DynamicTiler
from nemo_rl_ext.integration.settings import BLOCK, RecipeError, pick
from nemo_rl_ext.manifest.prevention import require_any_images
from nemo_rl_ext.manifest.shared_context import context_for_any
from nemo_rl_ext.models.limits import run_limits

logger = logging.getLogger(__name__)

_VLLM = "policy.generation.vllm_kwargs"


def check_prevention(config: Any) -> None:
    """Refuse a recipe under whose limits the engine may re-size images, or whose limits are not known.

    Raises:
        RecipeError: naming what is not known, what differs, or the numbers that would do.
    """
    model = Path(str(pick(config, "policy.model_name")))
    processor = Path(str(pick(config, "policy.tokenizer.name") or model))
    max_model_len = pick(config, "policy.generation.vllm_cfg.max_model_len")
    num_images = pick(config, f"{_VLLM}.limit_mm_per_prompt.image")
    unknown = {
        f"policy.model_name ({model} is no directory on this machine)": not model.is_dir(),
        f"policy.tokenizer.name ({processor} is no directory on this machine)": not processor.is_dir(),
        "policy.generation.vllm_cfg.max_model_len": not isinstance(max_model_len, int),
        f"{_VLLM}.limit_mm_per_prompt.image (vLLM's default is hundreds of images)": not isinstance(
            num_images, int
        ),
    }
    if missing := [name for name, is_missing in unknown.items() if is_missing]:
        raise RecipeError(
            f"{BLOCK}.prevent computes from the checkpoint's limits, the context and the images of a request whether "
            f"the engine re-sizes any. Not known: {'; '.join(missing)}. Name them in the recipe, or set prevent: false"
        )
    try:
        sizer = run_limits(
            model,
            processor=processor,
            hf_overrides=pick(config, f"{_VLLM}.hf_overrides"),
            arguments=pick(config, f"{_VLLM}.mm_processor_kwargs"),
        )
    except ValueError as error:
        raise RecipeError(f"{BLOCK}.prevent: {error}") from None
    try:
        require_any_images(num_images, 0, sizer, max_model_len)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    if not isinstance(sizer, DynamicTiler):
        logger.info(
            "%s.prevent: images share nothing, and engine and trainer read %s %d alike",
            BLOCK,
            sizer.limit_name,
            sizer.limit,
        )
        return
    logger.info(
        "%s.prevent: up to %d images of any size keep their grids beside at most %d tokens of text; whether the "
        "rows have more is not known here, `nemo-rl-ext check MANIFEST --model %s --max-model-len %d` says it. A row "
        "that is re-sized all the same is masked or raised as on_unalignable says",
        BLOCK,
        num_images,
        max_model_len - context_for_any(num_images, 0, sizer),
        model,
        max_model_len,
    )
