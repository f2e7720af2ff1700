# SPDX-License-Identifier: Apache-2.0
"""The sampling ban: what the engine is told and what training computes are the same distribution."""

import pytest
import torch

from nemo_rl_ext.align.runs import Grammar
from nemo_rl_ext.guards.sampling import BanMechanism, MediaTokenBan, media_token_ban

GRAMMAR = Grammar(start_id=6, context_id=5, end_id=7)


def test_grammar_bans_wrappers_and_context_by_id():
    ban = media_token_ban(GRAMMAR)
    assert ban.token_ids == (5, 6, 7)
    assert ban.sampling_params() == {"logit_bias": {5: -100.0, 6: -100.0, 7: -100.0}}


def test_explicit_ids_are_deduplicated_and_callers_bias_is_kept_but_cannot_lift_the_ban():
    ban = media_token_ban([9, 5, 9])
    assert ban.token_ids == (5, 9)
    assert ban.sampling_params({1: 2.0, 5: 50.0}) == {"logit_bias": {1: 2.0, 5: -100.0, 9: -100.0}}


def test_empty_ban_is_inert():
    ban = media_token_ban([])
    logits = torch.randn(2, 4)
    assert not ban and ban.sampling_params() == {}
    assert ban.mask_logits(logits, logprobs_mode="processed_logprobs") is logits


def test_processed_log_probs_equal_the_engines_sampler():
    """The reference is vLLM's own order: float32, then bias, then temperature (vllm/v1/sample/sampler.py)."""
    logits = torch.randn(3, 11, dtype=torch.bfloat16)
    expected = logits.float()
    for token in (5, 6, 7):
        expected[:, token] += -100.0
    expected = torch.log_softmax(expected / 0.7, -1)
    masked = media_token_ban(GRAMMAR).mask_logits(logits, logprobs_mode="processed_logprobs")
    assert torch.equal(torch.log_softmax(masked / 0.7, -1), expected)


def test_bad_words_mask_equals_minus_infinity_elsewhere_and_stays_finite_on_banned_labels():
    logits = torch.randn(3, 11, requires_grad=True)
    ban = media_token_ban(GRAMMAR)
    masked = ban.mask_logits(logits, logprobs_mode="processed_logprobs", mechanism=BanMechanism.BAD_WORDS)
    log_probs = torch.log_softmax(masked, -1)
    reference = torch.log_softmax(logits.detach().index_fill(-1, torch.tensor([5, 6, 7]), -torch.inf), -1)
    free = [0, 1, 2, 3, 4, 8, 9, 10]
    assert torch.equal(log_probs[:, free], reference[:, free])
    loss = (log_probs[:, 5] * 0.0 + log_probs[:, 1]).sum()
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    assert (logits.grad[:, [5, 6, 7]] == 0).all()


def test_raw_modes_leave_training_logits_alone():
    logits = torch.randn(2, 11)
    assert media_token_ban(GRAMMAR).mask_logits(logits, logprobs_mode="raw_logprobs") is logits


def test_masking_does_not_touch_the_callers_logits():
    logits = torch.zeros(2, 11)
    media_token_ban(GRAMMAR).mask_logits(logits, logprobs_mode="processed_logprobs")
    assert (logits == 0).all()


@pytest.mark.parametrize("bias", [0.0, 1.0, -100.5, float("-inf")])
def test_bias_that_vllm_would_clamp_is_refused(bias):
    with pytest.raises(ValueError, match=r"\[-100.0, 0\)"):
        media_token_ban([5], bias=bias)


def test_unknown_mode_and_out_of_vocabulary_are_named():
    ban = MediaTokenBan(token_ids=(5, 40))
    with pytest.raises(ValueError, match="unknown logprobs_mode 'processed'"):
        ban.mask_logits(torch.zeros(1, 50), logprobs_mode="processed")
    with pytest.raises(ValueError, match="token id 40 is outside the vocabulary of 11"):
        ban.mask_logits(torch.zeros(1, 11), logprobs_mode="processed_logprobs")


def test_bad_words_are_strings_that_encode_to_their_own_id(nemotron_tokenizer):
    ids = nemotron_tokenizer.convert_tokens_to_ids(["<img>", "<image>", "</img>"])
    assert sorted(media_token_ban(ids).bad_words(nemotron_tokenizer)) == ["</img>", "<image>", "<img>"]
    byte_token = nemotron_tokenizer.encode(" ", add_special_tokens=False)[0]
    with pytest.raises(ValueError, match="bad_words cannot ban it"):
        media_token_ban([byte_token]).bad_words(nemotron_tokenizer)


def test_sampled_counts_what_slipped_through():
    assert media_token_ban(GRAMMAR).sampled([1, 5, 5, 2, 7]) == 3


@pytest.mark.engine
def test_vllm_takes_the_ban_unclamped_and_bans_the_same_ids_by_word(nemotron_tokenizer):
    vllm = pytest.importorskip("vllm")
    ban = media_token_ban(GRAMMAR)
    params = vllm.SamplingParams(**ban.sampling_params())
    assert params.logit_bias == {5: -100.0, 6: -100.0, 7: -100.0}
    from vllm.tokenizers.hf import get_cached_tokenizer

    by_word = vllm.SamplingParams(bad_words=ban.bad_words(nemotron_tokenizer))
    by_word.update_from_tokenizer(get_cached_tokenizer(nemotron_tokenizer))
    assert sorted(by_word.bad_words_token_ids) == [[5], [6], [7]]
