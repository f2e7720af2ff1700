# SPDX-License-Identifier: Apache-2.0
"""What is bound in the driver and in a process that collects rollouts, and that all of it can be taken back."""

import logging
import pickle
import sys
from types import SimpleNamespace

import pytest

from nemo_rl_ext.integration import install
from nemo_rl_ext.integration.capture import PLUGIN
from nemo_rl_ext.integration.in_process import bind, install_in_process, is_wrapped, uninstall, wrap
from nemo_rl_ext.integration.probe import UnknownNemoRLError
from nemo_rl_ext.integration.processor_allowlists import EXTRA_PROCESSOR_NAMES
from nemo_rl_ext.integration.settings import ACTOR_KEY


def recipe(**block):
    return {
        "grpo": {"media_alignment": {"enabled": True, **block}},
        "policy": {
            "is_vlm": True,
            "megatron_cfg": {"enabled": True},
            "generation": {
                "backend": "vllm",
                "vllm_cfg": {
                    "logprobs_mode": "raw_logprobs",
                    "max_model_len": 512,
                    "video": {"temporal_patch_size": 2},
                },
            },
        },
        "env": {"should_use_nemo_gym": True, "nemo_gym": {}},
    }


class Config(dict):
    """A recipe as NeMo-RL's `MasterConfig` answers: sections are attributes too."""

    __getattr__ = dict.__getitem__


def test_the_driver_is_bound_once_and_given_back(nemo_rl_shapes, caplog):
    from nemo_rl.environments import nemo_gym

    before = nemo_gym.NemoGym
    with caplog.at_level(logging.INFO):
        assert install.install_driver()
        bound = nemo_gym.NemoGym
        assert install.install_driver() and nemo_gym.NemoGym is bound
    assert bound.__ray_metadata__.modified_class.__name__ == "AlignedNemoGym"
    assert is_wrapped(nemo_gym.setup_nemo_gym_config)
    registry = sys.modules["nemo_rl.data.processors"].PROCESSOR_REGISTRY
    datasets = sys.modules["nemo_rl.data.datasets.response_datasets"].DATASET_REGISTRY
    assert type(registry["nemo_gym_data_processor"]).__name__ == "RowProcessor"
    assert datasets["NemoGymDataset"].__name__ == "CheckedNemoGymDataset"
    assert "is installed over NeMo-RL 0.6.0" in caplog.text
    uninstall()
    assert nemo_gym.NemoGym is before and datasets == {}
    assert not is_wrapped(nemo_gym.setup_nemo_gym_config)


def test_counts_of_a_step_are_summed_as_well_as_averaged(nemo_rl_shapes):
    assert install.install_driver()
    grpo = sys.modules["nemo_rl.algorithms.grpo"]
    found = grpo.aggregate_rollout_metrics({"alignment/rows": [2.0, 4.0], "reward": [1.0, 3.0]})
    assert found == {"alignment/rows": 3.0, "alignment/rows/sum": 6.0, "reward": 2.0}


def test_it_stands_aside_for_a_nemo_rl_that_aligns(nemo_rl_shapes, nemo_rl_tree, caplog):
    with (nemo_rl_tree / "experience" / "rollouts.py").open("a") as file:
        file.write('ROLLOUT_MATCHED_MEDIA_KEY = "x"\n')
    with caplog.at_level(logging.WARNING):
        assert not install.install_driver()
    assert "stands aside" in caplog.text
    install_in_process()
    rollouts = sys.modules["nemo_rl.experience.rollouts"]
    assert not is_wrapped(rollouts._reattach_static_multimodal_payloads_to_result)


def test_another_nemo_rl_is_not_bound(nemo_rl_shapes, nemo_rl_tree):
    (nemo_rl_tree / "experience" / "rollouts.py").unlink()
    with pytest.raises(UnknownNemoRLError, match=r"no nemo_rl/experience/rollouts\.py"):
        install_in_process()


def test_processors_are_known_by_name_in_every_list(nemo_rl_shapes):
    install_in_process()
    install_in_process()
    from nemo_rl.data import multimodal_utils
    from nemo_rl.environments import nemo_gym_video, nemotron_utils

    assert multimodal_utils._PLACEHOLDER_STYLE_PROCESSOR_NAMES >= EXTRA_PROCESSOR_NAMES
    for module in (nemo_gym_video, nemotron_utils):
        assert module.NEMOTRON_VIDEO_PROCESSOR_NAMES >= EXTRA_PROCESSOR_NAMES


def test_functions_are_wrapped_once_and_keys_bound_over_nothing():
    module, registry = SimpleNamespace(f=lambda: 1), {}
    for _ in range(2):
        wrap(module, "f", lambda original: lambda: original() + 1)
    bind(registry, "new", 5)
    assert module.f() == 2 and registry == {"new": 5}
    uninstall()
    assert module.f() == 1 and registry == {}


def test_the_chat_template_follows_an_override(nemo_rl_shapes, processor, monkeypatch):
    monkeypatch.setattr(processor, "chat_template", "the checkpoint's", raising=False)
    monkeypatch.setattr(processor.tokenizer, "chat_template", "OVERRIDE")
    get = install.with_synced_template(sys.modules["nemo_rl.algorithms.utils"].get_tokenizer)
    assert get({"chat_template": "default"}, get_processor=True).chat_template == "the checkpoint's"
    assert get({"chat_template": "OVERRIDE"}).chat_template == "OVERRIDE"
    assert get({"chat_template": "OVERRIDE"}, get_processor=True).chat_template == "OVERRIDE"


def hand_over(**block):
    config = Config(recipe(**block))
    seen = []
    install.with_settings(lambda config, tokenizer: seen.append(config))(config, None)
    assert seen == [config]
    return config


def test_the_actor_gets_settings_and_what_it_cannot_see(caplog):
    with caplog.at_level(logging.INFO):
        config = hand_over(num_aligners=5, evidence="runs")
    handed = config["env"]["nemo_gym"][ACTOR_KEY]
    assert handed["num_aligners"] == 5 and handed["evidence"] == "runs"
    # The engine's processor cache is on where nobody says otherwise: its images share no budget.
    assert handed["context"] == {
        "max_model_len": None,
        "temporal_patch_size": 2,
        "one_size_per_row": False,
        "clips": None,
        # Without Ray nothing is shared between processes; other tests of this process may have started one.
        "share": "ray" in sys.modules and sys.modules["ray"].is_initialized(),
        "pixel_dtype": "float32",
    }
    assert config["policy"]["generation"]["bad_words"] == ["<img>", "<image>", "</img>"]
    assert "banned from sampling through policy.generation.bad_words" in caplog.text


def test_with_the_block_off_nothing_is_handed_over():
    assert hand_over(enabled=False)["env"]["nemo_gym"] == {}


def test_recording_is_asked_for_through_a_free_plugin_key(caplog):
    config = hand_over(evidence="receipt")
    assert config["policy"]["generation"]["vllm_cfg"]["reasoning_parser_plugin"] == str(PLUGIN)
    assert config["env"]["nemo_gym"][ACTOR_KEY]["evidence"] == "receipt"

    taken = Config(recipe(evidence="receipt"))
    vllm = taken["policy"]["generation"]["vllm_cfg"]
    vllm |= {"reasoning_parser_plugin": "a.py", "tool_parser_plugin": "b.py"}
    install.with_settings(lambda *_: None)(taken, None)
    assert taken["env"]["nemo_gym"][ACTOR_KEY]["evidence"] == "runs"
    assert "both taken" in caplog.text


@pytest.fixture
def data(nemo_rl_shapes):
    from nemo_rl_ext.integration import data

    return data


def datum(data, row, **fields):
    import json

    style = fields.pop("style", None)
    task = SimpleNamespace(video_sampling_style=style) if style else None
    return data.RowProcessor()({"extra_env_info": json.dumps(row), **fields}, task, None, None, 0)


def test_every_kind_of_row_gets_integer_ids(data, rows):
    import torch

    for style in (None, "nemotron_vl"):
        made = datum(data, rows.row([]), style=style)
        assert made["message_log"][0]["token_ids"].dtype == torch.int64


def test_a_video_row_goes_through_nemo_rls_own_processor(data, rows):
    row = rows.row([])
    row["responses_create_params"]["input"][0]["content"] = [{"type": "input_video", "video_url": "a.mp4"}]
    assert data.has_static_video(row)
    assert datum(data, row, style="nemotron_vl")["message_log"]
    row["responses_create_params"]["input"][0]["content"] = [{"_is_video_frame": True}]
    with pytest.raises(ValueError, match="static video in every row"):
        datum(data, row, style="nemotron_vl")


def test_tiles_reach_the_engine_and_nonsense_is_refused(data, rows):
    made = datum(data, rows.row([]) | {"image_max_num_tiles": 6})
    assert '"max_num_tiles": 6' in made["datum"]["extra_env_info"]
    assert '"max_num_tiles": 3' in datum(data, rows.row([]), image_max_num_tiles=3)["datum"]["extra_env_info"]
    with pytest.raises(ValueError, match="must be a positive integer, got 0"):
        datum(data, rows.row([]) | {"image_max_num_tiles": 0})


def test_a_faulty_manifest_is_refused_or_named(data, tmp_path, caplog):
    good = '{"agent_ref": {"name": "a"}, "responses_create_params": {"input": [{"role": "user", "content": "x"}]}}\n'
    path = tmp_path / "rows.jsonl"
    path.write_text(good)
    loaded = data.MixedNemoGymDataset(str(path), image_max_num_tiles=4)
    assert [row["image_max_num_tiles"] for row in loaded.dataset] == [4]
    path.write_text(good + "{broken\n")
    with pytest.raises(data.ManifestError, match=r"correct these lines:\n.*rows\.jsonl:2"):
        data.MixedNemoGymDataset(str(path))
    assert len(data.CheckedNemoGymDataset(str(path)).dataset) == 2
    assert "rows.jsonl:2" in caplog.text


def test_another_data_processor_is_refused(data, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("")
    dataset = data.CheckedNemoGymDataset(str(path), processor="math")
    with pytest.raises(data.RecipeError, match="'math' does not know mixed NeMo-Gym rows"):
        dataset.set_processor()
    dataset.data_config = {"processor": data.RowProcessor.name}
    dataset.set_processor()
    assert isinstance(dataset.processor, data.RowProcessor)


def test_the_row_processor_installs_where_it_is_unpickled(data):
    sent = pickle.dumps(data.RowProcessor())
    uninstall()
    assert isinstance(pickle.loads(sent), data.RowProcessor)
    rollouts = sys.modules["nemo_rl.experience.rollouts"]
    assert is_wrapped(rollouts._reattach_static_multimodal_payloads_to_result)
