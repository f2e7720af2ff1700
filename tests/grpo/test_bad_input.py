# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong: one clear error with exit code 2, and nothing half-written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.grpo.config import load_config
from nemo_rl_ext.grpo.setup import prepare

CONFIG = Path(__file__).parents[2] / "configs" / "embedded_async.yaml"


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint


@pytest.fixture(scope="module")
def bomb(tmp_path_factory):
    """50 MB of pixels in 50 kB; takes a while to write."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.png"
    Image.new("1", (20_000, 20_000)).save(path)
    return path


def row(*images, role="user"):
    content = [{"type": "input_image", "image_url": image} for image in images]
    content.append({"type": "input_text", "text": "?"})
    prompt = {"input": [{"role": role, "content": content}]}
    return {"responses_create_params": prompt, "verifier_metadata": {"answer": "l"}}


@pytest.fixture
def folder(tmp_path, bomb):
    Image.fromarray(np.zeros((32, 48, 3), np.uint8)).save(tmp_path / "good.png")
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:20_000])
    shutil.copy(bomb, tmp_path)
    return tmp_path


def overrides(folder, checkpoint, *rows):
    (folder / "train.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return [
        f"policy.model_name={checkpoint}",
        "policy.build_tiny_checkpoint=false",
        "data.build_demo_manifest=false",
        f"data.train.data_path={folder}/train.jsonl",
        "data.validation=null",
        f"logger.log_dir={folder}/run",
    ]


BAD_ROWS = {
    "a missing image": (row("none.png"), ["train.jsonl:2", "none.png", "no such file"]),
    "half a PNG": (row("half.png"), ["train.jsonl:2", "half.png", "truncated"]),
    "a decompression bomb": (
        row("bomb.png"),
        ["train.jsonl:2", "bomb.png", "400000000 pixels", "at most 64000000 pixels"],
    ),
    "a path outside": (row("/etc/passwd"), ["train.jsonl:2", "passwd", "outside the media roots"]),
    "no user turn": (row("good.png", role="system"), ["train.jsonl:2", "role 'user'"]),
    "an unknown part": (
        {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_smell"}]}]}},
        ["train.jsonl:2", "input_smell"],
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line_before_anything_starts(name, folder, checkpoint):
    bad, parts = BAD_ROWS[name]
    config = load_config(CONFIG, overrides(folder, checkpoint, row("good.png"), bad))
    with pytest.raises(ValueError) as caught:
        prepare(config)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert not (folder / "run").exists()


def test_an_empty_manifest_is_refused(folder, checkpoint):
    with pytest.raises(ValueError, match=r"train\.jsonl: expected one JSON object per line"):
        prepare(load_config(CONFIG, overrides(folder, checkpoint)))


def test_a_manifest_that_nothing_can_score_is_refused(folder, checkpoint):
    bare = row("good.png") | {"verifier_metadata": {}}
    with pytest.raises(ValueError, match=r"train\.jsonl: no row has anything to be scored by"):
        prepare(load_config(CONFIG, overrides(folder, checkpoint, bare, bare)))
    long = row("good.png") | {"verifier_metadata": {"answer": "left"}}
    with pytest.raises(ValueError, match=r"no row's answer is a single letter.*found 'left'"):
        prepare(load_config(CONFIG, overrides(folder, checkpoint, bare, long)))
    prepare(load_config(CONFIG, overrides(folder, checkpoint, bare, row("good.png"))))


def test_a_directory_that_is_no_checkpoint_is_refused(folder, checkpoint, tmp_path):
    empty = tmp_path / "nothing"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"nothing.*config\.json"):
        prepare(load_config(CONFIG, overrides(folder, empty, row("good.png"))))
    cut = tmp_path / "cut"
    shutil.copytree(checkpoint, cut)
    (cut / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        prepare(load_config(CONFIG, overrides(folder, cut, row("good.png"))))


def test_the_command_answers_with_one_line_and_exit_code_2(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("grpo", "--config", CONFIG, "grpo.media_alignmnt.enabled=true")
    assert done.returncode == 2
    assert "grpo.media_alignmnt" in done.stderr
    assert "media_alignment" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
