# SPDX-License-Identifier: Apache-2.0
"""A pinned checkpoint is the same one with another limit, for engine and trainer, and the original is untouched."""

import json
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.cli import CommonOptions, build_app
from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint, require_checkpoint
from nemo_rl_ext.models.pin import pin_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return build_tiny_checkpoint(tmp_path_factory.mktemp("a checkpoint") / "tiny one")


def snapshot(folder):
    return {
        path.relative_to(folder): (path.lstat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def check(out, original, limit):
    assert require_checkpoint(out).max_num_patches == limit == family_of(out).tiler.max_num_patches
    assert require_checkpoint(out).min_num_patches == require_checkpoint(original).min_num_patches
    names = {path.name for path in Path(original).iterdir()}
    assert {path.name for path in out.iterdir()} == names
    changed = {path.name for path in out.iterdir() if not path.is_symlink()}
    assert changed == {"config.json", "preprocessor_config.json"}
    for name in names - changed:
        assert (out / name).read_bytes() == (Path(original) / name).read_bytes()
    for name in changed:
        before, after = (json.loads((folder / name).read_text()) for folder in (Path(original), out))
        (before["vision_config"]["args"] if name == "config.json" else before)["max_num_patches"] = limit
        assert before == after, "only the limit differs"


def test_engine_and_trainer_read_the_new_limit_and_the_original_is_as_it_was(original, tmp_path):
    before = snapshot(original)
    made = pin_checkpoint(original, tmp_path / "new" / "pinned one", 200)
    check(made.out, original, 200)
    assert (made.before, made.after) == (1024, 200)
    assert snapshot(original) == before
    again = pin_checkpoint(made.out, tmp_path / "again", 100)
    check(again.out, original, 100)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_transformers_own_processor_reads_it(original, tmp_path):
    from transformers import AutoConfig, AutoImageProcessor

    out = pin_checkpoint(original, tmp_path / "pinned", 300).out
    assert AutoImageProcessor.from_pretrained(out, local_files_only=True).max_num_patches == 300
    config = AutoConfig.from_pretrained(out, local_files_only=True)
    assert json.loads(config.to_json_string())["vision_config"] != {} and require_checkpoint(out)


def test_a_checkpoint_of_links_as_in_the_hub_s_cache_and_a_read_only_one(original, tmp_path):
    snapshots, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshots.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(original.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshots / path.name).symlink_to(Path("../../blobs") / str(number))
    for folder in (snapshots, blobs):
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    (tmp_path / "link").symlink_to(snapshots)
    try:
        for number, source in enumerate((snapshots, tmp_path / "link")):
            check(pin_checkpoint(source, tmp_path / f"out{number}", 128).out, original, 128)
    finally:
        for folder in (snapshots, blobs):
            folder.chmod(stat.S_IRWXU)
    assert all(path.is_symlink() for path in snapshots.iterdir())


def test_a_processor_in_the_joint_file_and_sharded_weights(original, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in original.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}})
    )
    processor = json.loads((source / "preprocessor_config.json").read_text())
    (source / "preprocessor_config.json").unlink()
    joint = source / "processor_config.json"
    value = json.loads(joint.read_text()) if joint.is_file() else {}
    joint.write_text(json.dumps(value | {"image_processor": processor}))
    (source / "extra").mkdir()
    out = pin_checkpoint(source, tmp_path / "out", 77).out
    assert family_of(out).tiler.max_num_patches == 77 == require_checkpoint(out).max_num_patches
    assert (out / "extra").is_symlink() and (out / "model-00001-of-00001.safetensors").is_symlink()
    assert json.loads((out / "processor_config.json").read_text())["image_processor"]["max_num_patches"] == 77


def test_what_is_refused_and_nothing_is_left(original, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in original.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    cases = [
        (original, tmp_path / "there", 100, "exists already"),
        (original, tmp_path / "dangling", 100, "exists already"),
        (original, original / "inside", 100, "lies in the checkpoint"),
        (original, tmp_path / "low", 15, "at least 16"),
        (tmp_path / "nowhere", tmp_path / "x", 100, "not a directory"),
        (tmp_path / "there", tmp_path / "x", 100, "config.json is missing"),
    ]
    for source, out, limit, message in cases:
        with pytest.raises(ValueError, match=message):
            pin_checkpoint(source, out, limit)
    config = json.loads((copy / "config.json").read_text())
    config["vision_config"]["args"]["max_num_patches"] = 512
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="engine and trainer disagree.*512.*1024"):
        pin_checkpoint(copy, tmp_path / "x", 100)
    del config["vision_config"]["args"]["max_num_patches"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="expected max_num_patches in config.json"):
        pin_checkpoint(copy, tmp_path / "x", 100)
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "there", "dangling"}
    assert not (original / "inside").exists()


def test_the_command_says_what_to_put_into_the_recipe(original, tmp_path):
    arguments = ["pin", str(original), str(tmp_path / "out"), "--max-num-patches", "120"]
    done = CliRunner().invoke(build_app(), arguments, obj=CommonOptions())
    assert done.exit_code == 0, done.output
    assert "max_num_patches 1024 -> 120 in config.json, preprocessor_config.json" in done.output
    assert f"policy.model_name: {tmp_path / 'out'}" in done.output
    assert "limit_mm_per_prompt.image: at most (max_model_len - 4 - text) * 4 / 120" in done.output
    assert os.path.isdir(tmp_path / "out")
