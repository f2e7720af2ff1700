# SPDX-License-Identifier: Apache-2.0
"""The forward of any family whose model transformers loads as it is: media, positions and counted ids per its family.

What a model takes beside token ids is the family's to say; no key of its media is named here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl_ext.align.families.family import MediaFamily, MediaTensors
from nemo_rl_ext.grpo.training.batch import PolicyBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def pad_id_of(family: MediaFamily) -> int:
    """An id that no forward counts as a placeholder."""
    counted = {grammar.context_id for grammar in family.grammars}
    return next(token for token in range(len(counted) + 1) if token not in counted)


def family_logits(
    model: PreTrainedModel, family: MediaFamily, ids: torch.Tensor, lengths: torch.Tensor, batch: PolicyBatch
) -> torch.Tensor:
    """Logits `[batch, seq, vocab]` of ids `[batch, seq]`, of which the first `lengths` `[batch]` are real.

    Raises ValueError when features and placeholder tokens differ in number within a row.
    """
    context = torch.isin(ids, torch.tensor([grammar.context_id for grammar in family.grammars]))
    media = [
        family.join([batch.media[number] for number in numbers]) if numbers else {}
        for numbers in batch.media_of_row or [()] * len(batch)
    ]
    for row, values in enumerate(media):
        tokens, features = int(context[row].sum()), family.num_features(MediaTensors(grids=(), values=values))
        if tokens != features:
            raise ValueError(
                f"row {row} of the batch: Got {features} feature vectors for {tokens} placeholder tokens"
            )
    per_token = [
        family.sequence(row[:length], values)
        for row, length, values in zip(ids, lengths.tolist(), media, strict=True)
    ]
    mask = torch.arange(ids.shape[1])[None, :] < lengths[:, None]
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    for key in dict.fromkeys(key for row in per_token for key in row):
        inputs[key] = _stacked(key, per_token, ids)
    encoded = _encoded(model, family, batch) if any(batch.media_of_row) else None
    logits: torch.Tensor = model(**inputs, mm_encoder_outputs=encoded, use_cache=False).logits
    return logits


def _encoded(model: PreTrainedModel, family: MediaFamily, batch: PolicyBatch) -> dict[str, Any]:
    """What each tower makes of the batch's media, every medium encoded once and repeated for the rows that show it.

    A tower takes those of the family's values that its method names, as `get_image_features` does.
    """
    # Stored tensors become tensors where they are joined, one alone too.
    values = {key: torch.cat([value]) for key, value in family.join(batch.media).items()}
    shown = [number for numbers in batch.media_of_row for number in numbers]
    encoded = {}
    for kind in ("image", "video"):
        encode = getattr(model, f"get_{kind}_features", None)
        taken = inspect.signature(encode).parameters if encode is not None else {}
        if encode is None or not any(key in taken for key in values):
            continue
        output = encode(**{key: value for key, value in values.items() if key in taken}, return_dict=True)
        own = [{key: value for key, value in media.items() if key in taken} for media in batch.media]
        counts = [family.num_features(MediaTensors(grids=(), values=part)) for part in own]
        features = torch.arange(sum(counts)).split(counts)
        encoded[kind] = _laid_out(output, torch.cat([features[number] for number in shown]))
    return encoded


def _laid_out(output: Any, places: torch.Tensor) -> Any:
    """A tower's output with the features at `places` [features] alone, those handed on by single layers too."""
    output.pooler_output = _picked(output.pooler_output, places)
    if getattr(output, "deepstack_features", None) is not None:
        output.deepstack_features = [_picked(layer, places) for layer in output.deepstack_features]
    return output


def _picked(features: Any, places: torch.Tensor) -> Any:
    """Of features in one tensor `[..., hidden]`, or in one per item, those at `places`, in the same form."""
    if torch.is_tensor(features):
        return features.flatten(0, -2)[places]
    return (torch.cat(list(features))[places],)


def _stacked(key: str, rows: list[dict[str, torch.Tensor]], ids: torch.Tensor) -> torch.Tensor:
    """One key of all rows, `[batch, seq]` or `[axes, batch, seq]`, right-padded with zeros or the ids' own padding."""
    stacked = []
    for row, own in zip(rows, ids, strict=True):
        if key not in row:
            if key != "input_ids":
                raise ValueError(f"the family gives {key!r} for some rows of a batch and not for all")
            stacked.append(own)
            continue
        value = row[key]
        padded = (own if key == "input_ids" else value.new_zeros(*value.shape[:-1], ids.shape[1])).clone()
        padded[..., : value.shape[-1]] = value
        stacked.append(padded)
    return torch.stack(stacked, dim=-2)


def saved_weights(model: PreTrainedModel, wanted: frozenset[str]) -> Mapping[str, torch.Tensor]:
    """A model's weights under the names and in the shapes of the files that it came from, which vLLM loads.

    Raises ValueError when one of the `wanted` names is not among them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    named = revert_weight_conversion(model, dict(model.state_dict()))
    if missing := sorted(wanted - named.keys()):
        raise ValueError(f"{len(missing)} weights of the checkpoint are not the model's: {missing[:3]}")
    return {name: named[name] for name in sorted(wanted)}
