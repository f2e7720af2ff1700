# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl_ext.distill.records import DatasetError, Problems, read_records, read_texts

GOOD = '{"input": "a", "output": "b"}'


def read(path, **kwargs):
    problems = Problems()
    records = read_records(path, problems, max_record_bytes=kwargs.pop("max_record_bytes", 1 << 20))
    problems.raise_if_any()
    return records


def test_records_keep_text_verbatim_and_know_their_line(tmp_path):
    path = tmp_path / "training.jsonl"
    pair = {"input": "  a\tß\n", "output": " b ", "images": ["x.png"], "id": 7, "metadata": {"any": [1]}}
    path.write_text(json.dumps(pair) + "\r\n\n" + GOOD)
    first, second = read(path)
    assert (first.prompt, first.response, first.images) == ("  a\tß\n", " b ", ("x.png",))
    assert (first.where, second.where) == (f"{path}:1", f"{path}:3")


def test_a_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "training.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read(path)[0].prompt == "a"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"input": "a"}', "'output' is missing"),
        (b'{"input": "a", "output": ""}', "'output' is empty"),
        (b'{"input": "", "output": "b"}', "'input' is empty"),
        (b'{"input": null, "output": "b"}', "'input' must be a string, found null"),
        (b'{"input": ["a"], "output": "b"}', "'input' must be a string, found a list"),
        (b'{"input": 3, "output": "b"}', "found the number 3"),
        (b'{"input": "a", "output": "b", "image": "x.png"}', "unknown key.*'image'.*known: .*images"),
        (b'{"input": "a", "output": "b", "images": "x.png"}', "'images' must be a list"),
        (b'{"input": "a", "input": "c", "output": "b"}', "'input' appears twice"),
        (b'{"input": "a", "output": "\\ud800"}', "surrogate"),
        (b'{"input": "\xff", "output": "b"}', "not UTF-8: byte 0xff at offset 11"),
        (b'{"input": "a", "output": "b"', "not JSON"),
        (b'["a", "b"]', "expected a JSON object, found a list"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"input": "a", "output": "b", "id": ' + b"9" * 5000 + b"}", "not JSON that can be read"),
    ],
)
def test_each_fault_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "training.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + line + b"\n" + GOOD.encode() + b"\n")
    with pytest.raises(DatasetError, match=message) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:2: ")


def test_all_faults_are_listed_at_once_up_to_a_limit(tmp_path):
    path = tmp_path / "training.jsonl"
    path.write_text("\n".join([GOOD] + ["{}"] * 30))
    with pytest.raises(DatasetError) as error:
        read(path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("30 bad records, nothing was trained")
    assert lines[1].startswith(f"{path}:2: ") and lines[-1] == "... and 10 more"


def test_a_line_over_the_limit_is_named_and_the_next_one_is_still_read(tmp_path):
    path = tmp_path / "training.jsonl"
    long = json.dumps({"input": "a" * 3_000_000, "output": "b"})
    path.write_text(f"{GOOD}\n{long}\n{GOOD}\n{{}}\n")
    with pytest.raises(DatasetError) as error:
        read(path, max_record_bytes=1000)
    assert f"{path}:2: longer than" in str(error.value) and f"{path}:4: 'input'" in str(error.value)


def test_a_line_of_exactly_the_limit_is_read(tmp_path):
    path = tmp_path / "training.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}")
    assert len(read(path, max_record_bytes=len(GOOD))) == 2


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "training.jsonl"
    path.write_text(content)
    with pytest.raises(DatasetError, match="no records"):
        read(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=30) | st.sampled_from([GOOD.encode(), b'{"input": 1}', b"[[", b"\xff"])))
def test_whatever_the_bytes_each_line_is_a_record_a_fault_or_blank(tmp_path, lines):
    path = tmp_path / "training.jsonl"
    path.write_bytes(b"\n".join(lines))
    problems = Problems()
    try:
        records = read_records(path, problems, max_record_bytes=1000)
    except DatasetError as error:
        if "cannot be read: expected JSON lines, found" in str(error) or "stream" in str(error):
            return  # bytes of another kind of file
        assert "no records" in str(error)
        records = []
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    assert len(records) + problems.count == sum(1 for line in content.split(b"\n") if line.strip())


def test_documents(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "abc"}\n{"txt": "abc"}\n')
    problems = Problems()
    assert [r.response for r in read_texts(path, problems, max_record_bytes=100)] == ["abc"]
    with pytest.raises(DatasetError, match=r"text.jsonl:2: unknown key.*'txt'"):
        problems.raise_if_any()
