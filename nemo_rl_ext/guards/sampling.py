# SPDX-License-Identifier: Apache-2.0
"""Make media tokens unsampleable, and give training the matching mask.

A policy that samples its own `<image>` creates a placeholder with no pixels behind it. The engine can refuse
to sample it in two ways, and both change the distribution the token was drawn from; training has to compute
its log-probs from the same distribution, or from the raw one when the engine reports raw log-probs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from nemo_rl_ext.align.runs import Grammar
from nemo_rl_ext.guards.markers import MEDIA_MARKERS

if TYPE_CHECKING:
    import torch

# vLLM clamps logit_bias to [-100, 100] (SamplingParams.from_optional), so nothing stronger reaches the sampler.
STRONGEST_LOGIT_BIAS = -100.0

_PROCESSED_MODES = ("processed_logprobs", "processed_logits")
_RAW_MODES = ("raw_logprobs", "raw_logits")


class BanMechanism(Enum):
    """How the engine keeps a token from being drawn; training has to do the same arithmetic."""

    LOGIT_BIAS = "logit_bias"
    """Add `bias` to the token's logit. Needs only ids."""
    BAD_WORDS = "bad_words"
    """Set the token's logit to minus infinity. Needs the tokenizer; NeMo-RL's `policy.generation.bad_words`."""


@dataclass(frozen=True, kw_only=True)
class MediaTokenBan:
    """Token ids that a policy must not sample, with what each side has to do about them.

    An empty ban (a text-only vocabulary) is inert: no sampling parameters, and masks return their input.
    """

    token_ids: tuple[int, ...]
    """Banned ids, sorted, each once."""
    bias: float = STRONGEST_LOGIT_BIAS
    """What `logit_bias` adds to a banned token's logit, before temperature. In [-100, 0)."""

    def __post_init__(self) -> None:
        if not STRONGEST_LOGIT_BIAS <= self.bias < 0:
            raise ValueError(
                f"media token ban: bias must lie in [{STRONGEST_LOGIT_BIAS}, 0), got {self.bias}; "
                "vLLM clamps logit_bias to that range, and training would then mask by another amount"
            )
        bad = [i for i in self.token_ids if i < 0]
        if bad:
            raise ValueError(
                f"media token ban: token ids must be >= 0, got {bad}; resolve them with the tokenizer"
            )

    def __bool__(self) -> bool:
        return bool(self.token_ids)

    def sampling_params(self, logit_bias: Mapping[int, float] | None = None) -> dict[str, Any]:
        """Keyword arguments for `vllm.SamplingParams`: `{"logit_bias": {id: bias}}`, or `{}` for an empty ban.

        `logit_bias` is what the caller already asks for; banned ids win over it.
        """
        merged = {**(logit_bias or {}), **dict.fromkeys(self.token_ids, self.bias)}
        return {"logit_bias": merged} if merged else {}

    def bad_words(self, tokenizer: Any) -> list[str]:
        """The banned tokens as strings for `bad_words` (vLLM, and NeMo-RL's `policy.generation.bad_words`).

        Raises ValueError when a string does not encode to exactly its own id: vLLM would then ban an unrelated
        sequence and leave the media token sampleable.
        """
        words = []
        for token_id in self.token_ids:
            word = tokenizer.convert_ids_to_tokens(token_id)
            encoded = None if word is None else list(tokenizer.encode(word, add_special_tokens=False))
            if encoded != [token_id]:
                raise ValueError(
                    f"media token ban: token id {token_id} is {word!r}, which this tokenizer encodes to {encoded}; "
                    "bad_words cannot ban it. Use sampling_params() (logit_bias by id) instead"
                )
            words.append(word)
        return words

    def mask_logits(
        self,
        logits: torch.Tensor,
        *,
        logprobs_mode: str,
        mechanism: BanMechanism = BanMechanism.LOGIT_BIAS,
    ) -> torch.Tensor:
        """Training logits under the distribution that the engine's log-probs were taken from.

        `logits` is `[..., vocab]` before temperature, as vLLM applies the ban before temperature
        (`vllm/v1/sample/sampler.py`). `logprobs_mode` is the engine's own setting: with a raw mode the engine
        reported values from before the ban, so the input comes back untouched; with a processed mode a float32
        copy comes back with the ban applied. With `BAD_WORDS` the logit becomes float32's lowest finite value
        rather than -inf: every other token's log-prob is the same, and a banned *prompt* token in the labels
        stays finite, so that a zero loss mask still zeroes it.

        Raises ValueError for an unknown mode, or when an id lies outside the vocabulary.
        """
        if logprobs_mode not in _PROCESSED_MODES + _RAW_MODES:
            raise ValueError(
                f"media token ban: unknown logprobs_mode {logprobs_mode!r}; "
                f"expected one of {', '.join(_PROCESSED_MODES + _RAW_MODES)}"
            )
        if not self.token_ids or logprobs_mode in _RAW_MODES:
            return logits
        if self.token_ids[-1] >= logits.shape[-1]:
            raise ValueError(
                f"media token ban: token id {self.token_ids[-1]} is outside the vocabulary of {logits.shape[-1]} "
                "logits; on a vocabulary-parallel shard, apply the ban before sharding or shift the ids"
            )
        import torch

        index = torch.tensor(self.token_ids, device=logits.device)
        masked = logits.to(torch.float32, copy=True)
        if mechanism is BanMechanism.LOGIT_BIAS:
            return masked.index_add_(-1, index, torch.full_like(masked[..., : len(index)], self.bias))
        return masked.index_fill_(-1, index, torch.finfo(torch.float32).min)

    def sampled(self, token_ids: Iterable[int]) -> int:
        """How many banned tokens a generation holds; above zero the engine did not apply this ban."""
        banned = frozenset(self.token_ids)
        return sum(1 for token in token_ids if int(token) in banned)


def media_token_ban(media: Grammar | Iterable[int], *, bias: float = STRONGEST_LOGIT_BIAS) -> MediaTokenBan:
    """The ban for a family's `Grammar` (its start, context and end tokens) or for explicit token ids.

    The wrappers are banned too: a sampled `<img></img>` is an empty run, which reads as a pruned media item.

        ban = media_token_ban(grammar)
        params = SamplingParams(temperature=1.0, **ban.sampling_params())
        logits = ban.mask_logits(logits, logprobs_mode="processed_logprobs") / temperature
    """
    ids = (media.start_id, media.context_id, media.end_id) if isinstance(media, Grammar) else media
    return MediaTokenBan(token_ids=tuple(sorted({int(i) for i in ids})), bias=bias)


def media_token_ids(tokenizer: Any, grammars: Iterable[Grammar]) -> tuple[int, ...]:
    """Every token that stands for media or delimits it: a family's grammars, and markers that the tokenizer adds.

    A prompt's own marker need not be in a grammar: `<video>` becomes runs of `<image>`, and a sampled one makes the
    next turn's request ask for a clip that is not there.
    """
    ids = {
        token_id
        for grammar in grammars
        for token_id in (grammar.start_id, grammar.context_id, grammar.end_id)
    }
    added = tokenizer.get_added_vocab()
    return tuple(sorted(ids | {added[marker] for marker in MEDIA_MARKERS if marker in added}))
