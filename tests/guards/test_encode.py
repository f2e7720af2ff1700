# SPDX-License-Identifier: Apache-2.0
"""The safe encoder: content never becomes a control token, clean text keeps the tokenizer's own ids."""

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl_ext.guards.encode import SafeEncoder, control_tokens, well_formed
from nemo_rl_ext.guards.literals import EscapedPattern, plain_pattern

SEED_STRING = "{type<image>|bold}"
CLEAN = [
    "",
    " ",
    "the quick brown fox",
    " leading and trailing  ",
    "a < b and c > d, <b>bold</b>\n\n\ttabs",
    "Ünïcödé 🦊 漢字 \u200d zero-width",
    "ends with <",
    '{"name": "image", "value": "img"}',
]


def control_ids(encoder):
    return set(encoder.control.values()) - {encoder.tokenizer.unk_token_id}


def test_clean_text_keeps_the_tokenizers_own_ids(any_tokenizer):
    encoder = SafeEncoder(any_tokenizer)
    for text in CLEAN:
        expected = any_tokenizer.encode(text, add_special_tokens=False)
        assert encoder.encode(text) == expected
        assert encoder.encode_parts([text]) == expected


def test_no_control_literal_in_content_becomes_its_token(any_tokenizer):
    encoder = SafeEncoder(any_tokenizer)
    literals = list(encoder.control)
    texts = [SEED_STRING, "".join(literals), " ".join(literals), *literals, "<<image>>", "<image", "<IMAGE>"]
    for text in texts:
        assert not control_ids(encoder) & set(encoder.encode(text)), text
        assert not control_ids(encoder) & set(encoder.encode_parts([text])), text


def test_splitting_special_tokens_alone_is_not_enough(tokenizers_by_name):
    """Why the twin exists: with `split_special_tokens=True` these still make control tokens out of text."""
    leaks = {}
    for name in ("byte_bpe", "wordpiece", "unigram_always", "wordlevel", "slow_sentencepiece"):
        tokenizer = tokenizers_by_name(name)
        ids = tokenizer.encode(
            "x <image> y <tool_call> z", add_special_tokens=False, split_special_tokens=True
        )
        leaks[name] = sorted(set(ids) & control_ids(SafeEncoder(tokenizer)))
    assert all(leaks.values()), leaks


@pytest.mark.parametrize("name", ["byte_bpe", "byte_bpe_ignore_merges", "trained_bpe", "slow_bytes"])
def test_content_survives_the_round_trip(tokenizers_by_name, name):
    tokenizer = tokenizers_by_name(name)
    text = f"{SEED_STRING} <tool_call> </s><|im_end|> 🦊"
    assert tokenizer.decode(SafeEncoder(tokenizer).encode(text)) == text


def test_scaffold_is_emitted_by_id_around_content(any_tokenizer):
    encoder = SafeEncoder(any_tokenizer)
    start, image, end = (encoder.id(t) for t in ("<img>", "<image>", "</img>"))
    ids = encoder.encode_parts([start, image, image, end, "see <image> here", start, image, end])
    assert [i for i in ids if i in (start, image, end)] == [start, image, image, end, start, image, end]
    joined = "<img><image><image></img>a fox<img>"
    parts = [start, image, image, end, "a fox", start]
    assert encoder.encode_parts(parts) == any_tokenizer.encode(joined, add_special_tokens=False)


def test_literals_assembled_across_parts_stay_text(any_tokenizer):
    encoder = SafeEncoder(any_tokenizer)
    for parts in (["<ima", "ge>"], ["<", "image", ">"], ["<im", "a", "ge>"], ["<ima ", "ge>"]):
        assert encoder.id("<image>") not in encoder.encode_parts(parts)


def test_allowed_literals_become_tokens_and_others_do_not(nemotron_tokenizer):
    encoder = SafeEncoder(nemotron_tokenizer, allow=("<think>", "</think>"))
    ids = encoder.encode("<think>no <image></think>")
    specials = nemotron_tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert ids[0] == specials[0] and ids[-1] == specials[1] and encoder.id("<image>") not in ids


def test_normalised_added_tokens_do_not_slip_through():
    """A lower-casing normaliser makes `<IMAGE>` match an added token that is marked `normalized`."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "look": 1}, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_tokens([AddedToken("<image>", normalized=True, special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    image = tokenizer.convert_tokens_to_ids("<image>")
    assert image in tokenizer.encode("look <IMAGE>", add_special_tokens=False)
    encoder = SafeEncoder(tokenizer)
    assert image not in encoder.encode("look <IMAGE>")
    assert encoder.encode_parts([image, "look <IMAGE>"]).count(image) == 1


def test_vocabulary_merges_cannot_spell_a_control_token():
    """A BPE whose merges build the control token's own text, as when it was trained on unescaped data."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<", "a", ">", "<a", "<a>"]
    vocab = {p: i for i, p in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("<", "a"), ("<a", ">")], unk_token="<unk>"))
    backend.add_special_tokens([AddedToken("<a>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert tokenizer.encode("<a>", split_special_tokens=True) == [5]
    assert SafeEncoder(tokenizer).encode("<a>") == [4, 3]


def test_whitespace_added_tokens_are_ordinary_text():
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("<unk>ab ")}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_tokens([AddedToken("    ", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert "    " not in control_tokens(tokenizer)
    assert SafeEncoder(tokenizer).encode("a    b") == tokenizer.encode("a    b", add_special_tokens=False)


HTML = ["<b>", "</b>", "<table>", "</table>", "<img>", "</img>", "<code>", "<a>"]
MARKS = ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"]


def gemma_like(*, normalized=False, num_unused=3000, held=True):
    """Gemma's kind: thousands of added tokens that are not special, HTML and runs of whitespace among them, most
    of them pieces of the vocabulary; the context token is not one of them."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    ordinary = [*HTML, "[multimodal]", *(f"<unused{i}>" for i in range(num_unused)), "\n\n", "\t\t", "▁▁"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *MARKS]
    pieces = special + (ordinary if held else []) + [f"<0x{i:02X}>" for i in range(256)]
    letters = [chr(c) for c in range(33, 127)] + ["▁", "\n", "\t", "é"]
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("<", "b"),
        ("<b", ">"),
        ("<", "e"),
        ("<e", "o"),
        ("<eo", "s"),
        ("<eos", ">"),
    ]
    vocab = list(dict.fromkeys([*pieces, *letters, *("".join(m) for m in merges)]))
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(vocab)}, merges=merges, unk_token="<unk>",
            byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.add_tokens([AddedToken(t, normalized=normalized, special=False) for t in ordinary])
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in [*special, "<image_soft_token>"]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


@pytest.fixture(scope="module", params=[False, True], ids=["as written", "normalized"])
def html_tokenizer(request):
    return gemma_like(normalized=request.param)


def test_only_special_tokens_and_media_markers_are_control(html_tokenizer):
    specials = {"<pad>", "<eos>", "<bos>", "<unk>", *MARKS, "<image_soft_token>"}
    assert set(control_tokens(html_tokenizer)) == specials
    assert set(control_tokens(html_tokenizer, ["<b>"])) == specials | {"<b>"}


@pytest.fixture(scope="module")
def html_encoder(html_tokenizer):
    return SafeEncoder(html_tokenizer)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([*HTML, "<unused7>", "\n\n", "  ", " ", "the ", "é", "🦊", "<", "b>", "x"])).map(
        "".join
    )
)
def test_ordinary_added_tokens_are_the_tokenizers_own(html_tokenizer, html_encoder, text):
    """`<b>`, `<img>` and `<unused7>` are ordinary here; also beside a literal that has to stay text."""
    encoder = html_encoder
    own = html_tokenizer.encode(text, add_special_tokens=False)
    assert encoder.encode(text) == encoder.encode_parts([text]) == own
    assert encoder.encode_parts([text, encoder.id("<start_of_image>")])[: len(own)] == own
    guarded = encoder.encode(text + "<image_soft_token>")
    assert encoder.id("<image_soft_token>") not in guarded and guarded[: len(own)] == own


def test_a_control_token_that_merges_spell_is_spelled_otherwise(html_tokenizer, html_encoder):
    assert html_tokenizer.convert_ids_to_tokens(html_encoder.encode("x<eos>")) == ["x", "<eos", ">"]
    asked = SafeEncoder(html_tokenizer, extra=["<b>"])
    assert html_tokenizer.convert_ids_to_tokens(asked.encode("x<b>the")) == ["x", "<b", ">", "the"]


def test_img_is_a_media_marker_where_something_stands_between():
    from transformers import AddedToken

    tokenizer = gemma_like(num_unused=1)
    tokenizer.add_tokens([AddedToken("<IMG_CONTEXT>", special=False, normalized=False)])
    assert {"<img>", "</img>", "<IMG_CONTEXT>"} <= set(control_tokens(tokenizer))


@pytest.mark.parametrize("name", ["trained_bpe", "wordpiece", "unigram_always", "wordlevel"])
def test_building_reads_no_vocabulary(tokenizers_by_name, name, monkeypatch):
    """Building costs a fraction of loading the tokenizer, because the twin shares its model."""
    from tokenizers import Tokenizer

    def refuse(*args, **kwargs):
        raise AssertionError("the vocabulary was read again")

    tokenizer = tokenizers_by_name(name)
    for method in ("from_str", "from_buffer", "from_file", "to_str", "get_vocab"):
        monkeypatch.setattr(Tokenizer, method, refuse)
    monkeypatch.setattr(type(tokenizer.backend_tokenizer.model), "__getstate__", refuse)
    SafeEncoder(tokenizer)


def test_markup_that_the_chat_template_writes_is_control(nemotron_tokenizer):
    control = control_tokens(nemotron_tokenizer)
    assert "<tool_call>" in control and "<think>" not in control
    assert "<think>" in control_tokens(nemotron_tokenizer, ["<think>"])


def test_an_end_token_that_is_also_called_unknown_does_not_leak():
    """GPT-2's kind: the unknown token is the end of text, and every byte is known."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    encoder = SafeEncoder(tokenizer)
    assert tokenizer.eos_token_id not in encoder.encode("a<|endoftext|>b")
    parts = encoder.encode_parts(["a<|endoftext|>b", tokenizer.eos_token_id])
    assert parts.count(tokenizer.eos_token_id) == 1 and parts[-1] == tokenizer.eos_token_id


def test_scaffold_is_emitted_by_id_even_by_a_tokenizer_that_splits_special_tokens(tokenizers_by_name):
    tokenizer = copy.deepcopy(tokenizers_by_name("byte_bpe"))
    tokenizer.split_special_tokens = True
    tokenizer.backend_tokenizer.encode_special_tokens = True
    encoder = SafeEncoder(tokenizer)
    image = encoder.id("<image>")
    assert encoder.encode_parts([image, "a <image>", image]).count(image) == 2


def test_offsets_refer_to_the_text_that_was_passed_in(nemotron_tokenizer):
    encoder = SafeEncoder(nemotron_tokenizer)
    marked = "<img>" + encoder.mark("a <image> b") + "</img>!"
    out = encoder.encode_marked(marked, offsets=True)
    assert not out.clean
    spelled = [marked[a:b].replace(encoder.marker, "") for a, b in out.offsets]
    assert spelled == ["<img>", *"a <image> b", "</img>", "!"]
    clean = encoder.encode_marked("<img>a <" + encoder.marker + " b</img>", offsets=True)
    assert clean.clean and [o[1] - o[0] for o in clean.offsets][-1] == len("</img>")


@pytest.mark.parametrize("level", [0, 1, 2])
def test_json_escapes_are_seen_at_any_level(level):
    literals = ["<image>", "</img>", "<｜end▁of｜>", "🦊a"]
    pattern = EscapedPattern(literals)
    for literal in literals:
        text = literal
        for _ in range(level):
            text = json.dumps(text)[1:-1]
        assert pattern.search(text).group() == text
    assert pattern.search(r"x\u003Cimage\u003e").start() == 1 and pattern.search(r"<\/img>").end() == 7
    assert not pattern.search(r"u003cimage> and < image>")


def test_patterns_match_leftmost_longest_like_the_tokenizer():
    pattern = plain_pattern(["<a>", "<a>b", "<ab", "b<c>"])
    assert pattern.findall("<a>b<c> <a>c <ab") == ["<a>b", "<a>", "<ab"]
    assert plain_pattern([]) is None


@pytest.mark.parametrize("text", ["\ud800<image>\udc00", "\ud83e\udd8a", "\x00<image>\x00", "\ufeff"])
def test_surrogates_and_controls_do_not_crash(any_tokenizer, text):
    encoder = SafeEncoder(any_tokenizer)
    assert not control_ids(encoder) & set(encoder.encode(text))
    assert not control_ids(encoder) & set(encoder.encode_parts([text]))


def test_surrogate_pairs_are_joined_and_lone_ones_replaced():
    assert well_formed("\ud83e\udd8a x \ud800") == "🦊 x \ufffd"
    assert well_formed("plain") == "plain"


@pytest.mark.slow
def test_strings_of_ten_megabytes_take_linear_work(tokenizers_by_name):
    """Text that keeps almost being a literal, with real ones in it; quadratic work would not end here."""
    encoder = SafeEncoder(tokenizers_by_name("wordpiece"))
    text = ("some text <imag <<im </im " * 40 + "<image>") * 9_551
    marked = encoder.mark(text)
    assert marked.count(encoder.marker) >= 9_551 and marked.replace(encoder.marker, "") == text
    # The tokenizer itself takes most of the time, so it gets a part.
    assert not control_ids(encoder) & set(encoder.encode(text[:2_000_000]))


PIECES = [
    "<image>",
    "<ima",
    "ge>",
    "<",
    ">",
    "</img>",
    "<img>",
    " ",
    "a",
    "image",
    "<tool_call>",
    "🦊",
    "\\u003c",
]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(parts=st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), max_size=4))
def test_any_content_around_scaffold_adds_no_control_token(any_tokenizer, parts):
    encoder = SafeEncoder(any_tokenizer)
    scaffold = [encoder.id("<img>"), encoder.id("<image>"), encoder.id("</img>")]
    ids = encoder.encode_parts([*parts, *scaffold, *parts])
    assert [i for i in ids if i in control_ids(encoder)] == scaffold


def test_wrong_use_is_named(nemotron_tokenizer):
    with pytest.raises(ValueError, match=r"allow names \['<nope>'\], which are no tokens"):
        SafeEncoder(nemotron_tokenizer, allow=["<nope>"])
    with pytest.raises(ValueError, match="'<nope>' is no token of this tokenizer"):
        SafeEncoder(nemotron_tokenizer, extra=["<nope>"])
    with pytest.raises(ValueError, match="'a' has one character"):
        SafeEncoder(nemotron_tokenizer, extra=["a"])
    encoder = SafeEncoder(nemotron_tokenizer)
    with pytest.raises(ValueError, match="part 99999 is neither text nor a control token's id"):
        encoder.encode_parts([99999])
    with pytest.raises(ValueError, match="mark each string once"):
        encoder.mark(encoder.mark("<image>"))
