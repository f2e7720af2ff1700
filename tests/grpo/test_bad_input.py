# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong: one clear error with exit code 2, and nothing half-written."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.grpo.config import load_config
from nemo_rl_ext.grpo.setup import prepare
from nemo_rl_ext.models.pin import pin_checkpoint

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


@pytest.fixture
def crowded(folder):
    """A row whose three large pictures share the context of 512 tokens, and one that is never re-sized."""
    Image.new("RGB", (900, 900)).save(folder / "large.png")
    return [row("large.png", "large.png", "large.png"), row("good.png")]


def test_prevention_refuses_limits_with_the_numbers_that_would_do(folder, checkpoint, crowded):
    given = [*overrides(folder, checkpoint, *crowded), "grpo.media_alignment.prevent=true"]
    with pytest.raises(ValueError, match=r"may re-size images in 1 of 2 rows") as caught:
        prepare(load_config(CONFIG, given))
    message = str(caught.value)
    assert f"{folder}/train.jsonl" in message and "nemo-rl-ext fit" in message
    limit, context = (
        int(re.search(rf"would do: .*{key} (\d+)", message).group(1))
        for key in ("max_num_patches", "max_model_len")
    )

    def refused(limit, context, *more):
        out = pin_checkpoint(checkpoint, folder / f"pinned{limit}-{context}", limit).out
        lengths = ["policy.max_total_sequence_length", "policy.generation.vllm_cfg.max_model_len"]
        changes = [f"policy.model_name={out}", *(f"{key}={context}" for key in lengths), *more]
        try:
            prepare(load_config(CONFIG, [*given, *changes]))
        except ValueError as error:
            return str(error)
        return ""

    assert not refused(limit, 512) and not refused(1024, context)
    # Grids are even, and so the next larger one is a few patches further.
    assert "may re-size" in refused(limit + 64, 512) and "may re-size" in refused(1024, context - 1)
    agent = refused(500, 512, "env.should_use_nemo_gym=true")
    assert "an agent may send 4 images" in agent and "limit_mm_per_prompt.image 3" in agent
    one = "policy.generation.vllm_cfg.limit_mm_per_prompt.image=3"
    assert not refused(501, 512, "env.should_use_nemo_gym=true", one)


def test_prevention_compares_what_engine_and_trainer_read(folder, checkpoint):
    given = [*overrides(folder, checkpoint, row("good.png")), "grpo.media_alignment.prevent=true"]
    prepare(load_config(CONFIG, given))
    override = "++policy.generation.vllm_cfg.hf_overrides.vision_config.args.max_num_patches=64"
    with pytest.raises(ValueError, match=r"prevent: hf_overrides\.vision_config reaches the engine alone"):
        prepare(load_config(CONFIG, [*given, override]))
    other = pin_checkpoint(checkpoint, folder / "other", 512).out
    processor = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(processor | {"max_model_len": 104}))
    with pytest.raises(ValueError, match=r"max_model_len 104 caps an image at 400 patches"):
        prepare(load_config(CONFIG, [*given, f"policy.model_name={other}"]))
    (other / "preprocessor_config.json").write_text(json.dumps(processor | {"max_num_patches": 400}))
    with pytest.raises(ValueError, match=r"prevent: .*engine and trainer disagree.*512.*400"):
        prepare(load_config(CONFIG, [*given, f"policy.model_name={other}"]))
    with pytest.raises(ValueError, match="prevent: true .* needs enabled: true"):
        load_config(CONFIG, [*given, "grpo.media_alignment.enabled=false"])


def test_a_row_that_no_limit_helps_is_the_engines_to_refuse(folder, checkpoint, caplog):
    long = row("good.png")
    long["responses_create_params"]["input"][0]["content"][-1]["text"] = "x" * 600
    given = [*overrides(folder, checkpoint, row("good.png"), long), "grpo.media_alignment.prevent=true"]
    prepare(load_config(CONFIG, given))
    assert "no limit helps 1 row" in caplog.text


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
