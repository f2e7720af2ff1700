# SPDX-License-Identifier: Apache-2.0
import json
import shutil
import threading
from pathlib import Path

import pytest

from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint, require_checkpoint
from nemo_rl_ext.models.tokenizer import EOS_ID, IMAGE_ID, VOCAB_SIZE


def files(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_checkpoint)


def test_info_states_what_the_run_needs(tiny_checkpoint):
    info = require_checkpoint(tiny_checkpoint)
    assert (info.architecture, info.dtype) == ("NemotronH_Omni_Reasoning_V3", "float32")
    assert (info.patch_size, info.merge_size) == (16, 2)
    assert (info.min_num_patches, info.max_num_patches) == (16, 1024)
    assert info.engine_overrides == {"vit_hidden_size": 32}
    assert not info.needs_remote_code


def test_vllm_s_own_server_finds_what_it_reads(tiny_checkpoint):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_checkpoint)
    assert config.vit_hidden_size == config.vision_hidden_size == 32
    assert str(config.dtype) == "torch.float32" and str(config.text_config.dtype) == "torch.bfloat16"


def test_equal_arguments_give_equal_bytes(tiny_checkpoint, tmp_path):
    assert files(build_tiny_checkpoint(tmp_path / "again")) == files(tiny_checkpoint)


def test_another_seed_gives_other_weights_only(tiny_checkpoint, tmp_path):
    ours, other = files(tiny_checkpoint), files(build_tiny_checkpoint(tmp_path / "other", seed=1))
    differing = {name for name in ours | other if ours.get(name) != other.get(name)}
    assert differing == {"model.safetensors", "tiny_checkpoint.json"}


def test_same_checkpoint_is_reused_and_a_changed_one_rebuilt(copy):
    marker = copy / "marker"
    marker.touch()
    assert build_tiny_checkpoint(copy) == copy
    assert marker.exists()
    build_tiny_checkpoint(copy, max_num_patches=512)
    assert not marker.exists()
    assert require_checkpoint(copy).max_num_patches == 512
    assert [entry.name for entry in copy.parent.iterdir()] == ["model"]


def test_concurrent_builders_leave_one_whole_checkpoint(tiny_checkpoint, tmp_path):
    out = tmp_path / "shared"
    builders = [threading.Thread(target=build_tiny_checkpoint, args=(out,)) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert files(out).keys() == files(tiny_checkpoint).keys()
    assert [entry.name for entry in tmp_path.iterdir()] == ["shared"]


def test_foreign_directory_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(ValueError, match="not a tiny checkpoint"):
        build_tiny_checkpoint(tmp_path)
    assert files(tmp_path) == {"notes.txt": b"keep me"}


def test_failed_build_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_rl_ext.models.tiny_model.save_byte_tokenizer", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build_tiny_checkpoint(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "found"),
    [
        ({"dtype": "float16"}, "'float16'"),
        ({"pattern": "*x"}, r"'\*x'"),
        ({"pattern": ""}, "''"),
        ({"min_num_patches": 64, "max_num_patches": 32}, "64, 32"),
    ],
)
def test_bad_argument_is_refused(argument, found, tmp_path):
    with pytest.raises(ValueError, match=found):
        build_tiny_checkpoint(tmp_path / "model", **argument)
    assert not (tmp_path / "model").exists()


def test_missing_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: expected a checkpoint directory, found nothing"):
        require_checkpoint(tmp_path / "nowhere")


def test_every_missing_file_is_named_at_once(tmp_path):
    with pytest.raises(ValueError) as error:
        require_checkpoint(tmp_path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors"):
        assert name in str(error.value)


def test_pickled_weights_do_not_count(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"missing \*\.safetensors"):
        require_checkpoint(copy)


def test_missing_shard_is_named(copy):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"missing model-1\.safetensors"):
        require_checkpoint(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture 'LlamaForCausalLM' is not supported"),
        ({"architectures": None}, "architecture 'none' is not supported"),
        ({"vision_config": {"args": {}}}, "no 'min_num_patches'"),
    ],
)
def test_unfit_configuration_is_refused(copy, change, message):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        require_checkpoint(copy)


def test_broken_configuration_is_refused(copy):
    (copy / "config.json").write_text('{"architectures": [')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        require_checkpoint(copy)


def test_tokenizer_maps_one_byte_to_one_token(tokenizer):
    text = "Größe 12 × 7\n日本\t<x>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(["<image>", "<|im_end|>"]) == [IMAGE_ID, EOS_ID]
    assert tokenizer.encode("<image>", add_special_tokens=False) == [IMAGE_ID]


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_image"}, {"type": "input_text", "text": "Which half?"}]},
    {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [{"type": "function", "function": {"name": "zoom", "arguments": {"factor": 2}}}],
    },
    {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "zoomed"}]},
    {"role": "assistant", "content": None},
]


def test_template_renders_every_role_and_part(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<image>\nWhich half?<|im_end|>\n"
        "<|im_start|>assistant\nLet me look."
        '<tool_call>{"name": "zoom", "arguments": {"factor": 2}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<image>\nzoomed<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("split", range(1, len(CONVERSATION)))
def test_a_later_turn_appends_to_the_earlier_ones(tokenizer, split):
    def render(messages):
        return tokenizer.apply_chat_template(messages, tokenize=False)

    assert render(CONVERSATION) == render(CONVERSATION[:split]) + render(CONVERSATION[split:])


def test_unknown_part_is_refused(tokenizer):
    with pytest.raises(Exception, match="unknown content part type input_audio"):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": [{"type": "input_audio"}]}], tokenize=False
        )


def test_processor_loads_without_remote_code(tiny_checkpoint):
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(tiny_checkpoint)
    output = processor(images=[Image.new("RGB", (640, 480))], text="<image>", return_tensors="pt")
    assert output["image_grid_hw"].tolist() == [[28, 36]]
    assert (output["input_ids"] == IMAGE_ID).sum() == 28 * 36 // 4
