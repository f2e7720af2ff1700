# SPDX-License-Identifier: Apache-2.0
"""Configuration files: inheritance, overrides, and one line per fault that says where and what."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from nemo_rl_ext.config.faults import known_keys
from nemo_rl_ext.grpo.config import Config, ConfigError, load_config

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "configs" / "embedded_async.yaml"
MINIMAL = "policy:\n  model_name: checkpoint\ndata:\n  train:\n    data_path: train.jsonl\n"


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def fault(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def blocks(model: type[BaseModel] = Config):
    yield model
    for field in model.model_fields.values():
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                yield from blocks(candidate)


def test_every_field_says_what_it_means():
    undocumented = [
        f"{block.__name__}.{name}"
        for block in blocks()
        for name, field in block.model_fields.items()
        if not field.description
    ]
    assert undocumented == []


def test_every_block_is_frozen_and_refuses_unknown_keys():
    assert all(block.model_config["frozen"] and block.model_config["extra"] == "forbid" for block in blocks())


def test_demo_configuration_loads_and_names_only_known_keys():
    config = load_config(DEMO)
    assert config.grpo.media_alignment.enabled
    assert config.policy.build_tiny_checkpoint and config.data.build_demo_manifest
    assert config.policy.generation.vllm_cfg.max_model_len == config.policy.max_total_sequence_length


def test_minimal_file_takes_defaults(write):
    config = load_config(write(MINIMAL))
    assert config.grpo.num_generations_per_prompt == 8
    assert config.data.train.data_path == Path("train.jsonl")
    assert config.data.validation is None
    assert config.checkpoint_dir == Path("runs/grpo/checkpoints")


def test_yaml_of_a_configuration_reads_back_equal(write):
    config = load_config(
        DEMO, ["policy.generation.allowed_tokens=[a,b]", "checkpointing.checkpoint_dir=saved"]
    )
    assert load_config(write(config.to_yaml())) == config


def test_overrides_win_in_order_with_or_without_plus_signs(write):
    overrides = ["grpo.seed=1", "++grpo.seed=2", "policy.optimizer.lr=1e-4", "++data.media_roots=[a, b]"]
    config = load_config(write(MINIMAL), overrides)
    assert config.grpo.seed == 2
    assert config.policy.optimizer.lr == 1e-4
    assert config.data.media_roots == [Path("a"), Path("b")]


def test_override_value_may_hold_an_equals_sign(write):
    assert load_config(write(MINIMAL), ["policy.model_name=a=b"]).policy.model_name == "a=b"


def test_defaults_are_inherited_by_relative_path_and_later_ones_win(write):
    write(MINIMAL + "grpo:\n  seed: 1\n  max_num_steps: 7\n", "base/all.yaml")
    write("grpo: {seed: 2, val_period: 3}\n", "base/more.yaml")
    child = write(
        "defaults: [../base/all.yaml, ../base/more.yaml]\ngrpo: {val_period: 4}\n", "runs/child.yaml"
    )
    grpo = load_config(child).grpo
    assert (grpo.max_num_steps, grpo.seed, grpo.val_period) == (7, 2, 4)


def test_interpolation_sees_the_overridden_value(write):
    text = "policy:\n  generation: {vllm_cfg: {max_model_len: '${policy.max_total_sequence_length}'}}\n"
    path = write("defaults: base.yaml\n" + text)
    write(MINIMAL, "base.yaml")
    config = load_config(path, ["policy.max_total_sequence_length=1024"])
    assert config.policy.generation.vllm_cfg.max_model_len == 1024


def test_missing_file_is_named(tmp_path):
    assert fault(tmp_path / "none.yaml") == f"{tmp_path}/none.yaml: no such configuration file"


def test_missing_parent_is_named_with_its_child(write, tmp_path):
    path = write("defaults: base.yaml\n")
    assert fault(path) == f"{tmp_path}/base.yaml: no such configuration file (named by `defaults` in {path})"


def test_circular_defaults_are_shown_as_a_chain(write, tmp_path):
    first, second = write("defaults: b.yaml\n", "a.yaml"), write("defaults: a.yaml\n", "b.yaml")
    assert fault(first).endswith(f"`defaults` form a circle: {first} -> {second} -> {first}")


def test_defaults_of_another_type_are_refused(write):
    path = write("grpo: {}\ndefaults: 3\n")
    assert fault(path) == f"{path}:2: defaults: expected a path or a list of paths"


def test_directory_is_not_a_configuration(tmp_path):
    assert fault(tmp_path) == f"{tmp_path}: expected a YAML file, found a directory"


def test_empty_file(write):
    path = write("# only a comment\n")
    assert fault(path).startswith(f"{path}: is empty; expected blocks")


@pytest.mark.parametrize(("text", "found"), [("- a\n- b\n", "a list"), ("just words\n", "a single value")])
def test_top_level_must_be_a_mapping(write, text, found):
    path = write(text)
    assert fault(path) == f"{path}: expected a mapping of blocks such as `grpo:` at the top, found {found}"


def test_text_that_is_not_yaml_names_the_line(write):
    path = write("grpo:\n  seed: [1, 2\npolicy: {}\n")
    assert fault(path).startswith(f"{path}:3: not valid YAML: ")


def test_duplicate_keys_are_refused(write):
    path = write(MINIMAL + "grpo: {seed: 1}\ngrpo: {seed: 2}\n")
    assert "duplicate key" in fault(path)


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"grpo: \xff\n")
    assert fault(path) == f"{path}: expected UTF-8 text, found another byte at offset 6"


def test_unknown_key_names_line_closest_key_and_known_keys(write):
    path = write(MINIMAL + "grpo:\n  media_alignment:\n    enabld: true\n")
    message = fault(path)
    assert message.startswith(
        f"{path}:8: unknown key `grpo.media_alignment.enabld`, did you mean `grpo.media_alignment.enabled`? "
        "known keys of `grpo.media_alignment`: enabled, on_ambiguous, "
    )
    assert "evidence" in message


def test_unknown_key_that_another_block_has_is_pointed_there(write):
    message = fault(write(MINIMAL), "policy.lr=1e-3")
    assert message.startswith(
        "override 'policy.lr=1e-3': unknown key `policy.lr`, did you mean `policy.optimizer.lr`?"
    )


def test_unknown_block(write):
    message = fault(write(MINIMAL), "zzz=1")
    assert message.endswith("known keys of a configuration: " + ", ".join(Config.model_fields))


def test_wrong_type_names_file_line_key_expected_and_found(write):
    path = write(MINIMAL + "grpo:\n  max_num_steps: many\n")
    assert fault(path) == f"{path}:7: grpo.max_num_steps: expected a whole number, found 'many' (text)"


def test_fault_inherited_from_a_parent_is_placed_there(write, tmp_path):
    write(MINIMAL + "grpo:\n  seed: yes\n", "base.yaml")
    message = fault(write("defaults: base.yaml\ngrpo: {val_period: 4}\n"))
    assert (
        message == f"{tmp_path}/base.yaml:7: grpo.seed: expected a whole number, found True (true or false)"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("grpo.val_at_start=1", "expected true or false, found 1 (a whole number)"),
        (
            "grpo.num_generations_per_prompt=1",
            "expected greater than or equal to 2, found 1 (a whole number)",
        ),
        ("grpo.seed.x=1", "grpo.seed: expected a whole number, found {'x': 1} (a mapping)"),
        (
            "grpo.async_grpo=3",
            "expected a mapping with the keys enabled, max_trajectory_age_steps, in_flight_",
        ),
        ("grpo.media_alignment.on_ambiguous=ask", "expected 'mask' or 'raise', found 'ask' (text)"),
        (
            "policy.optimizer.betas=[0.9]",
            "expected at least 2 items after validation, not 1, found [0.9] (a list)",
        ),
        ("data.media_roots=[a, 3]", "data.media_roots.1: expected a path, found 3 (a whole number)"),
        ("data.train.data_path=", "expected a path, found None (null)"),
        ("policy.model_name=''", "expected at least 1 character"),
        ("policy.optimizer=[1]", "cannot be merged over what it inherits"),
        ("policy.model_name=${nowhere.x}", "policy.model_name: Interpolation key 'nowhere.x' not found"),
        ("grpo.seed=[", "the value is not valid YAML"),
        ("grpo.seed", "expected key=value or ++key=value"),
        ("+grpo.seed=1", "expected key=value or ++key=value"),
        ("=1", "expected key=value or ++key=value"),
    ],
)
def test_bad_override_is_quoted_and_explained(write, override, expected):
    path = write(
        "policy: {model_name: checkpoint, optimizer: {lr: 0.1}}\n"
        "data: {train: {data_path: train.jsonl}, media_roots: []}\n"
        "grpo: {seed: 0, async_grpo: {enabled: true}}\n"
    )
    message = fault(path, override)
    assert message.startswith(f"override '{override}': ")
    assert expected in message


def test_missing_keys_are_named_with_their_meaning(write):
    path = write("grpo: {seed: 1}\n")
    assert fault(path).splitlines() == [
        f"{path}: missing key `policy`: {Config.model_fields['policy'].description}",
        f"{path}: missing key `data`: {Config.model_fields['data'].description}",
    ]


def test_every_fault_is_reported_at_once(write):
    assert len(fault(write(MINIMAL), "grpo.seed=x", "grpo.zzz=1", "policy.precision=int8").splitlines()) == 3


def test_engine_context_may_not_exceed_the_trainers(write):
    message = fault(write(MINIMAL), "policy.generation.vllm_cfg.max_model_len=1024")
    assert "max_model_len (1024) must not exceed policy.max_total_sequence_length (512)" in message


def test_generation_must_leave_room_for_a_prompt(write):
    assert "max_new_tokens (512) must be below" in fault(
        write(MINIMAL), "policy.generation.max_new_tokens=512"
    )


def test_pruned_video_is_refused_only_while_alignment_is_on(write):
    pruned = "policy.generation.vllm_cfg.video_pruning_rate=0.3"
    assert "a pruned video (EVS) cannot be aligned" in fault(write(MINIMAL), pruned)
    config = load_config(write(MINIMAL), [pruned, "grpo.media_alignment.enabled=false"])
    assert config.policy.generation.vllm_cfg.video_pruning_rate == 0.3


@pytest.mark.parametrize(
    "option",
    ["mm_device_do_normalize=false", "mm_processor_device=cuda", "media_io_kwargs={video: {num_frames: 4}}"],
)
def test_an_engine_option_that_changes_pixels_and_is_not_read_is_refused_by_name(write, option):
    assert f"vllm_cfg.{option.split('=')[0]}" in fault(write(MINIMAL), f"policy.generation.vllm_cfg.{option}")


def test_known_keys_are_what_an_override_can_set(write):
    keys = list(known_keys(Config))
    assert "policy.generation.vllm_cfg.limit_mm_per_prompt.image" in keys
    assert "data.validation.data_path" in keys
    assert len(keys) == len(set(keys))


def test_the_old_name_of_evidence_is_understood_and_must_not_contradict_it(write):
    path = write(MINIMAL)
    assert (
        load_config(path, ["grpo.media_alignment.geometry_source=captured"]).grpo.media_alignment.evidence
        == "receipt"
    )
    assert (
        load_config(path, ["grpo.media_alignment.geometry_source=runs"]).grpo.media_alignment.evidence
        == "runs"
    )
    assert "the key is now grpo.media_alignment.evidence" in fault(
        path, "grpo.media_alignment.geometry_source=grid"
    )
    both = ["grpo.media_alignment.geometry_source=runs", "grpo.media_alignment.evidence=receipt"]
    assert "contradict each other" in fault(path, *both)


def test_keys_that_the_embedded_run_has_elsewhere_say_where(write):
    message = fault(write(MINIMAL), "grpo.media_alignment.allow_remote=true")
    assert message.endswith("grpo.media_alignment.allow_remote has no effect here: set data.allow_remote")


def test_the_engine_s_context_is_the_longest_row_unless_it_is_shorter(write):
    path = write(MINIMAL)
    assert load_config(path, ["policy.max_total_sequence_length=640"]).max_model_len == 640
    shorter = ["policy.max_total_sequence_length=640", "policy.generation.vllm_cfg.max_model_len=256"]
    assert load_config(path, shorter).max_model_len == 256
