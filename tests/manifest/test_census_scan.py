# SPDX-License-Identifier: Apache-2.0
"""Which string of which field holds which marker: the scanner against a plain walk of the parsed row."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_ext.manifest import json_walk
from nemo_rl_ext.manifest.census_scan import DEFAULT_MARKERS, MarkerScanner
from nemo_rl_ext.manifest.json_walk import _parse_deep, check_lines, example_id, field_path, parse, strings

SEED_STRING = "{type<image>|bold}"
SCANNER = MarkerScanner(DEFAULT_MARKERS)


def found(row, scanner=SCANNER):
    row = parse(json.dumps(row)) if not isinstance(row, (str, bytes)) else parse(row)
    return [(f.path, f.marker, f.count) for f in scanner.findings(row, file="f", line=1)]


def test_the_seeds_own_string_in_a_tool_call_argument_is_found_with_its_path():
    call = {"type": "function", "function": {"name": "fmt", "arguments": json.dumps({"style": SEED_STRING})}}
    row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}
    path = "messages[1].tool_calls[0].function.arguments{json}.style"
    assert found(row) == [(path, "<image>", 1)]


PLACES = {
    "content": ({"messages": [{"content": "a<image><image>"}]}, "messages[0].content", 2),
    "content part": (
        {"messages": [{"content": [{"type": "text", "text": "<image>"}]}]},
        "messages[0].content[0].text",
        1,
    ),
    "reasoning": ({"messages": [{"reasoning_content": "<image>"}]}, "messages[0].reasoning_content", 1),
    "tool name": (
        {"messages": [{"tool_calls": [{"function": {"name": "<image>"}}]}]},
        "messages[0].tool_calls[0].function.name",
        1,
    ),
    "argument name": (
        {"messages": [{"tool_calls": [{"function": {"arguments": {"<image>": 1}}}]}]},
        "messages[0].tool_calls[0].function.arguments.<image>{key}",
        1,
    ),
    "responses input": (
        {"responses_create_params": {"input": [{"content": "<image>"}]}},
        "responses_create_params.input[0].content",
        1,
    ),
    "JSON in JSON in a string": (
        {"a": json.dumps({"b": json.dumps(["<image>"])})},
        "a{json}.b{json}[0]",
        1,
    ),
    "escaped once inside JSON in a string": ({"a": '{"b": "\\u003cimage\\u003e"}'}, "a{json}.b", 1),
    "text that only starts like JSON": ({"a": '{"b": <image>'}, "a", 1),
    "a JSON string literal": ({"a": '"<image>"'}, "a{json}", 1),
}


@pytest.mark.parametrize("row,path,count", PLACES.values(), ids=PLACES.keys())
def test_every_place_is_named(row, path, count):
    assert found(row) == [(path, "<image>", count)]


def test_escaped_text_that_nothing_decodes_is_no_marker():
    assert found({"a": "literally \\u003cimage\\u003e"}) == []


BEHIND = {
    "an object": ('call: {"b": "\\u003cimage\\u003e"}', {"<image>": 1}),
    "a list": ('see ["<\\/img>"]', {"</img>": 1}),
    "a JSON string": ('say "\\u003cimage>"', {"<image>": 1}),
    "an odd number of quotes": ('say "hi: {"b": "\\u003cimage>"}', {"<image>": 1}),
    "two levels of escapes": ('x {"b": "{\\"c\\": \\"\\\\u003cimage>\\"}"}', {"<image>": 1}),
    "plain and escaped": ('<img> {"b": "\\u003cimage>"}', {"<img>": 1, "<image>": 1}),
    "behind the JSON": ('{"b": 1} and \\u003cimage>', {"<image>": 1}),
}


@pytest.mark.parametrize("text,counts", BEHIND.values(), ids=BEHIND.keys())
def test_escapes_in_json_behind_a_prefix_are_markers(text, counts):
    line = json.dumps({"a": text})
    assert {m: c for _, m, c in found(line)} == counts
    assert len(SCANNER.candidates(line.encode())) >= 1


def parts(*texts, kind="text"):
    return {"messages": [{"role": "user", "content": [{"type": kind, "text": text} for text in texts]}]}


PLACE = "messages[0].content[0].text{joined}"
SPLIT = {
    "two parts": (parts("a <im", "age> b"), [(PLACE, "<image>", 1)]),
    "after one character": (parts("<", "image>"), [(PLACE, "<image>", 1)]),
    "before the last": (parts("<image", ">", kind="input_text"), [(PLACE, "<image>", 1)]),
    "three parts": (parts("<", "ima", "ge>"), [(PLACE, "<image>", 1)]),
    "an empty part between": (parts("<im", "", "age>"), [(PLACE, "<image>", 1)]),
    "trimmed by a template": (parts("<im \n", "\tage>"), [(PLACE, "<image>", 1)]),
    "a bracket": (parts("[IM", "G]"), [(PLACE, "[IMG]", 1)]),
    "a bracket alone": (parts("a [", "IMG]"), [(PLACE, "[IMG]", 1)]),
    "twice": (parts("<im", "age><im", "age>"), [(PLACE, "<image>", 2)]),
    "plain strings": (
        {"messages": [{"content": ["<im", "age>"]}]},
        [("messages[0].content[0]{joined}", "<image>", 1)],
    ),
    "one whole, one split": (
        parts("<img> <im", "age>"),
        [("messages[0].content[0].text", "<img>", 1), (PLACE, "<image>", 1)],
    ),
    "JSON in a string": (
        {"a": json.dumps(parts("<im", "age>"))},
        [(f"a{{json}}.{PLACE}", "<image>", 1)],
    ),
    "a picture between": (
        {"content": [{"type": "text", "text": "<im"}, {"type": "image"}, {"type": "text", "text": "age>"}]},
        [],
    ),
    "two messages": (
        {"messages": [{"role": "user", "content": "<im"}, {"role": "user", "content": "age>"}]},
        [],
    ),
}


@pytest.mark.parametrize("row,expected", SPLIT.values(), ids=SPLIT.keys())
@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_markers_over_neighbouring_text_parts_are_found(row, expected, layout):
    line = json.dumps(row, **layout)
    assert found(line) == expected
    assert not expected or len(SCANNER.candidates(line.encode(), in_lines="indent" not in layout))


def test_what_the_safe_chat_breaks_the_census_names(safe_encoder):
    """The same texts, one by one: a census without a finding means a conversation that needs no guard."""
    from nemo_rl_ext.guards.chat import mark_messages

    scanner = MarkerScanner(["<image>", "<img>", "</img>"])
    texts = [text for text, _ in BEHIND.values()] + ["<image>", "clean", "a < b", "x<img>"]
    for text in texts:
        message = {"role": "user", "content": text}
        broken = mark_messages(safe_encoder, [message])[0]["content"] != text
        assert broken == bool(found({"messages": [message]}, scanner)), text


def test_repeated_keys_are_all_swept():
    assert found('{"a": "<image>", "a": "clean", "a": "<img>"}') == [("a", "<image>", 1), ("a", "<img>", 1)]


def test_longest_marker_wins_where_markers_share_a_start():
    scanner = MarkerScanner(["<im", "<image>"])
    assert found({"a": "<image> <im"}, scanner) == [("a", "<image>", 1), ("a", "<im", 1)]


def test_nan_infinity_and_lone_surrogates_are_json_to_python_and_no_reason_to_skip():
    lines = b'{"a": NaN, "b": "<image>"}\n{"a": -Infinity}\n{"a": "\\ud800"}\n'
    assert check_lines(lines)[1] == []
    assert found(lines.split(b"\n")[0].decode()) == [("b", "<image>", 1)]


BROKEN = [
    b'{"a": 1',
    b"{'a': 1}",
    b'{"a": "\xff"}',
    b"nonsense",
    b'{"a": 1} trailing',
    b'{"a": "\x01"}',
    b"[1,]",
]


@pytest.mark.parametrize("with_msgspec", [True, False])
@pytest.mark.parametrize("line", BROKEN)
def test_broken_lines_are_named_by_number(monkeypatch, with_msgspec, line):
    if not with_msgspec:
        monkeypatch.setattr(json_walk, "msgspec", None)
    block = b'{"ok": 1}\n\n' + line + b'\n{"ok": 2}\n'
    assert [number for number, _ in check_lines(block)[1]] == [2]


def test_a_row_over_two_lines_is_two_broken_lines():
    assert [n for n, _ in check_lines(b'{"a":\n1}\n')[1]] == [0, 1]


@pytest.mark.parametrize("depth", [1_000, 20_000])
def test_deep_nesting_is_read_not_refused(depth):
    line = "[" * depth + json.dumps({"a": SEED_STRING}) + "]" * depth
    assert check_lines(line.encode())[1] == []
    assert [f.marker for f in SCANNER.findings(parse(line), file="f", line=1)] == ["<image>"]
    assert [n for n, _ in check_lines(("[" * depth).encode())[1]] == [0]


def test_large_strings_take_linear_work():
    """A 10 MB string that keeps almost being a marker."""
    text = ("x" * 90 + "<imag ") * 100_000 + "<im" * 200_000 + "<image>"
    data = json.dumps({"a": text}).encode()
    assert len(SCANNER.candidates(data)) == 1
    assert found(data) == [("a", "<image>", 1)]


def test_bytes_candidates_do_not_miss_escapes_at_block_edges():
    for text in (b"<image>", b"\\u003cimage>", b"<\\u0069mage>", b"\\\\u003Cimage\\\\u003E"):
        assert SCANNER.candidates(b'"' + text).tolist() == [1 + (text.startswith(b"\\\\"))], text
    assert (
        SCANNER.candidates(b"").size
        == SCANNER.candidates(b"<").size
        == SCANNER.candidates(b"\\u00").size
        == 0
    )


def test_markers_outside_ascii():
    scanner = MarkerScanner(["<｜image｜>", "🖼️img"])
    for ensure_ascii in (True, False):
        data = json.dumps({"a": "x <｜image｜>", "b": "🖼️img"}, ensure_ascii=ensure_ascii).encode()
        assert len(scanner.candidates(data)) == 2
        assert found(data, scanner) == [("a", "<｜image｜>", 1), ("b", "🖼️img", 1)]


def test_example_ids_come_from_the_usual_fields():
    assert example_id({"uuid": "u", "id": "i"}) == "i"
    assert example_id({"index": 0}) == "0" and example_id([1]) is None and example_id({"id": None}) is None


def test_unusable_markers_are_refused():
    for markers in ([], ["<"], [""]):
        with pytest.raises(ValueError, match="two or more characters"):
            MarkerScanner(markers)


LEAVES = st.sampled_from(
    ["<image>", "<img>x</img>", "clean", "<ima", "\\", '"', "é<image>", "\u2028", "🦊<image>"]
)
ROWS = st.recursive(
    LEAVES | st.integers() | st.none() | st.booleans() | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("ab<>im", max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def reference_counts(value, out):
    if isinstance(value, dict):
        for key, child in value.items():
            reference_counts(key, out)
            reference_counts(child, out)
    elif isinstance(value, list):
        for child in value:
            reference_counts(child, out)
    elif isinstance(value, str):
        for marker in ("<image>", "<img>", "</img>"):
            out[marker] = out.get(marker, 0) + value.count(marker)
    return out


@settings(max_examples=60, deadline=None)
@given(ROWS, st.booleans())
def test_any_row_has_the_markers_that_a_plain_walk_counts(row, ensure_ascii):
    data = json.dumps(row, ensure_ascii=ensure_ascii).encode()
    counts = {}
    for finding in SCANNER.findings(parse(data), file="f", line=1):
        counts[finding.marker] = counts.get(finding.marker, 0) + finding.count
    expected = {k: v for k, v in reference_counts(row, {}).items() if v}
    assert counts == expected
    assert len(SCANNER.candidates(data)) >= sum(expected.values())


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_the_parser_for_deep_rows_agrees_with_json(row):
    text = json.dumps(row)
    deep, shallow = _parse_deep(text), json.loads(text, object_pairs_hook=json_walk.Pairs)
    assert [(field_path(p), t) for p, t in strings(deep)] == [(field_path(p), t) for p, t in strings(shallow)]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40) | st.text('{}[]",: \n<image>\\u0013c', max_size=40).map(str.encode))
def test_no_bytes_crash_the_scanner(data):
    num_rows, broken = check_lines(data)
    broken = {number for number, _ in broken}
    assert num_rows == sum(1 for line in data.split(b"\n") if line.strip()) - len(broken)
    for number, line in enumerate(data.split(b"\n")):
        try:
            json.loads(line.decode("utf-8-sig")) if line.strip() else None
            assert number not in broken
        except ValueError:
            assert number in broken
    assert isinstance(SCANNER.candidates(data), np.ndarray)
