# SPDX-License-Identifier: Apache-2.0
import json
import shutil

import pytest

transformers = pytest.importorskip("transformers")

from nemo_rl_ext.distill import vocab  # noqa: E402
from nemo_rl_ext.models.tokenizer import VOCAB_SIZE, save_byte_tokenizer  # noqa: E402


@pytest.fixture
def tokenizer_dir(tmp_path):
    (tmp_path / "original").mkdir()
    save_byte_tokenizer(tmp_path / "original")
    return tmp_path / "original"


def load(path):
    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)


def edited(source, name, edit):
    """A copy of a tokenizer whose tokenizer.json went through ``edit``."""
    target = source.with_name(name)
    shutil.copytree(source, target)
    content = json.loads((target / "tokenizer.json").read_text())
    edit(content)
    (target / "tokenizer.json").write_text(json.dumps(content))
    return load(target)


def test_a_copy_is_the_same_vocabulary(tokenizer_dir):
    same = vocab.require_same(
        load(tokenizer_dir), load(tokenizer_dir), student_name="student", teacher_name="teacher"
    )
    assert same == VOCAB_SIZE


def test_two_swapped_ids_at_equal_size_are_found_and_printed(tokenizer_dir):
    def swap(content):
        words = content["model"]["vocab"]
        words["a"], words["b"] = words["b"], words["a"]

    student, teacher = load(tokenizer_dir), edited(tokenizer_dir, "swapped", swap)
    assert len(student) == len(teacher)
    a, b = student.convert_tokens_to_ids(["a", "b"])
    with pytest.raises(vocab.VocabularyMismatch) as error:
        vocab.require_same(student, teacher, student_name="S", teacher_name="T")
    message = str(error.value)
    assert "2 ids that differ (student has 268 tokens, teacher 268)" in message
    assert f"id {a}: student 'a', teacher 'b'" in message
    assert f"id {b}: student 'b', teacher 'a'" in message


def test_an_added_special_token_under_another_name_is_found(tokenizer_dir):
    def rename(content):
        for token in content["added_tokens"]:
            if token["content"] == "<so_end>":
                token["content"] = "<tool>"
        words = content["model"]["vocab"]
        words["<tool>"] = words.pop("<so_end>")

    difference = vocab.compare(load(tokenizer_dir), edited(tokenizer_dir, "renamed", rename))
    assert (11, "<so_end>", "<tool>") in difference.ids


def test_a_token_that_only_one_side_has(tokenizer_dir):
    teacher = load(tokenizer_dir)
    teacher.add_tokens(["<extra>"])
    difference = vocab.compare(load(tokenizer_dir), teacher)
    assert difference.ids == ((VOCAB_SIZE, None, "<extra>"),)
    assert f"id {VOCAB_SIZE}: student no token, teacher '<extra>'" in difference.describe()


def test_a_long_difference_is_cut(tokenizer_dir):
    teacher = load(tokenizer_dir)
    teacher.add_tokens([f"<extra{i}>" for i in range(100)])
    text = vocab.compare(load(tokenizer_dir), teacher).describe()
    assert len(text.splitlines()) == 22 and text.endswith("... and 80 more")


def test_a_model_narrower_than_its_tokenizer_is_refused_and_a_padded_one_is_not():
    vocab.require_width("model", width=320, vocab_size=268)
    with pytest.raises(vocab.VocabularyMismatch, match="up to 267.*only 256"):
        vocab.require_width("model", width=256, vocab_size=268)
