# SPDX-License-Identifier: Apache-2.0
"""Real tokenizers, built offline: every model type of the `tokenizers` library, and slow Python ones."""

import io

import pytest

CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>", "<img>", "</img>", "<video>"]
REASONING = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a tool call with {type<image>|bold} in its arguments",
    "look at the picture, then answer yes or no: 12 + 30 = 42",
    "Ünïcödé text, emoji 🦊 and 漢字 are content as well",
] * 8
CHAT_TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\n' -}}"
    "{%- if m['content'] is string -%}{{- m['content'] -}}{%- else -%}{%- for c in m['content'] -%}"
    "{%- if c['type'] == 'image' -%}{{- '<img><image></img>' -}}{%- else -%}{{- c['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- for t in m.get('tool_calls') or [] -%}"
    "{{- '<tool_call>' + t['function']['name'] + '\n' -}}"
    "{%- if t['function']['arguments'] is string -%}{{- t['function']['arguments'] -}}"
    "{%- else -%}{%- for k, v in t['function']['arguments'].items() -%}"
    "{{- '<' + k + '>' + (v if v is string else v | tojson) -}}{%- endfor -%}{%- endif -%}"
    "{{- '</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def _wrap(backend):
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    # Reasoning and tool tags are added tokens but not special, as Qwen's and Nemotron's checkpoints ship them:
    # `split_special_tokens=True` alone does not split those.
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in REASONING])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byte_bpe(ignore_merges=False):
    """Nemotron's grammar on a byte-level BPE whose vocabulary itself holds the control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {t: i for i, t in enumerate(CONTROL)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend)


def trained_bpe():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=CONTROL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend)


def wordpiece():
    """Whitespace words and lower-casing: `<image>` is one word, and the vocabulary holds it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece()
    alphabet = [chr(c) for c in range(33, 127)]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=CONTROL, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend)


def unigram(prepend_scheme="always"):
    """SentencePiece-style Unigram with Metaspace; control pieces sit in the lattice with score 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme, split=False)
    alphabet = [chr(c) for c in range(33, 127)]
    trainer = trainers.UnigramTrainer(
        vocab_size=250,
        special_tokens=CONTROL,
        unk_token="<unk>",
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend)


def wordlevel():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({w for line in CORPUS for w in line.split()})
    vocab = {w: i for i, w in enumerate(CONTROL + [w for w in words if w not in CONTROL])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(backend)


def slow_bytes():
    """transformers' ByT5 tokenizer: pure Python, no `tokenizer.json`."""
    from transformers import AddedToken, ByT5Tokenizer

    tokenizer = ByT5Tokenizer(extra_ids=4)
    tokenizer.add_tokens(
        [AddedToken(t, special=True, normalized=False) for t in CONTROL], special_tokens=True
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in REASONING])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def slow_sentencepiece(tmp_path_factory):
    """transformers' SentencePiece backend over a model trained here, control tokens as user-defined symbols."""
    import sentencepiece
    from transformers import AddedToken
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=180,
        hard_vocab_limit=False,
        character_coverage=1.0,
        user_defined_symbols=["<image>", "<img>", "</img>"],
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("spm") / "spiece.model"
    path.write_bytes(model.getvalue())
    tokenizer = SentencePieceBackend(
        vocab_file=str(path), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=True, normalized=False) for t in CONTROL], special_tokens=True
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in REASONING])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


BUILDERS = {
    "byte_bpe": byte_bpe,
    "byte_bpe_ignore_merges": lambda: byte_bpe(ignore_merges=True),
    "trained_bpe": trained_bpe,
    "wordpiece": wordpiece,
    "unigram_always": unigram,
    "unigram_first": lambda: unigram("first"),
    "wordlevel": wordlevel,
    "slow_bytes": slow_bytes,
    "slow_sentencepiece": slow_sentencepiece,
}


@pytest.fixture(scope="session")
def tokenizers_by_name(tmp_path_factory):
    """Build on first use, keep for the session."""
    built = {}

    def get(name):
        if name not in built:
            builder = BUILDERS[name]
            built[name] = builder(tmp_path_factory) if name == "slow_sentencepiece" else builder()
        return built[name]

    return get


@pytest.fixture(params=list(BUILDERS))
def any_tokenizer(request, tokenizers_by_name):
    return tokenizers_by_name(request.param)


@pytest.fixture
def nemotron_tokenizer(tokenizers_by_name):
    return tokenizers_by_name("byte_bpe")
