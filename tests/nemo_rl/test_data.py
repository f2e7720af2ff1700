# SPDX-License-Identifier: Apache-2.0
"""One manifest with a static video, still images and text through NeMo-RL's data set-up."""

import copy
import json
import pickle

import gym_edge
import pytest
import torch
from driving import urls, video_recipe, video_row, write_rows
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
from nemo_rl.data.multimodal_utils import PackedTensor
from nemo_rl.data.utils import setup_response_data
from nemo_rl.models.generation.vllm.config import materialize_vllm_video_config

from nemo_rl_ext.manifest.loading import ManifestError


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_RL_VIDEO_MEDIA_ROOT", str(tmp_path))
    text = gym_edge.image_row([], [[]], id="text")
    image = gym_edge.image_row(urls([(160, 320)]), [[50]], id="image", image_max_num_tiles=6)
    return write_rows(tmp_path / "mixed.jsonl", [video_row(tmp_path), image, text])


def dataset(root, checkpoint, rows, *overrides):
    import nemo_rl.algorithms.utils as tokenizers

    config = video_recipe(root, checkpoint, rows, *overrides)
    materialize_vllm_video_config(config.policy, config.data)
    processor = tokenizers.get_tokenizer(config.policy["tokenizer"], get_processor=True)
    train, _ = setup_response_data(processor, config.data, env_configs=None)
    return train


def test_upstream_alone_refuses_the_mixture(manifest, nemo_rl_root, checkpoint):
    train = dataset(nemo_rl_root, checkpoint, manifest)
    with pytest.raises(ValueError, match="static video in every row"):
        train[1]


def test_the_flag_alone_makes_the_mixture_work(manifest, nemo_rl_root, checkpoint, installed):
    train = dataset(nemo_rl_root, checkpoint, manifest)
    rows = [train[index] for index in range(3)]
    video, image, text = (row["message_log"][0] for row in rows)
    assert isinstance(video["pixel_values"], PackedTensor)
    assert video["num_frames"].as_tensor().tolist() == [5]
    assert image["token_ids"].dtype == text["token_ids"].dtype == video["token_ids"].dtype == torch.int64
    assert "pixel_values" not in image and "pixel_values" not in text

    extra = json.loads(rows[1]["extra_env_info"]["responses_create_params"]["metadata"]["extra_body"])
    assert extra["mm_processor_kwargs"] == {"max_num_tiles": 6}
    assert "metadata" not in rows[2]["extra_env_info"]["responses_create_params"]

    # The flatten that NeMo-RL runs on the prompts, which mixed dtypes break.
    batch = rl_collate_fn(copy.deepcopy(rows))
    flat, lengths = batched_message_log_to_flat_message(batch["message_log"], pad_value_dict={"token_ids": 0})
    assert flat["token_ids"].dtype == torch.int64
    assert lengths.tolist() == [len(video["token_ids"]), 0, 0]
    media = flat.get_multimodal_dict(as_tensors=False)
    assert media["pixel_values"].logical_segment_counts_by_row() == [1, 0, 0]


def test_the_dataset_can_be_named_in_a_recipe(tmp_path, nemo_rl_root, checkpoint):
    named = "data.default.dataset_name=nemo_rl_ext.integration.data.MixedNemoGymDataset"
    rows = write_rows(tmp_path / "rows.jsonl", [gym_edge.image_row(urls([(64, 64)]), [[4]], id="a")])
    train = dataset(nemo_rl_root, checkpoint, rows, named, "++data.default.image_max_num_tiles=3")
    extra = json.loads(train[0]["extra_env_info"]["responses_create_params"]["metadata"]["extra_body"])
    assert extra["mm_processor_kwargs"] == {"max_num_tiles": 3}

    rows.write_text('{"responses_create_params": {"input": []}}\n{"broken\n')
    with pytest.raises(ManifestError, match=r"rows\.jsonl:2: not JSON") as fault:
        dataset(nemo_rl_root, checkpoint, rows, named)
    assert "rows.jsonl:1" in str(fault.value)


def test_faulty_rows_of_an_old_recipe_are_named_but_taken(
    tmp_path, nemo_rl_root, checkpoint, installed, caplog
):
    row = gym_edge.image_row(urls([(64, 64)]), [[4]], id="twice")
    rows = write_rows(tmp_path / "rows.jsonl", [row, row])
    with caplog.at_level("WARNING"):
        train = dataset(nemo_rl_root, checkpoint, rows)
    assert len(train) == 2
    assert "duplicate id 'twice', first on line 1" in caplog.text


def test_the_row_processor_installs_where_it_is_unpickled(installed):
    from nemo_rl.experience import rollouts

    from nemo_rl_ext.integration.data import RowProcessor
    from nemo_rl_ext.integration.in_process import is_wrapped, uninstall

    sent = pickle.dumps(RowProcessor())
    uninstall()
    assert isinstance(pickle.loads(sent), RowProcessor)
    assert is_wrapped(rollouts._reattach_static_multimodal_payloads_to_result)
