# SPDX-License-Identifier: Apache-2.0
"""`family_of`: by model_type, from the files that transformers 4 and 5 write, refusing by name."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_ext.align.families.family import Layout
from nemo_rl_ext.align.families.fixed_tile import FixedTileFamily
from nemo_rl_ext.align.families.nemotron import NemotronFamily
from nemo_rl_ext.align.families.registry import family_of, known_model_types


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint

    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def copy(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "copy")
    return tmp_path / "copy"


def edit(path, **values):
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **values}))


def test_a_checkpoint_is_known_by_its_model_type(tiny):
    family = family_of(tiny, layout=Layout.NATIVE, dtype=torch.bfloat16)
    assert family == NemotronFamily.from_pretrained(tiny, layout=Layout.NATIVE, dtype=torch.bfloat16)
    assert family.decode([65]) is not None


def test_released_architectures_under_a_model_type_of_their_own_are_known(copy):
    edit(copy / "config.json", model_type="custom", architectures=["NemotronH_Nano_VL_V2"])
    assert family_of(copy) == family_of(str(copy))


def test_a_checkpoint_saved_by_transformers_5_has_one_processor_file(tiny, copy):
    from transformers import AutoProcessor

    AutoProcessor.from_pretrained(str(tiny), local_files_only=True).save_pretrained(str(copy))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (copy / name).unlink(missing_ok=True)
    assert (copy / "processor_config.json").is_file()
    assert family_of(copy) == family_of(tiny)


def test_another_family_is_refused_by_name_with_those_that_are_known(copy):
    edit(copy / "config.json", model_type="mystery_vl", architectures=["MysteryVL"])
    with pytest.raises(
        ValueError, match="'mystery_vl' cannot be aligned; the known ones are .*nemotron_h_omni"
    ):
        family_of(copy)
    assert list(known_model_types()) == sorted(known_model_types())
    with pytest.raises(ValueError, match="SimpleNamespace"):
        family_of(SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=dict)))


def test_what_is_missing_is_named(copy, tmp_path):
    with pytest.raises(ValueError, match="is not a directory"):
        family_of(tmp_path / "nothing")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (copy / name).unlink(missing_ok=True)
    with pytest.raises(
        ValueError, match="preprocessor_config.json is missing, and processor_config.json is too"
    ):
        family_of(copy)
    (copy / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="config.json: an object is expected, found list"):
        family_of(copy)


def test_a_checkpoint_without_patch_limits_has_fixed_tiles(copy):
    config = json.loads((copy / "config.json").read_text())
    vision = {**config["vision_config"], "args": {}}
    edit(
        copy / "config.json",
        vision_config=vision,
        force_image_size=64,
        patch_size=16,
        downsample_ratio=0.5,
        use_thumbnail=True,
        norm_mean=[0.5] * 3,
        norm_std=[0.5] * 3,
    )
    family = family_of(copy)
    assert isinstance(family, FixedTileFamily)
    assert family.tiler.tokens_per_tile == 4
    assert family.tiler.max_num_tiles == 12


def test_a_live_processor_is_recognised_by_what_it_has(tiny):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(str(tiny), local_files_only=True)
    assert family_of(processor).grammars == family_of(tiny).grammars


def test_nothing_outside_the_families_knows_one_by_name():
    from pathlib import Path

    import nemo_rl_ext

    package = Path(nemo_rl_ext.__file__).parent
    names = ("families.nemotron", "families.fixed_tile", "families.qwen", "families.internvl")
    guilty = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.parent != package / "align" / "families"
        and any(name in path.read_text(encoding="utf-8") for name in names)
    ]
    assert not guilty
