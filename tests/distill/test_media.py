# SPDX-License-Identifier: Apache-2.0
"""Pairs with images: text, masks, tensors and the real model's forward pass agree."""

import pytest
from PIL import Image

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from nemo_rl_ext.align.runs import RunKind, find_runs  # noqa: E402
from nemo_rl_ext.distill.batch import collate  # noqa: E402
from nemo_rl_ext.distill.media import row_tensors  # noqa: E402
from nemo_rl_ext.distill.prepare import prepare  # noqa: E402
from nemo_rl_ext.distill.records import DatasetError  # noqa: E402


@pytest.fixture
def pictures(tmp_path):
    (tmp_path / "data").mkdir()
    for name, size, colour in (("red", (160, 96), (200, 0, 0)), ("blue", (64, 256), (0, 0, 200))):
        Image.new("RGB", size, colour).save(tmp_path / "data" / f"{name}.png")
    return tmp_path / "data"


@pytest.fixture
def rows_of(make_config, vlm_models, pictures):
    def rows(records, **flags):
        prepared = prepare(make_config(vlm_models, records, **flags))
        return prepared.train_rows, prepared.family

    return rows


def runs_of(row, family):
    return list(find_runs(row.ids, family.grammar))


def test_markers_become_the_runs_that_the_processor_would_write(rows_of, vlm_models):
    from transformers import AutoProcessor

    record = {"input": "A <image> B <image>?", "output": "ok", "images": ["red.png", "blue.png"]}
    (row,), family = rows_of([record], data__seq_length=512)
    runs = runs_of(row, family)
    assert [run.kind for run in runs] == [RunKind.WRAPPED] * 2
    processor = AutoProcessor.from_pretrained(vlm_models[0], local_files_only=True)
    decoded = [Image.fromarray(placed.item.pixels()[0]) for placed in row.images]
    pixels = processor.image_processor(decoded, return_tensors="pt")
    assert [run.length * 4 for run in runs] == pixels["image_grid_hw"].prod(-1).tolist()
    tensors = row_tensors(row, family)
    assert tensors.values["image_grid_hw"].tolist() == pixels["image_grid_hw"].tolist()
    text = processor.tokenizer.decode([i for i in row.ids if i != family.grammar.context_id])
    assert text == "A <img></img> B <img></img>?ok<|im_end|>"


def test_two_markers_side_by_side_are_two_images(rows_of):
    record = {"input": "<image><image>", "output": "ok", "images": ["red.png", "blue.png"]}
    (row,), family = rows_of([record], data__seq_length=512)
    assert len(runs_of(row, family)) == 2


def test_runs_from_a_rollout_are_kept_to_the_token_and_repaired(rows_of):
    """The engine had shrunk the 160x96 image from 15 to 8 tokens, a grid of 4x8 patches."""
    record = {"input": "<img>" + "<image>" * 8 + "</img>?", "output": "ok", "images": ["red.png"]}
    (row,), family = rows_of([record])
    assert [run.length for run in runs_of(row, family)] == [8]
    assert row_tensors(row, family).num_features(family.merge_size) == 8


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input": "no marker", "images": ["red.png"]}, "0 image placeholder.*for 1 image"),
        ({"input": "<image>"}, "'input' spells 1 image context token"),
        ({"input": "<image> <image>", "images": ["red.png"]}, "2 image placeholder.*for 1 image"),
        ({"input": "<image>", "output": "a <image>", "images": ["red.png"]}, "'output' spells 1 image"),
        ({"input": "<image>", "images": ["gone.png"]}, "gone.png"),
        ({"input": "<image>", "images": ["broken.png"]}, "broken.png"),
        ({"input": "<image>", "images": ["../outside.png"]}, "outside.png"),
        ({"input": "<img>" + "<image>" * 7919 + "</img>", "images": ["red.png"]}, "cannot be proven"),
        ({"input": "<image> <img><image><image></img>", "images": ["red.png"] * 2}, "mixes 1 <image> marker"),
        ({"input": "<img><image><image> x", "images": ["red.png"]}, "unclosed placeholder run"),
        ({"input": "a", "videos": ["a.mp4"]}, "'videos' cannot be distilled"),
    ],
)
def test_media_that_contradict_the_text_are_named(rows_of, pictures, record, message):
    Image.new("RGB", (32, 32)).save(pictures.parent / "outside.png")
    (pictures / "broken.png").write_bytes((pictures / "red.png").read_bytes()[:40])
    with pytest.raises(DatasetError, match=message) as error:
        rows_of([{"input": "fine", "output": "ok"}, {"output": "ok", **record}], data__seq_length=10_000)
    assert "training.jsonl:2: " in str(error.value)


def test_truncation_drops_whole_images(rows_of):
    record = {"input": "<image> then <image>?", "output": "ok", "images": ["red.png", "blue.png"]}
    (whole,), family = rows_of([record], data__seq_length=512)
    (cut,), _ = rows_of([record], data__seq_length=len(whole.ids) - 1)
    assert [placed.item.source for placed in cut.images] == ["blue.png"]
    assert len(runs_of(cut, family)) == 1 and len(cut.ids) < len(whole.ids) - 15
    (bare,), _ = rows_of([record], data__seq_length=8)
    assert bare.images == () and runs_of(bare, family) == []


def test_a_row_feeds_the_real_model_exactly_one_feature_per_context_token(rows_of, vlm_models, make_config):
    records = [
        {"input": "<image>?", "output": "red", "images": ["red.png"]},
        {"input": "none", "output": "no"},
        {"input": "<image> <image>", "output": "both", "images": ["blue.png", "red.png"]},
    ]
    rows, family = rows_of(records, data__seq_length=512)
    batch = collate(rows, pad_id=0, multiple=1, family=family, device=torch.device("cpu"))
    patches = int(batch.media["image_grid_hw"].prod(-1).sum())
    assert patches // 4 == int((batch.ids == family.grammar.context_id).sum())
    assert not (batch.mask & (batch.labels == family.grammar.context_id)).any()


def test_an_image_that_changes_after_the_check_stops_the_run(rows_of, pictures):
    (row,), family = rows_of([{"input": "<image>?", "output": "red", "images": ["red.png"]}])
    Image.new("RGB", (40, 300)).save(pictures / "red.png")
    with pytest.raises(ValueError, match="training.jsonl:1: an image no longer fits"):
        row_tensors(row, family)


def test_text_models_refuse_media(make_config, text_models, pictures):
    config = make_config(text_models, [{"input": "<image>", "output": "a", "images": ["red.png"]}])
    with pytest.raises(DatasetError, match="training.jsonl:1: has media"):
        prepare(config)


def test_a_teacher_that_sees_other_patches_is_refused(make_config, vlm_models, pictures, tmp_path):
    from nemo_rl_ext.grpo.checkpoint import build_tiny_checkpoint

    other = build_tiny_checkpoint(tmp_path / "other", seed=0, max_num_patches=64)
    records = [{"input": "<image>", "output": "a", "images": ["red.png"]}]
    with pytest.raises(ValueError, match="differ in their image processors"):
        prepare(make_config((vlm_models[0], other), records))
    assert prepare(make_config((vlm_models[0], other), [{"input": "a", "output": "b"}])).train_rows
