# SPDX-License-Identifier: Apache-2.0
import logging

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from nemo_rl_ext.align.grids import Grid  # noqa: E402
from nemo_rl_ext.align.items import MediaItem  # noqa: E402
from nemo_rl_ext.distill.data import (  # noqa: E402
    EncodedPrompt,
    PlacedMedia,
    RowRules,
    encode_documents,
    encode_pairs,
    mock_rows,
    truncate_left,
)
from nemo_rl_ext.distill.records import Problems, Record, RecordError  # noqa: E402
from nemo_rl_ext.models.tokenizer import BOS_ID, EOS_ID, build_byte_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return build_byte_tokenizer()


def pair(prompt, response, line=1):
    return Record(where=f"training.jsonl:{line}", prompt=prompt, response=response)


def encode(records, tokenizer, *, seq_length=100, **kwargs):
    rules = {k: kwargs.pop(k) for k in ("on_long_prompt", "on_long_response") if k in kwargs}
    problems = Problems()
    rows = encode_pairs(records, tokenizer, RowRules(seq_length=seq_length, **rules), problems, **kwargs)
    problems.raise_if_any()
    return rows


def test_verbatim_no_bos_no_template_and_one_eos(tokenizer):
    (row,) = encode([pair("Hi\n", "yo")], tokenizer)
    assert tokenizer.decode(row.ids[:-1]) == "Hi\nyo"
    assert BOS_ID not in row.ids and list(row.ids).count(EOS_ID) == 1 and row.ids[-1] == EOS_ID
    assert row.response_start == 3 and row.num_response_tokens == 3


def test_an_output_that_already_ends_with_eos_gets_no_second_one(tokenizer):
    (row,) = encode([pair("Hi", "yo<|im_end|>")], tokenizer)
    assert list(row.ids).count(EOS_ID) == 1


def test_the_boundary_is_where_the_parts_meet_even_if_the_sum_would_merge():
    """With a merge of "a" and "b", the sum of "a" and "b" is one token that would span the boundary."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<eos>": 0, "a": 1, "b": 2, "ab": 3}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    backend.decoder = decoders.Fuse()
    merging = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert merging("ab")["input_ids"] == [3]
    (row,) = encode([pair("a", "b")], merging)
    assert row.ids.tolist() == [1, 2, 0] and row.response_start == 1


def test_chat_template_is_the_explicit_alternative(tokenizer):
    (row,) = encode([pair("Hi", "yo")], tokenizer, chat_template=True)
    text = tokenizer.decode(row.ids)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>"
    assert tokenizer.decode(row.ids[row.response_start :]) == "yo<|im_end|>"


def test_a_long_prompt_loses_its_beginning_and_is_named(tokenizer, caplog):
    with caplog.at_level(logging.WARNING, logger="nemo_rl_ext"):
        short, long = encode([pair("ab", "c"), pair("0123456789", "c", line=2)], tokenizer, seq_length=6)
    assert tokenizer.decode(short.ids[:2]) == "ab"
    assert tokenizer.decode(long.ids[:-1]) == "6789c" and long.response_start == 4
    assert "1 prompt cut" in caplog.text and "training.jsonl:2 (10 -> 4 tokens)" in caplog.text


def test_a_long_prompt_can_be_an_error(tokenizer):
    with pytest.raises(ValueError, match="training.jsonl:1: the prompt has 10 tokens, 4 fit"):
        encode([pair("0123456789", "c")], tokenizer, seq_length=6, on_long_prompt="error")


def test_a_response_that_does_not_fit_is_named_and_never_cut(tokenizer, caplog):
    records = [pair("a", "0123456789"), pair("a", "b", line=2)]
    with pytest.raises(ValueError, match="training.jsonl:1: the response has 11 tokens with EOS"):
        encode(records, tokenizer, seq_length=11)
    assert encode(records, tokenizer, seq_length=12)[0].num_response_tokens == 11
    with caplog.at_level(logging.WARNING, logger="nemo_rl_ext"):
        (row,) = encode(records, tokenizer, seq_length=11, on_long_response="skip")
    assert row.where == "training.jsonl:2"
    assert "1 pair skipped" in caplog.text and "training.jsonl:1" in caplog.text


def test_an_output_that_is_only_eos_is_empty(tokenizer):
    with pytest.raises(ValueError, match="no tokens of its own"):
        encode([pair("a", "<|im_end|>")], tokenizer)


def test_media_need_an_image_text_student(tokenizer):
    record = Record(where="training.jsonl:4", prompt="<image>", response="b", images=("x.png",))
    with pytest.raises(ValueError, match="training.jsonl:4: has media, but the student is a text model"):
        encode([record], tokenizer)


def test_a_tokenizer_without_eos_or_template_is_refused():
    bare = build_byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode([pair("a", "b")], bare, chat_template=True)
    bare.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        encode([pair("a", "b")], bare)


IMAGE = PlacedMedia(item=MediaItem(size=(32, 32), source="x.png"), grid=Grid(2, 2))


@st.composite
def prompts(draw):
    """Text tokens (0) and runs `<img>` (1) + N x `<image>` (2) + `</img>` (3)."""
    ids, runs = [], []
    for length in draw(st.lists(st.integers(-5, 6), min_size=1, max_size=8)):
        if length < 0:
            ids += [0] * -length
        else:
            runs.append((len(ids), len(ids) + length + 2))
            ids += [1] + [2] * length + [3]
    return EncodedPrompt(ids=np.array(ids, np.int32), spans=tuple(runs), media=(IMAGE,) * len(runs))


@given(prompts(), st.integers(1, 40))
def test_truncation_never_cuts_a_run(prompt, room):
    try:
        cut = truncate_left(prompt, room)
    except RecordError:
        first, stop = prompt.spans[-1]
        assert stop == len(prompt.ids) and stop - first > room
        return
    assert 0 < len(cut.ids) <= max(room, 0)
    assert cut.ids.tolist() == prompt.ids[len(prompt.ids) - len(cut.ids) :].tolist(), "only from the left"
    assert len(cut.media) == len(cut.spans) == (cut.ids == 1).sum() == (cut.ids == 3).sum()
    for first, stop in cut.spans:
        assert cut.ids[first] == 1 and cut.ids[stop - 1] == 3 and (cut.ids[first + 1 : stop - 1] == 2).all()
    # No more is dropped than the run that the cut would have split.
    next_dropped = len(prompt.ids) - len(cut.ids) - 1
    if len(cut.ids) < room and next_dropped >= 0:
        assert prompt.ids[next_dropped] == 3


def test_every_document_token_but_the_first_is_predicted_once(tokenizer):
    document = Record(where="text.jsonl:1", prompt="", response="0123456789")
    rows = encode_documents([document], tokenizer, RowRules(seq_length=4), Problems())
    predicted = np.concatenate([row.ids[max(row.response_start, 1) :] for row in rows])
    assert tokenizer.decode(predicted[:-1]) == "123456789" and predicted[-1] == EOS_ID
    assert sum(row.num_response_tokens for row in rows) == 10
    assert all(len(row.ids) <= 4 for row in rows)


def test_mock_rows_keep_to_the_rules():
    rows = mock_rows(ids=range(10, 20), rules=RowRules(seq_length=5), eos_id=4, count=200, seed=0)
    for row in rows:
        assert 2 <= len(row.ids) <= 5 and row.ids[-1] == 4 and row.num_response_tokens >= 1
        assert set(row.ids[:-1].tolist()) <= set(range(10, 20))
