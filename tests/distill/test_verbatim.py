# SPDX-License-Identifier: Apache-2.0
"""Kinds of tokenizers against the contract: the ids decode to input + output, split where the output begins, or
the tokenizer is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from tokenizers import (  # noqa: E402
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

from nemo_rl_ext.distill.data import RowRules, encode_documents, encode_pairs  # noqa: E402
from nemo_rl_ext.distill.records import Problems, Record  # noqa: E402
from nemo_rl_ext.distill.verbatim import TokenizerRefused, VerbatimTokenizer  # noqa: E402
from nemo_rl_ext.distill.vocab import require_same  # noqa: E402
from nemo_rl_ext.models.tokenizer import build_byte_tokenizer  # noqa: E402

PAIRS = [
    ("a", "b"),
    ("a", " b"),
    ("a ", "b"),
    (" a", "b "),
    ("    a", "  b"),
    ("The capi", "tal is Paris"),
    ("def f():\n", "    return 1\n"),
    ("x\n", "\n\n\ty\r\n"),
    ("  ", "  "),
    ("\n", "\n"),
    ("Überall 漢字 ", "naïve 👩‍👩‍👧 e\u0301 \u00a0 \u200b."),
    ("half a w", "\u0301ord"),
    ("<s>[INST] hi [/INST]", " yes"),
    ("a <s> b<s>c", "d<s> e<s>"),
    ("ask</s>", "answer"),
]
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
CORPUS = ["The capital is Paris. def f(x): return x", "hello world, answer and ask", "a b c d e f"]
REPLACE = normalizers.Replace(" ", "▁")
SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
STRIP = decoders.Strip(" ", 1, 0)
NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def wrapped(backend, **kwargs):
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    backend.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED, **kwargs)


def trained(model, trainer, *, normalizer=None, pre_tokenizer=None, decoder=None, **kwargs):
    backend = Tokenizer(model)
    for name, part in (("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer), ("decoder", decoder)):
        if part is not None:
            setattr(backend, name, part)
    backend.train_from_iterator(CORPUS * 4, trainer)
    return wrapped(backend, **kwargs)


def byte_fallback_bpe(normalizer, pre_tokenizer, decoder):
    """SentencePiece's BPE as Llama, Mistral and Gemma have it, on a small vocabulary."""
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIALS + BYTES, show_progress=False)
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.train_from_iterator(CORPUS * 4, trainer)
    # The byte tokens were listed to get ids; as special tokens they would be matched in text.
    pipeline = json.loads(backend.to_str())
    pipeline["added_tokens"] = [t for t in pipeline["added_tokens"] if t["content"] in SPECIALS]
    backend = Tokenizer.from_str(json.dumps(pipeline))
    backend.decoder = decoder
    return wrapped(backend)


def byte_level(*, add_prefix_space=False, normalizer=None, **kwargs):
    return trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space),
        decoder=decoders.ByteLevel(),
        **kwargs,
    )


def truncating_and_padding():
    tokenizer = metaspace("first")
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    return tokenizer


def metaspace(scheme, **kwargs):
    pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, **kwargs)
    decoder = decoders.Sequence(SENTENCEPIECE + ([] if scheme == "never" else [STRIP]))
    return byte_fallback_bpe(None, pre_tokenizer, decoder)


def llama_2():
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), REPLACE])
    return byte_fallback_bpe(normalizer, None, decoders.Sequence([*SENTENCEPIECE, STRIP]))


def unigram(*, normalizer=None, scheme="always"):
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    tokenizer = trained(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace())
    pieces = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    backend = Tokenizer(
        models.Unigram([*map(tuple, pieces), *((b, -20.0) for b in BYTES)], unk_id=0, byte_fallback=True)
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([*SENTENCEPIECE, STRIP])
    return wrapped(backend)


def sequence_of_parts():
    """The prefix inside nested sequences, and a post-processor that would add BOS."""
    tokenizer = metaspace("always")
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always")])]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def word_piece(**kwargs):
    return trained(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer(
            vocab_size=400, special_tokens=SPECIALS, initial_alphabet=[*map(chr, range(33, 127)), *"ﬁ①Ａ²"]
        ),
        normalizer=normalizers.BertNormalizer(**kwargs),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )


def word_level():
    words = [*SPECIALS, *map(chr, range(33, 127)), *"ﬁ①Ａ²", "capi", "tal", "The", "is", "Paris", "def"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrapped(backend)


def no_decoder():
    backend = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate([*SPECIALS, *map(chr, range(256))])}, merges=[])
    )
    return wrapped(backend)


VERBATIM: dict[str, Callable] = {
    "bytes": build_byte_tokenizer,
    "byte-level BPE (GPT-2, Llama-3)": byte_level,
    "byte-level BPE, add_prefix_space (RoBERTa)": lambda: byte_level(add_prefix_space=True),
    "byte-level BPE, NFC, clean-up (Qwen)": lambda: byte_level(
        normalizer=normalizers.NFC(), clean_up_tokenization_spaces=True
    ),
    "BPE, Metaspace always (Llama)": lambda: metaspace("always"),
    "BPE, Metaspace first (Llama, Mistral)": lambda: metaspace("first"),
    "BPE, Metaspace never": lambda: metaspace("never"),
    "BPE, Metaspace always, not split": lambda: metaspace("always", split=False),
    "BPE, Metaspace nested": sequence_of_parts,
    "BPE, Prepend (Llama-2)": llama_2,
    "BPE, Replace only (Gemma)": lambda: byte_fallback_bpe(REPLACE, None, decoders.Sequence(SENTENCEPIECE)),
    "Unigram, Metaspace always": unigram,
    "Unigram, Metaspace first": lambda: unigram(scheme="first"),
    "file that truncates and pads": truncating_and_padding,
}
REFUSED: dict[str, tuple[Callable, str]] = {
    "WordPiece, lower case (BERT)": (word_piece, "BertNormalizer"),
    "WordPiece, cased": (lambda: word_piece(lowercase=False, strip_accents=False), "WordPiece"),
    "WordLevel, Whitespace": (word_level, "Whitespace"),
    "byte-level BPE, Lowercase": (lambda: byte_level(normalizer=normalizers.Lowercase()), "Lowercase"),
    "byte-level BPE, NFKC": (lambda: byte_level(normalizer=normalizers.NFKC()), "NFKC"),
    "byte-level BPE, Strip": (lambda: byte_level(normalizer=normalizers.Strip()), "Strip"),
    "Unigram, NFKC (XLNet, T5)": (lambda: unigram(normalizer=normalizers.NFKC()), "NFKC"),
    "Unigram, spaces collapsed (T5)": (
        lambda: unigram(normalizer=normalizers.Replace(Regex(" {2,}"), " ")),
        "Replace",
    ),
    "no decoder": (no_decoder, "decoder none"),
}

SHIPPED = {
    "Mistral v1 as Llama": ("tokenizer.model.v1", "tokenizer.model", {"tokenizer_class": "LlamaTokenizer"}),
    "Mistral v1": ("tokenizer.model.v1", "tokenizer.model", {}),
    "Mistral v3": ("mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model", {}),
    "Mistral tekken": ("tekken_240911.json", "tekken.json", {}),
}


def encode(tokenizer, pairs):
    records = [Record(where=f"training.jsonl:{i}", prompt=a, response=b) for i, (a, b) in enumerate(pairs)]
    problems = Problems()
    rows = encode_pairs(records, tokenizer, RowRules(seq_length=500), problems)
    return rows, problems


def assert_verbatim(tokenizer, pairs=PAIRS):
    rows, problems = encode(tokenizer, pairs)
    problems.raise_if_any()

    def text(ids):
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    for row, (prompt, response) in zip(rows, pairs, strict=True):
        assert row.ids[-1] == tokenizer.eos_token_id
        assert (text(row.ids[: row.response_start]), text(row.ids[:-1])) == (prompt, prompt + response)


@pytest.mark.parametrize("name", VERBATIM)
def test_ids_decode_to_input_and_output(name):
    pairs = [pair for pair in PAIRS if "NFC" not in name or "\u0301" not in "".join(pair)]
    assert_verbatim(VERBATIM[name](), pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_tokenizers_that_packages_ship(name, tmp_path):
    mistral_common = pytest.importorskip("mistral_common")
    source, target, settings = SHIPPED[name]
    shutil.copyfile(Path(mistral_common.__file__).parent / "data" / source, tmp_path / target)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert_verbatim(tokenizer)
    assert require_same(tokenizer, tokenizer, student_name="a", teacher_name="b") == len(tokenizer)


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_changes_text_is_refused_by_name(name):
    build, part = REFUSED[name]
    tokenizer = build()
    tokenizer.name_or_path = "some/student"
    with pytest.raises(TokenizerRefused, match="some/student") as refused:
        encode(tokenizer, [("a", "b")])
    assert part in str(refused.value) and "becomes" in str(refused.value)


def test_an_input_keeps_the_prefix_that_its_model_knows():
    """Only what follows is encoded without: a first word is the same token at training as at inference."""
    tokenizer = metaspace("first")
    (row,), _ = encode(tokenizer, [("The capi", "tal")])
    own = tokenizer("The capi", add_special_tokens=False)["input_ids"]
    assert row.ids[: row.response_start].tolist() == own and tokenizer.convert_ids_to_tokens(own)[0][0] == "▁"


@pytest.mark.parametrize(
    ("tokenizer", "pair", "message"),
    [
        # Only these records meet what the tokenizer changes, so only they are refused.
        (lambda: byte_level(normalizer=normalizers.NFC()), ("e\u0301", "b"), "'input' does not come back"),
        (lambda: byte_level(normalizer=normalizers.NFC()), ("a", "cafe\u0301"), "at character 3 'e\u0301'"),
        (lambda: metaspace("first"), ("a", "b▁c"), "at character 1 '▁c' becomes ' c'"),
        (lambda: metaspace("first"), ("a▁", "b"), "'input' does not come back"),
    ],
)
def test_a_text_that_does_not_come_back_is_refused_by_line(tokenizer, pair, message):
    rows, problems = encode(tokenizer(), [("fine", "too"), pair])
    assert len(rows) == 1
    with pytest.raises(ValueError, match="training.jsonl:1") as error:
        problems.raise_if_any()
    assert message in str(error.value)


def test_a_token_that_eats_the_space_beside_it_refuses_the_record():
    """Phi-3's ``<|user|>`` takes white space after it."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<|user|>", rstrip=True, normalized=False)])
    rows, problems = encode(tokenizer, [("<|user|>hi", "b"), ("<|user|>\nhi", "b")])
    assert len(rows) == 1 and problems.count == 1


def test_a_small_vocabulary_decides_record_by_record():
    words = {"<unk>": 0, "</s>": 1, "A": 2, "C": 3, "G": 4, "T": 5}
    for unknown in ("<unk>", None):
        backend = Tokenizer(models.BPE(vocab=words, merges=[], unk_token=unknown))
        backend.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token=unknown)
        rows, problems = encode(tokenizer, [("GATT", "ACA"), ("GATT", "ACX")])
        assert rows[0].ids.tolist() == [4, 2, 5, 5, 2, 3, 2, 1] and rows[0].response_start == 4
        assert problems.count == 1 and "at character 2 'X' becomes" in problems.lines[0]
        assert ("no token for it" in problems.lines[0]) == (unknown is not None)


@pytest.mark.parametrize("tail", ["", "\n", " \n\t\n"])
@pytest.mark.parametrize("build", [build_byte_tokenizer, llama_2, lambda: metaspace("always")])
def test_eos_once_when_the_output_ends_with_it_and_white_space(build, tail):
    tokenizer = build()
    eos = tokenizer.eos_token
    (row, plain), problems = encode(tokenizer, [("Hi", f"yo{eos}{tail}"), ("Hi", f"yo{eos}.")])
    assert row.ids.tolist().count(tokenizer.eos_token_id) == 1
    assert VerbatimTokenizer(tokenizer).decode(row.ids) == f"Hiyo{eos}{tail}"
    assert plain.ids[-1] == tokenizer.eos_token_id and plain.ids.tolist().count(tokenizer.eos_token_id) == 2
    _, problems = encode(tokenizer, [("Hi", f"{eos}{tail}")])
    assert "no tokens of its own" in problems.lines[0]


@pytest.mark.parametrize("build", [byte_level, llama_2, lambda: metaspace("first")])
def test_documents_are_verbatim(build):
    tokenizer, problems = build(), Problems()
    texts = ["    indented\n", "plain", f"ends{tokenizer.eos_token}\n", "a▁b"]
    records = [Record(where=f"text.jsonl:{i}", prompt="", response=text) for i, text in enumerate(texts)]
    rows = encode_documents(records, tokenizer, RowRules(seq_length=500), problems)
    decoded = [VerbatimTokenizer(tokenizer).decode(row.ids) for row in rows]
    eos = tokenizer.eos_token
    assert decoded[:3] == [texts[0] + eos, texts[1] + eos, texts[2]]
    assert problems.count == (build is not byte_level)
