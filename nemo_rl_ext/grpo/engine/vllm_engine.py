# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process: its arguments, requests in and outputs out, weights into the running model.

Not thread-safe, and torch keeps state per thread: one thread builds it and makes every call.
Written against vLLM 0.32; what earlier versions lack is in `vllm_setup` and `weight_versions`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.verdict import MediaKind
from nemo_rl_ext.grpo.engine.config import EngineConfig
from nemo_rl_ext.grpo.engine.requests import (
    ContextExceededError,
    EngineError,
    GeneratedSequence,
    GenerationRequest,
    GenerationResult,
)
from nemo_rl_ext.grpo.engine.vllm_setup import configure, keep_weights_in_place, prepare_environment
from nemo_rl_ext.grpo.engine.weight_versions import Spans, WeightVersions
from nemo_rl_ext.guards.sampling import MediaTokenBan
from nemo_rl_ext.models.checkpoint import require_checkpoint, weight_names
from nemo_rl_ext.receipts import recorder
from nemo_rl_ext.receipts.receipt import Receipt

logger = logging.getLogger(__name__)

_KINDS: tuple[MediaKind, ...] = ("image", "video")
_MIN_BATCHED_TOKENS = 4096
"""Prompt tokens that one step takes, at least."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rendered:
    """A request that the engine took: what went in, and what its processor made of it."""

    request: GenerationRequest
    prompt_token_ids: np.ndarray
    receipt: Receipt | None


class VllmEngine:
    """One model, any number of running requests, one step at a time."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the checkpoint. Raises ValueError when it is not one, or vLLM refuses an argument."""
        self.config = config
        self.info = require_checkpoint(config.model)
        if self.info.needs_remote_code and not config.trust_remote_code:
            raise ValueError(
                f"{self.info.path} ships Python code of its own; set trust_remote_code: true to run it"
            )
        family = family_of(self.info.path)
        family.served_with(config.mm_processor_kwargs)
        prepare_environment()
        from vllm import LLM

        keep_weights_in_place()
        if (why_not := recorder.install()) is not None:
            logger.warning(
                "the engine gives no receipts, so the placeholder runs alone are evidence: %s", why_not
            )

        self._llm = LLM(
            model=str(self.info.path),
            dtype=config.precision,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            # A seeded request whose prompt is cut into chunks kills vLLM on a CPU: after each chunk it rewinds
            # the request's generator, and a CPU generator has no offset.
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(_MIN_BATCHED_TOKENS, config.max_model_len),
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            enforce_eager=config.enforce_eager,
            limit_mm_per_prompt=config.limit_mm_per_prompt.model_dump(),
            # The memory for keys and values is given. vLLM before 0.32 would run the vision tower in float32 before the
            # hook below is there.
            skip_mm_profiling=True,
            logprobs_mode=config.logprobs_mode,
            mm_processor_cache_gb=config.mm_processor_cache_gb,
            enable_prefix_caching=config.enable_prefix_caching,
            video_pruning_rate=config.video_pruning_rate or None,
            mm_processor_kwargs=config.mm_processor_kwargs or None,
            hf_overrides=partial(configure, config, self.info.engine_overrides),
            trust_remote_code=config.trust_remote_code,
            seed=config.seed,
        )
        # vLLM replaces torch.set_num_threads by a function that warns at every image, and dumps all pixels of
        # all requests when a step fails.
        logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
        logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
        self._engine = self._llm.llm_engine
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        self.model = runner.model
        # The model asks for its clips one by one, because vLLM pads clips of one step to the largest frame and then
        # encodes the padding. The GPU runner reads that wish while it loads the model, the CPU runner does not.
        runner.requires_sequential_video_encoding = hasattr(self.model, "requires_sequential_video_encoding")
        packed = [name for name, value in self.model.named_parameters() if not value.numel()]
        if packed:
            raise EngineError(
                f"vLLM moved {len(packed)} weights (first {packed[0]!r}) into a packed copy that new weights "
                "would not reach; this version of vLLM is not supported"
            )
        if (projector := getattr(self.model, "mlp1", None)) is not None:
            # vLLM may hand it bfloat16 features whatever the model's dtype; in float32 that fails.
            projector.register_forward_pre_hook(
                lambda module, args: (args[0].to(next(module.parameters()).dtype),)
            )
        vocabulary = self._llm.get_tokenizer().get_vocab()
        self._image_id, self._video_id = (vocabulary.get(family.marker(kind)) for kind in _KINDS)
        self._weight_names = weight_names(self.info.path)
        self._running: dict[str, _Rendered] = {}
        self._num_added = 0
        self._versions = WeightVersions(self._engine)
        self.set_version(0)

    @property
    def version(self) -> int:
        """The weights that draw the next tokens."""
        return self._versions.current

    @property
    def num_running(self) -> int:
        """Requests that were added and have not finished."""
        return len(self._running)

    def set_version(self, version: int) -> None:
        """Label what is sampled from now on."""
        self._versions.change(version)

    def add(self, request: GenerationRequest) -> str:
        """Queue a request and return its id.

        Raises ValueError, with nothing queued, when it is at odds with itself or vLLM refuses it.
        """
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        engine_input = self._render(request)
        ban = MediaTokenBan(token_ids=tuple(sorted(set(map(int, request.banned_token_ids)))))
        try:
            params = SamplingParams(
                n=request.n,
                max_tokens=request.max_new_tokens,
                temperature=request.temperature,
                seed=request.seed,
                allowed_token_ids=None
                if request.allowed_token_ids is None
                else list(request.allowed_token_ids),
                ignore_eos=request.ignore_eos,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **ban.sampling_params(),
            )
            name = str(self._num_added)
            self._engine.add_request(name, engine_input, params)
        except Exception as error:
            if self.config.mm_processor_cache_gb and (request.images or request.videos):
                # The front end believes that it has sent these media, and would not send them again. What it makes
                # of them anew may have another grid, under the name of features that are kept.
                self._engine.reset_mm_cache()
                self._forget_encoder_outputs()
            raise _refusal(request, error) from error
        self._num_added += 1
        self._versions.begin(name)
        self._running[name] = _Rendered(
            request=request,
            prompt_token_ids=np.asarray(engine_input["prompt_token_ids"], dtype=np.int32),
            receipt=recorder.take(name),
        )
        return name

    def _render(self, request: GenerationRequest) -> Mapping[str, Any]:
        ids = [int(token) for token in request.prompt_token_ids]
        for kind, token_id, media in (
            ("image", self._image_id, request.images),
            ("video", self._video_id, request.videos),
        ):
            # vLLM fills the first ones and leaves a surplus as a phantom.
            if ids.count(token_id) != len(media):
                raise ValueError(
                    f"request {request.name!r}: the prompt has {ids.count(token_id)} {kind} tokens "
                    f"(id {token_id}) for {len(media)} {kind}s; expected one per {kind}, unexpanded"
                )
        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        media_data: dict[str, Any] = {}
        if request.images:
            media_data["image"] = [_rgb(request, i, image) for i, image in enumerate(request.images)]
        if request.videos:
            media_data["video"] = [(video.frames, dict(video.metadata)) for video in request.videos]
        if media_data:
            prompt["multi_modal_data"] = media_data
        try:
            engine_input: Mapping[str, Any] = self._llm._preprocess_cmpl_one(prompt)
        except Exception as error:
            raise _refusal(request, error) from error
        return engine_input

    def step(self) -> list[tuple[str, GenerationResult]]:
        """Decode one token of every running sequence; returns the requests that finished."""
        finished = []
        for output in self._engine.step():
            if output.finished:
                rendered = self._running.pop(output.request_id)
                finished.append((output.request_id, _result(rendered, output, self._versions)))
                self._versions.end(output.request_id)
        return finished

    def refuse(self, request: GenerationRequest, error: Exception) -> GenerationResult:
        """The result of a request that `add` raised for."""
        return GenerationResult(
            name=request.name,
            prompt_token_ids=np.asarray(request.prompt_token_ids, dtype=np.int64).astype(np.int32),
            weight_version_start=self.version,
            weight_version_end=self.version,
            error=str(error),
            exceeds_context=isinstance(error, ContextExceededError),
        )

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy all weights, under released names, into the running model; between two steps.

        Running requests go on with the keys and values that the old weights left in their cache. Raises
        ValueError, with nothing changed, when a weight is missing or unknown, or `version` does not increase.
        """
        if version <= self.version:
            raise ValueError(
                f"weight version: expected more than the engine's {self.version}, found {version}"
            )
        missing, unknown = self._weight_names - weights.keys(), weights.keys() - self._weight_names
        if missing or unknown:
            raise ValueError(
                f"weights version {version} do not fit {self.info.path}: {len(missing)} missing "
                f"{sorted(missing)[:3]}, {len(unknown)} unknown {sorted(unknown)[:3]}; expected the names of "
                "its safetensors files (weights.to_engine_names gives them)"
            )
        self.model.load_weights(iter(weights.items()))
        self._forget_encoder_outputs()
        self.set_version(version)

    def _forget_encoder_outputs(self) -> None:
        """Drop image features that the old weights made, which waiting siblings of a request would reuse.

        Running requests are past their prompts, which are never cut into chunks, and need them no more.
        """
        core = self._engine.engine_core.engine_core
        core.scheduler.reset_encoder_cache()
        core.model_executor.reset_encoder_cache()
        if self.config.enable_prefix_caching:
            self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Abort running requests and release the engine."""
        self._engine.abort_request(list(self._running))
        self._running.clear()
        self._engine.engine_core.shutdown()


def _rgb(request: GenerationRequest, index: int, image: np.ndarray | Image.Image) -> Image.Image:
    where = f"request {request.name!r}, image {index}"
    if isinstance(image, Image.Image):
        if image.mode != "RGB":
            raise ValueError(f"{where}: expected a decoded RGB image, found mode {image.mode}")
        return image
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"{where}: expected uint8 [height, width, 3], found {image.dtype} {image.shape}")
    return Image.fromarray(image)


def _refusal(request: GenerationRequest, error: Exception) -> ValueError:
    # vLLM has one class for all its refusals; its own servers and NeMo-Gym tell them by these words, too.
    too_long = any(words in str(error) for words in ("maximum context length", "maximum model length"))
    kind = ContextExceededError if too_long else ValueError
    return kind(f"request {request.name!r}: the engine refused it: {type(error).__name__}: {error}")


def _result(rendered: _Rendered, output: Any, weights: WeightVersions) -> GenerationResult:
    sequences = tuple(
        GeneratedSequence(
            token_ids=np.asarray(completion.token_ids, dtype=np.int32),
            logprobs=np.asarray(
                [
                    entry[token].logprob
                    for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
                ],
                dtype=np.float32,
            ),
            finish_reason=completion.finish_reason,
            weight_versions=_spans(output.request_id, completion, weights),
        )
        for completion in sorted(output.outputs, key=lambda completion: completion.index)
    )
    versions = [version for sequence in sequences for version, _, _ in sequence.weight_versions]
    return GenerationResult(
        name=rendered.request.name,
        prompt_token_ids=rendered.prompt_token_ids,
        outputs=sequences,
        weight_version_start=min(versions, default=weights.current),
        weight_version_end=max(versions, default=weights.current),
        receipt=rendered.receipt,
    )


def _spans(name: str, completion: Any, weights: WeightVersions) -> Spans:
    own = weights.spans(name, completion.index, len(completion.token_ids))
    if not weights.recorded_by_vllm:
        return own
    return tuple((int(span.version), span.start, span.end) for span in completion.weight_versions or ())
