# SPDX-License-Identifier: Apache-2.0
"""vLLM's own front end without a model: its renderer, media processors and caches, with receipts taken.

A request goes through everything that stands before the engine core, and its media through what the core receives
them with: what comes out are the ids, the receipt, and the very tensors that a model would be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.receipts import recorder
from nemo_rl_ext.receipts.receipt import Receipt


class RefusedError(ValueError):
    """vLLM takes no such request."""


@dataclass(frozen=True, kw_only=True)
class Processed:
    """One request as the engine core would have it: ids [tokens], and per item of the prompt its tensors and place."""

    token_ids: np.ndarray
    receipt: Receipt
    kinds: tuple[str, ...]
    tensors: tuple[Mapping[str, Any], ...]
    ranges: tuple[tuple[int, int], ...]


class FrontEnd:
    """The front end of one checkpoint. `cache_gb` is that of its processor cache, 0 for none."""

    def __init__(
        self, model_dir: Path, *, max_model_len: int, cache_gb: float, dtype: str = "float32"
    ) -> None:
        from nemo_rl_ext.grpo.engine.vllm_setup import prepare_environment

        prepare_environment()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.input_processor import InputProcessor

        if (why_not := recorder.install()) is not None:
            raise RuntimeError(why_not)
        config = EngineArgs(
            model=str(model_dir),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_model_len,
            enable_chunked_prefill=False,
            limit_mm_per_prompt={"image": 16, "video": 16},
            mm_processor_cache_gb=cache_gb,
            enable_prefix_caching=False,
            enforce_eager=True,
            trust_remote_code=True,
        ).create_engine_config()
        self.max_model_len, self.has_cache = max_model_len, cache_gb > 0
        self._inputs = InputProcessor(config)
        self._renderer = self._inputs.renderer
        self.tokenizer = self._renderer.get_tokenizer()
        self._held: dict[str, Mapping[str, Any]] = {}
        self._count = 0

    def process(
        self,
        prompt: str | Sequence[int],
        media: Sequence[MediaItem],
        *,
        names: Sequence[str | None] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> Processed:
        """Take a prompt, as text or as ids, and its media in prompt order.

        `names` are the uuids that a client gives some of the media, `arguments` the request's `mm_processor_kwargs`.
        """
        request: dict[str, Any] = (
            {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        )
        request["multi_modal_data"] = {
            kind: [_given(item) for item in media if item.kind == kind]
            for kind in dict.fromkeys(item.kind for item in media)
        }
        if any(names):
            request["multi_modal_uuids"] = {
                kind: [name for item, name in zip(media, names, strict=True) if item.kind == kind]
                for kind in request["multi_modal_data"]
            }
        if arguments:
            request["mm_processor_kwargs"] = dict(arguments)
        try:
            return self._processed(request)
        except Exception as error:  # slivers and limits make it raise almost anything
            # The sending side of the cache believes that it has sent what it refused.
            self._renderer.clear_mm_cache()
            self._held.clear()
            raise RefusedError(f"{type(error).__name__}: {error}") from error

    def _processed(self, request: Mapping[str, Any]) -> Processed:
        from vllm.sampling_params import SamplingParams

        (engine_input,) = self._renderer.render_cmpl([request])
        self._count += 1
        name = str(self._count)
        made = self._inputs.process_inputs(
            name, engine_input, SamplingParams(max_tokens=1), supported_tasks=("generate",)
        )
        receipt = recorder.take(name)
        assert receipt is not None and made.prompt_token_ids is not None
        for feature in made.mm_features:
            if feature.data is not None:
                self._held[feature.identifier] = {key: one.data for key, one in feature.data.items()}
        return Processed(
            token_ids=np.asarray(made.prompt_token_ids),
            receipt=receipt,
            kinds=tuple(feature.modality for feature in made.mm_features),
            tensors=tuple(self._held[feature.identifier] for feature in made.mm_features),
            ranges=tuple((f.mm_position.offset, f.mm_position.length) for f in made.mm_features),
        )


def _given(item: MediaItem) -> Any:
    if item.kind == "image":
        from PIL import Image

        return Image.fromarray(item.pixels()[0])
    about = {
        "fps": item.fps,
        "duration": item.total_frames / item.fps,
        "total_num_frames": item.total_frames,
        "frames_indices": list(item.frame_indices),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return item.pixels(), about


def pixels_of(tensors: Mapping[str, Any]) -> torch.Tensor:
    """The large tensor of an item, whatever its family calls it."""
    keys = ("pixel_values_videos", "pixel_values_flat_video", "pixel_values_flat", "pixel_values")
    value = next(tensors[key] for key in keys if key in tensors)
    return value if torch.is_tensor(value) else torch.stack(list(value))


def as_trained(pixels: torch.Tensor, family: Any, kind: str) -> torch.Tensor:
    """The engine's pixels as a trainer has them: bytes that it normalises on its device are normalised here."""
    if pixels.dtype != torch.uint8:
        return pixels
    config = family.video_config if kind == "video" else family.image_config
    mean, std = (
        torch.tensor(config[key]) * (1.0 / config["rescale_factor"]) for key in ("image_mean", "image_std")
    )
    grouped = pixels.float().reshape(len(pixels), 3, -1)
    return ((grouped - mean[None, :, None]) / std[None, :, None]).reshape(len(pixels), -1)
