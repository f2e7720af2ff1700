# SPDX-License-Identifier: Apache-2.0
"""Student and teacher: what a checkpoint directory is, loading it, and its forward pass on one rank."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from nemo_rl_ext.align.families.family import Layout, MediaFamily
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.distill import context_parallel
from nemo_rl_ext.distill.batch import MicroBatch
from nemo_rl_ext.distill.parallel import Ranks
from nemo_rl_ext.models.vision import encode_media
from nemo_rl_ext.models.weights import LAYER_SCALE

logger = logging.getLogger(__name__)
# Its bars for loading and writing shards would tear the progress lines of a run.
disable_progress_bar()

NEMOTRON_OMNI = "nemotron_h_omni"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint directory's configuration and tokenizer; no weights are read."""

    path: Path
    config: Any
    tokenizer: Any
    trust_remote_code: bool

    @property
    def takes_images(self) -> bool:
        return self.config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    @property
    def width(self) -> int:
        """Ids that the output layer scores."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.get_text_config().hidden_size)

    def family(self) -> MediaFamily | None:
        """The media family of an image-text model that `align` knows, else None."""
        if self.config.model_type != NEMOTRON_OMNI:
            return None
        return family_of(self.path, layout=Layout.NATIVE)

    def load(self, dtype: torch.dtype) -> PreTrainedModel:
        """Read the weights (safetensors only).

        Raises:
            ValueError: the directory holds no weights that fit its configuration.
        """
        auto = AutoModelForImageTextToText if self.takes_images else AutoModelForCausalLM
        try:
            model, info = auto.from_pretrained(
                self.path,
                config=self.config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=self.trust_remote_code,
                output_loading_info=True,
            )
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ValueError(
                f"{self.path}: the weights cannot be loaded: {str(error).splitlines()[0]}"
            ) from None
        if info["missing_keys"]:
            missing = sorted(info["missing_keys"])
            # transformers fills them with random numbers and only warns.
            raise ValueError(
                f"{self.path}: the weight {missing[0]!r} is missing, one of {len(missing)}; "
                "the weight files do not belong to this config.json"
            )
        for name, parameter in model.named_parameters():
            if LAYER_SCALE.match(name):
                # Identities that transformers adds to RADIO: no checkpoint holds them and vLLM applies none, so
                # training them would make a model that no engine runs.
                parameter.requires_grad_(False)
        return model


def open_checkpoint(path: Path, role: str, *, trust_remote_code: bool) -> Checkpoint:
    """Read configuration and tokenizer of a local checkpoint directory.

    Raises:
        ValueError: not a directory, or a file in it is missing or unreadable.
    """
    if not path.is_dir():
        raise ValueError(f"--{role} {path}: not a directory; give a local Hugging Face checkpoint directory")
    if not (path / "config.json").is_file():
        raise ValueError(f"--{role} {path}: no config.json in it; give a Hugging Face checkpoint directory")
    settings = dict(local_files_only=True, trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(path, **settings)
        tokenizer = AutoTokenizer.from_pretrained(path, **settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--{role} {path}: cannot be opened: {str(error).splitlines()[0]}") from None
    return Checkpoint(path=path, config=config, tokenizer=tokenizer, trust_remote_code=trust_remote_code)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one rank's forward pass gives, at the positions that some row of the micro-batch trains on."""

    logits: Tensor
    """``[batch, positions, vocab]``"""
    hidden: Tensor | None
    """``[batch, positions, hidden]``, before the output layer; only when asked for."""


class Scorer:
    """A model's forward pass over this rank's shard of each row.

    ``sharded`` splits the sequence over the context-parallel ranks inside the model (`context_parallel.py`);
    otherwise every rank of the group computes the whole forward and scores its own positions. Calls, and the
    backward pass through them, happen within `context_parallel.split_sequence`.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks, *, sharded: bool = False) -> None:
        self.model = model
        self.ranks = ranks
        self.sharded = sharded and ranks.cp_size > 1
        parameters = inspect.signature(model.forward).parameters
        self._selects = "logits_to_keep" in parameters or any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
        )
        if self.sharded:
            context_parallel.register()
            _language_model(model).set_attn_implementation(context_parallel.ATTENTION)

    def __call__(self, batch: MicroBatch, positions: Tensor, *, want_hidden: bool = False) -> Scores:
        """Score ``positions`` ``[positions]``, indices into this rank's shard, the same for all rows."""
        ranks = self.ranks
        shard_length = batch.ids.shape[1] // ranks.cp_size
        offset = ranks.cp_rank * shard_length
        inputs: dict[str, Any] = {"use_cache": False}
        if batch.media:
            inputs["inputs_embeds"] = self._embed(batch)
        else:
            inputs["input_ids"] = batch.ids
        if not self.sharded:
            inputs["attention_mask"] = batch.valid.long()
            return self._score(inputs, positions + offset, batch.ids.shape[1], want_hidden)
        inputs = {k: ranks.shard(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        place = torch.arange(offset, offset + shard_length, device=batch.ids.device)
        inputs["position_ids"] = place.expand(batch.ids.shape[0], -1)
        return self._score(inputs, positions, shard_length, want_hidden)

    def _score(self, inputs: dict[str, Any], positions: Tensor, length: int, want_hidden: bool) -> Scores:
        if self._selects:
            # Output layer and fp32 logits for the response positions only: the vocabulary is the widest
            # tensor.
            inputs["logits_to_keep"] = positions
        if want_hidden:
            inputs["output_hidden_states"] = True
        out = self.model(**inputs)
        logits = out.logits
        if logits.shape[1] == length:
            # The model ignored the request, or every position was asked for.
            logits = logits[:, positions] if len(positions) != length else logits
        return Scores(logits=logits, hidden=out.hidden_states[-1][:, positions] if want_hidden else None)

    def _embed(self, batch: MicroBatch) -> Tensor:
        """``[batch, length, hidden]``: token embeddings with the media's features at their context tokens.

        Computed for the whole row on every rank of a group: a placeholder run may span two shards.
        """
        model = self.model
        embeddings: Tensor = model.get_input_embeddings()(batch.ids)
        # The media fields of a batch are all that it reads.
        features = torch.cat(
            encode_media(
                model,
                batch.media["pixel_values"],
                batch.media["image_grid_hw"],
                batch.media.get("num_frames"),
            )
        )
        where = torch.eq(batch.ids, model.config.image_token_id)
        if int(where.sum()) != len(features):
            raise ValueError(
                f"{', '.join(batch.where)}: {int(where.sum())} context tokens for {len(features)} image "
                "features"
            )
        return embeddings.masked_scatter(where[..., None], features.to(embeddings.dtype))


def _language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part that sees tokens; a vision tower keeps its own attention."""
    inner = getattr(model, "language_model", None)
    return inner if isinstance(inner, PreTrainedModel) else model


@torch.no_grad()
def sharding_error(
    model: PreTrainedModel, ranks: Ranks, vocab_size: int, *, length_per_rank: int = 16
) -> float:
    """Largest logit difference between the sharded and the whole forward, over the logits' own spread.

    A model whose layers mix positions by other means than attention differs by order 1 on every rank but the
    first. The model's attention implementation is left as it was.
    """
    before = _language_model(model).config._attn_implementation
    length = length_per_rank * ranks.cp_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (1, length), generator=generator).to(ranks.device)
    if (media_id := getattr(model.config, "image_token_id", None)) is not None:
        ids[ids == media_id] = (media_id + 1) % vocab_size
    every = torch.ones_like(ids, dtype=torch.bool)
    batch = MicroBatch(ids=ids, valid=every, labels=ids, mask=every)
    positions = torch.arange(length_per_rank, device=ranks.device)
    was_training = model.training
    model.eval()
    whole = Scorer(model, ranks)(batch, positions).logits.float()
    try:
        with context_parallel.split_sequence(ranks, batch.valid):
            split = Scorer(model, ranks, sharded=True)(batch, positions).logits.float()
    finally:
        _language_model(model).set_attn_implementation(before)
        model.train(was_training)
    error = ((whole - split).abs().max() / whole.std().clamp_min(1e-6)).reshape(1)
    everyone = torch.zeros(ranks.world_size, device=ranks.device)
    everyone[ranks.dp_rank * ranks.cp_size + ranks.cp_rank] = error
    return float(ranks.sum(everyone).max())
