# SPDX-License-Identifier: Apache-2.0
"""The trained policy: transformers' model, log-probs as the engine reports them, and AdamW."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.grpo.training.batch import PolicyBatch
from nemo_rl_ext.grpo.training.family_forward import family_logits, pad_id_of, saved_weights
from nemo_rl_ext.grpo.training.packing import pack_rows, restrict, unpack
from nemo_rl_ext.grpo.training.policy_state import load_policy_state, save_policy_state
from nemo_rl_ext.guards.sampling import MediaTokenBan
from nemo_rl_ext.models.checkpoint import ARCHITECTURES, CheckpointInfo, require_checkpoint, weight_names
from nemo_rl_ext.models.vision import encode_media
from nemo_rl_ext.models.weights import LAYER_SCALE, to_engine_names
from nemo_rl_ext.rollout.packed import join_media

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Precision = Literal["float32", "bfloat16"]


class Policy:
    """A trainable model with AdamW. Parameters are optimised in float32, whatever the forward runs in."""

    def __init__(
        self,
        model: PreTrainedModel,
        info: CheckpointInfo,
        *,
        precision: Precision,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        max_grad_norm: float,
    ) -> None:
        self.model = model
        self.info = info
        self.precision = precision
        self.family = None if info.model_type == "nemotron_h_omni" else family_of(info.path)
        """What the forward asks, but of the family whose forward is written out in `_logits`."""
        self.max_grad_norm = max_grad_norm
        self.trainable: dict[str, torch.Tensor] = {
            name: value for name, value in model.named_parameters() if value.requires_grad
        }
        self.masters: dict[str, torch.Tensor] = self.trainable
        if precision == "bfloat16":
            # Steps of lr 1e-5 vanish in bfloat16's 8 bits of mantissa.
            self.masters = {name: value.detach().float() for name, value in self.trainable.items()}
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=lr, weight_decay=weight_decay, betas=betas, eps=eps
        )

    @classmethod
    def from_pretrained(
        cls,
        path: Path | str,
        *,
        precision: Precision = "float32",
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_grad_norm: float = 1.0,
    ) -> Policy:
        """Load the checkpoint that the engine runs.

        Raises ValueError when `path` is not a checkpoint, is one of another model, or lacks a parameter.
        """
        from transformers import AutoModelForImageTextToText, NemotronH_Omni_Reasoning_V3

        if precision not in ("float32", "bfloat16"):
            raise ValueError(f"policy precision: expected 'float32' or 'bfloat16', found {precision!r}")
        if os.environ.get("TRANSFORMERS_DISABLE_TORCH_CHECK") == "1":
            raise ValueError(
                "TRANSFORMERS_DISABLE_TORCH_CHECK=1 turns off the count of features against placeholder "
                "tokens, the last guard against misaligned media; unset it"
            )
        info = require_checkpoint(path)
        native = info.model_type == "nemotron_h_omni"
        if not native and info.architecture in ARCHITECTURES:
            raise ValueError(
                f"{info.path / 'config.json'}: the policy needs model_type 'nemotron_h_omni', found {info.model_type!r}"
            )
        dtype = getattr(torch, precision)
        loader = NemotronH_Omni_Reasoning_V3 if native else AutoModelForImageTextToText
        model, loading = loader.from_pretrained(str(info.path), dtype=dtype, output_loading_info=True)
        faults = {key: sorted(map(str, value)) for key, value in loading.items() if value}
        if faults:
            raise ValueError(f"{info.path}: weights do not fit the model: {faults}")
        # The vision tower casts pixels to its own configuration's dtype, which the argument above left alone.
        for config in (model.config, model.config.vision_config, model.config.text_config):
            config.dtype = dtype
        if native:
            for name, value in model.named_parameters():
                if LAYER_SCALE.match(name):
                    value.requires_grad_(False)
            model.vision_model.register_forward_hook(_round_features_as_engine)
        model.eval()
        return cls(
            model,
            info,
            precision=precision,
            lr=lr,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            max_grad_norm=max_grad_norm,
        )

    def forward_logprobs(
        self,
        batch: PolicyBatch,
        *,
        banned_token_ids: Sequence[int] = (),
        temperature: float = 1.0,
        logprobs_mode: str = "processed_logprobs",
        micro_batch_size: int | None = None,
    ) -> torch.Tensor:
        """Log-probs of each next token under the distribution that the engine sampled from.

        Returns float32 `[batch, seq - 1]`; entry i belongs to token i + 1, and is 0 on padding and wherever
        `batch.sampled_mask` is false. Banned ids get vLLM's logit bias of -100, `batch.allowed_token_ids`
        restricts the softmax, then `temperature` divides, in vLLM's order (`vllm/v1/sample/sampler.py`).
        With `logprobs_mode="raw_logprobs"` none of the three applies, as in the engine. A temperature of 0 is
        greedy: the engine then reports log-probs without dividing.

        `micro_batch_size` bounds rows per forward; it saves memory under `torch.no_grad()`. To train with
        bounded memory, loop over `batch.micro_batches` and call backward for each.

        Raises ValueError when features and placeholder tokens differ in number (the message is transformers'
        own), when they differ within single rows, or when a sampled token was not in its row's allowed set.
        """
        if temperature < 0:
            raise ValueError(f"temperature: expected 0 (greedy) or more, found {temperature}")
        if micro_batch_size is not None and micro_batch_size < len(batch):
            return torch.cat(
                [
                    self.forward_logprobs(
                        part,
                        banned_token_ids=banned_token_ids,
                        temperature=temperature,
                        logprobs_mode=logprobs_mode,
                    )
                    for _, part in batch.micro_batches(micro_batch_size)
                ]
            )
        # Padding must not be a placeholder token, which the forward would count.
        if self.family is None:
            ids, columns, lengths = pack_rows(batch, pad_id=int(self.model.image_token_id == 0))
            logits = self._logits(ids, batch)
        else:
            ids, columns, lengths = pack_rows(batch, pad_id=pad_id_of(self.family))
            logits = family_logits(self.model, self.family, ids, lengths, batch)
        logits = logits[:, :-1].float()
        if logprobs_mode == "processed_logprobs":
            ban = MediaTokenBan(token_ids=tuple(sorted(set(map(int, banned_token_ids)))))
            logits = ban.mask_logits(logits, logprobs_mode=logprobs_mode)
            logits = restrict(logits, batch.allowed_token_ids)
            if temperature > 0:
                logits = logits / temperature
        elif logprobs_mode != "raw_logprobs":
            raise ValueError(
                f"logprobs_mode: expected 'processed_logprobs' or 'raw_logprobs', found {logprobs_mode!r}"
            )
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
        real = torch.arange(1, ids.shape[1])[None, :] < lengths[:, None]
        return unpack(logprobs, real, columns, batch)

    def _logits(self, ids: torch.Tensor, batch: PolicyBatch) -> torch.Tensor:
        """Logits `[batch, seq, vocab]` of right-padded `ids`; what is causal never sees the padding."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        context = torch.eq(ids, self.model.image_token_id)
        encoded = None
        features_per_row = torch.zeros(len(batch), dtype=torch.int64)
        if batch.media:
            values = join_media(batch.media)
            features = iter(
                encode_media(
                    self.model, values["pixel_values"], values["image_grid_hw"], values.get("num_frames")
                )
            )
            of_set = [tuple(itertools.islice(features, len(part["image_grid_hw"]))) for part in batch.media]
            of_row = [
                [item for number in numbers for item in of_set[number]] for numbers in batch.media_of_row
            ]
            # Encoded once, repeated for every row that shows the image; the forward still counts them all.
            used = tuple(item for items in of_row for item in items)
            encoded = {"image": BaseModelOutputWithPooling(pooler_output=used)}
            features_per_row = torch.tensor([sum(map(len, items)) for items in of_row])
        elif context.any():
            raise ValueError(
                f"Got 0 feature vectors for {int(context.sum())} placeholder tokens (id {self.model.image_token_id})"
            )
        logits: torch.Tensor = self.model(input_ids=ids, mm_encoder_outputs=encoded, use_cache=False).logits
        # The forward counts over the whole batch, where one row's surplus can hide another's lack.
        per_row = context.sum(-1)
        if bad := torch.nonzero(per_row != features_per_row).flatten().tolist():
            raise ValueError(
                f"row {bad[0]} of the batch: Got {int(features_per_row[bad[0]])} feature vectors for "
                f"{int(per_row[bad[0]])} placeholder tokens (id {self.model.image_token_id}); "
                f"rows that differ: {bad}"
            )
        return logits

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        for value in self.trainable.values():
            value.grad = None

    def optimizer_step(self) -> float:
        """Clip the gradient to `max_grad_norm`, update, forget the gradient; the norm before clipping.

        Raises ValueError when no gradient was accumulated, or when its norm is not finite; the parameters are
        then unchanged.
        """
        # A step without images must not let the vision tower drift on its momentum: no gradient, no update.
        gradients = {name: value.grad for name, value in self.trainable.items() if value.grad is not None}
        if not gradients:
            raise ValueError("optimizer_step without a gradient: call backward on a loss first")
        for name, gradient in gradients.items():
            self.masters[name].grad = gradient.to(self.masters[name].dtype)
        with_gradient = [self.masters[name] for name in gradients]
        norm = float(torch.nn.utils.clip_grad_norm_(with_gradient, self.max_grad_norm))
        if not torch.isfinite(torch.tensor(norm)):
            self.zero_grad()
            raise ValueError(f"gradient norm is {norm}: the step was not taken")
        self.optimizer.step()
        self._masters_to_model()
        self.optimizer.zero_grad(set_to_none=True)
        self.zero_grad()
        return norm

    @torch.no_grad()
    def _masters_to_model(self) -> None:
        if self.masters is not self.trainable:
            for name, value in self.trainable.items():
                value.copy_(self.masters[name])

    @torch.no_grad()
    def state_dict_for_engine(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Copies of all weights under released names, contiguous, in `dtype` (default: the forward's own)."""
        if self.family is None:
            renamed = to_engine_names(self.model.state_dict())
        else:
            renamed = dict(saved_weights(self.model, weight_names(self.info.path)))
        copies = {}
        for name, value in renamed.items():
            wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
            copies[name] = value.detach().to(wanted, copy=True).contiguous()
        return copies

    def save(self, path: Path | str, *, run: str | None = None) -> None:
        """Write parameters (float32) and optimizer state to a new directory, complete or not at all.

        `run` is the id of the run that they belong to.
        """
        save_policy_state(Path(path), self.masters, self.optimizer, run=run)

    def load(self, path: Path | str) -> None:
        """Restore what `save` wrote. Raises ValueError when it is of another model or incomplete."""
        load_policy_state(Path(path), self.masters, self.optimizer)
        self._masters_to_model()


def _round_features_as_engine(module: torch.nn.Module, args: object, output: Any) -> Any:
    """vLLM rounds the vision tower's output to bfloat16, whatever the model's dtype (`nano_nemotron_vl.py`,
    `extract_feature_dynamic`). Doing the same takes that rounding out of the log-prob gap, which then shows
    wrong pixels instead of noise."""
    features = output.features
    # Added, not cast: a cast would round the gradient too.
    output.features = features + (features.to(torch.bfloat16) - features).detach()
    return output
