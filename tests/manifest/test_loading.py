# SPDX-License-Identifier: Apache-2.0
"""A manifest loads whole, or fails with every fault named by file, line and field."""

import json
import pickle

import pytest

from nemo_rl_ext.manifest.loading import Manifest, ManifestError, load_manifest, scan_manifest
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.policy import MediaPolicy


def failure(path, **options):
    with pytest.raises(ManifestError) as caught:
        load_manifest(path, **options)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.args == (str(caught.value),)
    return str(caught.value)


def test_rows_come_in_file_order_with_their_lines(write_manifest, make_row):
    path = write_manifest(
        [make_row("a.png", "?", id="x"), make_row("hi"), make_row("b.png", "a.png", "?", id="y")]
    )
    manifest = load_manifest(path)
    assert isinstance(manifest, Manifest) and len(manifest) == 3
    assert [row.row_id for row in manifest] == ["x", "line-2", "y"]
    assert [row.line for row in manifest] == [1, 2, 3]
    assert manifest[2].where == f"{path}:3" and manifest.base_dir == path.parent
    assert [media.ref for media in manifest[-1].media_refs()] == ["b.png", "a.png"]


def test_windows_line_ends_and_a_missing_last_one_are_fine(write_manifest, make_row):
    assert len(load_manifest(write_manifest([make_row("1"), make_row("2")], end=b"\r\n"))) == 2
    path = write_manifest([make_row("1")])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert len(load_manifest(path)) == 1


def test_unusual_text_survives(write_manifest, make_row):
    text = "naïve \u2028 日本 \U0001f600 \x7f <image>"
    path = write_manifest([json.dumps(make_row(text), ensure_ascii=False).encode()])
    assert load_manifest(path)[0].messages()[0].parts[0].text == text


@pytest.mark.parametrize(
    "line, problem",
    [
        (b"{", "not JSON"),
        (b"not json", "not JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"id": 1, "id": 2}', "duplicate key 'id'"),
        (b'{"responses_create_params": {"input": "x", "input": "y"}}', "duplicate key 'input'"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (b"", "blank line"),
        (b"   \t", "blank line"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not usable JSON"),
        (b'{"responses_create_params": {"input": "\\ud800"}}', "half a character"),
        (b"{}", "responses_create_params: Field required"),
        (b'{"responses_create_params": {"input": [{"role": "system", "content": "x"}]}}', "role 'user'"),
    ],
)
def test_a_bad_line_is_named(write_manifest, make_row, line, problem):
    message = failure(write_manifest([make_row("ok"), line, make_row("ok")]))
    assert "rows.jsonl:2: " in message and problem in message and len(message) < 600


def test_the_field_is_the_key_of_the_file(write_manifest, make_row):
    message = failure(
        write_manifest([make_row("a.png", {"type": "input_text", "text": 3}, {"type": "input_image"})])
    )
    assert "rows.jsonl:1: responses_create_params.input.0.content.1.text: " in message
    assert "rows.jsonl:1: responses_create_params.input.0.content.2.image_url: Field required" in message


def test_missing_and_forbidden_media(write_manifest, make_row, tmp_path):
    turns = [[{"role": "tool", "content": [{"type": "input_image", "image_url": "gone.png"}]}]]
    rows = [
        make_row("a.png", "missing.png", "?"),
        make_row("a.png", turns=turns),
        make_row({"type": "input_video", "video_url": "../../clip.mp4"}),
        make_row({"type": "input_image", "image_url": "https://example.com/a"}),
        make_row({"type": "input_image", "image_url": "."}),
    ]
    message = failure(write_manifest(rows))
    assert (
        "rows.jsonl:1: responses_create_params.input.0.content.1: cannot use media 'missing.png': no such file"
        in message
    )
    assert "rows.jsonl:2: turns.0.0.content.0: cannot use media 'gone.png'" in message
    assert "rows.jsonl:3: responses_create_params.input.0.content.0: " in message
    assert "rows.jsonl:4:" in message and "not allowed" in message
    assert "rows.jsonl:5:" in message and "a directory" in message
    assert len(load_manifest(write_manifest(rows), check_media=False)) == 5  # fmt: skip


def test_media_roots_are_the_policys(write_manifest, make_row, tmp_path):
    path = write_manifest([make_row("a.png", "?")])
    (tmp_path / "elsewhere").mkdir()
    assert "outside the media roots" in failure(path, policy=MediaPolicy(roots=(tmp_path / "elsewhere",)))
    assert len(load_manifest(path, policy=MediaPolicy(roots=(tmp_path,)))) == 1


def test_duplicate_ids_name_both_lines(write_manifest, make_row):
    message = failure(write_manifest([make_row("1", id="x"), make_row("2", id="y"), make_row("3", id="x")]))
    assert "rows.jsonl:3: id: duplicate id 'x', first on line 1" in message


def test_twenty_faults_are_listed_at_most(write_manifest):
    message = failure(write_manifest([b"{"] * 50))
    assert message.count("not JSON") == 20 and "and more" in message
    assert failure(write_manifest([b"{"] * 20)).count("not JSON") == 20
    assert "and more" not in failure(write_manifest([b"{"] * 20))


def test_empty_missing_and_unreadable_files(write_manifest, tmp_path):
    assert "found an empty file" in failure(write_manifest([]))
    assert "No such file" in failure(tmp_path / "none.jsonl")
    assert "directory" in failure(tmp_path)


def test_scanning_goes_on_after_a_fault(write_manifest, make_row):
    items = list(scan_manifest(write_manifest([make_row("1"), b"{", make_row("3")])))
    assert [isinstance(item, ManifestRow) for item in items] == [True, False, True]
    assert (items[1].line, items[1].field) == (2, "")
