# SPDX-License-Identifier: Apache-2.0
"""Manifests written on the spot."""

import json

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def write_manifest(tmp_path):
    """`write_manifest(rows)`: the path of a manifest beside two pictures, `a.png` (8x12) and `b.png` (20x10).

    A row is a dict, or bytes for a line as it stands.
    """
    for name, size in (("a.png", (8, 12)), ("b.png", (20, 10))):
        Image.fromarray(np.full((*size, 3), 90, np.uint8)).save(tmp_path / name)

    def write(rows, end=b"\n"):
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"".join(line + end for line in lines))
        return path

    return write


@pytest.fixture
def make_row():
    """`make_row(*parts, **keys)`: a row with one user message of these parts; a string is text or a picture."""

    def make(*parts, **keys):
        content = []
        for part in parts:
            if isinstance(part, str) and part.endswith(".png"):
                part = {"type": "input_image", "image_url": part, "detail": "auto"}
            elif isinstance(part, str):
                part = {"type": "input_text", "text": part}
            content.append(part)
        keys = {"verifier_metadata": {"answer": "a"}, **keys}
        return {"responses_create_params": {"input": [{"role": "user", "content": content}]}, **keys}

    return make


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level tokenizer whose only tokens beside bytes are media tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<image>", "<img>", "</img>", "<my_image_pad>"]
    vocab = {t: i for i, t in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer, tmp_path_factory):
    """That tokenizer as a directory."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def safe_encoder(tokenizer):
    """The safe encoder over it."""
    from nemo_rl_ext.guards.encode import SafeEncoder

    return SafeEncoder(tokenizer)
