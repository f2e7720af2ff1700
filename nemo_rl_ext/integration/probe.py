# SPDX-License-Identifier: Apache-2.0
"""Is this the NeMo-RL that the hooks were written for? Answered from its source text; nothing of it is imported."""

from __future__ import annotations

import ast
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

KNOWN_COMMIT = "7ea279abf"
"""The commit of NeMo-RL's main branch (2026-08-22) that the table below was read from."""


class UnknownNemoRLError(ValueError):
    """NeMo-RL is missing, or is not what the hooks know; one string that names the first difference."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A function that is wrapped, replaced or relied on, and what about it must hold.

    `parameters` are its parameter names in order; `mentions` names and string constants that its body uses.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    mentions: tuple[str, ...] = ()
    used_by: str


TARGETS = (
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="NemoGym.run_rollouts",
        parameters=("self", "nemo_gym_examples", "timer_prefix", "deduplicate_multimodal_data"),
        mentions=(
            "rch",
            "run_examples",
            "examples",
            "_postprocess_nemo_gym_to_nemo_rl_result",
            "include_initial_multimodal_data",
            "encode_images_in_examples",
        ),
        used_by="actor",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="NemoGym._postprocess_nemo_gym_to_nemo_rl_result",
        parameters=(
            "self",
            "nemo_gym_row",
            "nemo_gym_result",
            "tokenizer",
            "include_initial_multimodal_data",
        ),
        mentions=(
            "_processor",
            "_is_trainable_output_item",
            "prompt_token_ids",
            "generation_token_ids",
            "agent_input",
            "seed_obs",
            "input_message_log",
            "full_result",
            "_initial_multimodal_data_omitted",
        ),
        used_by="actor",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="NemoGym.__init__",
        parameters=("self", "cfg"),
        mentions=("tokenizer_config", "_processor", "uses_image_placeholder", "_pad_dynamic_image_shapes"),
        used_by="actor",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="spinup_nemo_gym_actor",
        parameters=(
            "env_configs",
            "base_urls",
            "model_name",
            "tokenizer",
            "enable_router_replay",
            "routed_experts_dtype",
            "use_fastokens",
        ),
        mentions=("NemoGym", "initial_global_config_dict", "tokenizer_config"),
        used_by="driver",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym",
        name="setup_nemo_gym_config",
        parameters=("config", "tokenizer"),
        mentions=("tokenizer_config", "nemo_gym"),
        used_by="driver",
    ),
    Target(
        module="nemo_rl.algorithms.utils",
        name="get_tokenizer",
        parameters=("tokenizer_config", "get_processor"),
        mentions=("chat_template",),
        used_by="driver",
    ),
    Target(
        module="nemo_rl.data.processors",
        name="nemo_gym_data_processor",
        parameters=("datum_dict", "task_data_spec", "tokenizer", "max_seq_length", "idx"),
        mentions=("extra_env_info", "nemo_gym_example_to_video_datum_spec"),
        used_by="data",
    ),
    Target(
        module="nemo_rl.experience.rollouts",
        name="_reattach_static_multimodal_payloads_to_result",
        parameters=("result", "source_message_log"),
        mentions=("input_message_log", "message_log", "attach_static_multimodal_payload"),
        used_by="reattach",
    ),
    Target(
        module="nemo_rl.experience.rollouts",
        name="attach_static_multimodal_payload",
        parameters=("target_message_log", "source_message_log"),
        mentions=("user", "PackedTensor"),
        used_by="reattach",
    ),
    Target(
        module="nemo_rl.experience.rollouts",
        name="_postprocess_single_nemo_gym_group",
        parameters=(
            "nemo_gym_rows",
            "results",
            "timer",
            "timer_prefix",
            "policy_generation",
            "input_batch",
            "tokenizer",
            "log_full_result_tables",
            "effort_config",
            "reward_penalty_config",
            "thinking_tags",
            "mask_env_flagged_samples",
        ),
        mentions=("rollout_metrics", "final_batch", "loss_multiplier", "mask_sample"),
        used_by="metrics",
    ),
    Target(
        module="nemo_rl.experience.rollout_manager",
        name="AsyncNemoGymRolloutImpl.run_rollout",
        parameters=("self", "input_sample"),
        mentions=("attach_static_multimodal_payload", "prompt_message_log", "completions", "message_log"),
        used_by="reattach",
    ),
    Target(
        module="nemo_rl.environments.nemo_gym_video",
        name="_inject_vllm_mm_processor_kwargs",
        parameters=("nemo_gym_example", "mm_processor_kwargs"),
        mentions=("metadata", "extra_body"),
        used_by="data",
    ),
    Target(
        module="nemo_rl.data.multimodal_utils",
        name="attach_image_model_inputs_to_message",
        parameters=("message", "images", "processor", "pad_dynamic_image_shapes"),
        mentions=("extract_multimodal_model_inputs", "image_token"),
        used_by="aligner",
    ),
)

NAMES = {
    "nemo_rl.data.multimodal_utils": (
        "_PLACEHOLDER_STYLE_PROCESSOR_NAMES",
        "VIDEO_CONTENT_TYPES",
        "image_to_data_url",
        "resolve_to_image",
    ),
    "nemo_rl.environments.nemotron_utils": ("NEMOTRON_VIDEO_PROCESSOR_NAMES",),
    "nemo_rl.environments.nemo_gym_video": ("NEMOTRON_VIDEO_PROCESSOR_NAMES",),
    "nemo_rl.data.processors": ("PROCESSOR_REGISTRY",),
    "nemo_rl.data.datasets.response_datasets": ("DATASET_REGISTRY",),
    "nemo_rl.data.datasets.response_datasets.nemogym_dataset": ("NemoGymDataset",),
    "nemo_rl.experience.rollout_manager": ("attach_static_multimodal_payload",),
    "nemo_rl.experience.failures": ("RolloutDataFailure",),
}
"""Names of modules that are extended, rebound or imported; defined or imported there at module level."""

IN_TREE_MARKERS = ("ROLLOUT_MATCHED_MEDIA_KEY", "_rollout_matched_media")
"""Names that NeMo-RL would use if it matched media to rollouts itself; found in either file, this package stands
aside."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was found: NeMo-RL's directory and version, and what it already does itself."""

    root: Path
    version: str
    in_tree: tuple[str, ...] = ()


def probe(root: Path | None = None) -> Probe:
    """Check every target against NeMo-RL's source.

    Args:
        root: the directory of the package `nemo_rl`; found on the import path when None.

    Raises:
        UnknownNemoRLError: naming the first difference and what to do.
    """
    root = root or find_root()
    for target in TARGETS:
        _check(target, root)
    for module, names in NAMES.items():
        _check_names(module, names, root)
    texts = [
        _text(root, module) for module in ("nemo_rl.environments.nemo_gym", "nemo_rl.experience.rollouts")
    ]
    in_tree = tuple(marker for marker in IN_TREE_MARKERS if any(marker in text for text in texts))
    return Probe(root=root, version=_version(root), in_tree=in_tree)


def find_root() -> Path:
    """The directory of the package `nemo_rl`, without importing it."""
    spec = importlib.util.find_spec("nemo_rl")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        raise UnknownNemoRLError(
            "NeMo-RL is not on the import path; put the directory that holds `nemo_rl` on PYTHONPATH, "
            "or run with the environment that NeMo-RL is installed in"
        )
    return Path(locations[0])


_ADVICE = (
    f"these hooks were written against NeMo-RL {KNOWN_COMMIT}; use that version or a release of nemo-rl-ext that "
    "knows yours, or remove grpo.media_alignment to run without them"
)


def _check_names(module: str, names: tuple[str, ...], root: Path) -> None:
    bound: set[str] = set()
    for node in _tree(root, module).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
    missing = [name for name in names if name not in bound]
    if missing:
        raise UnknownNemoRLError(f"{module} in {root} no longer has {', '.join(missing)}; {_ADVICE}")


def _check(target: Target, root: Path) -> None:
    where = f"{target.module}.{target.name}"
    node = _find(_tree(root, target.module), target.name)
    if node is None:
        raise UnknownNemoRLError(f"NeMo-RL in {root} has no {where}, which {target.used_by} needs; {_ADVICE}")
    found = tuple(
        argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    )
    if found != target.parameters:
        raise UnknownNemoRLError(
            f"{where} in {root} takes ({', '.join(found)}), expected ({', '.join(target.parameters)}); {_ADVICE}"
        )
    used = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    used |= {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
    used |= {item.arg for item in ast.walk(node) if isinstance(item, ast.keyword) and item.arg}
    used |= {
        item.value
        for item in ast.walk(node)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }
    missing = [name for name in target.mentions if name not in used]
    if missing:
        raise UnknownNemoRLError(f"{where} in {root} no longer uses {', '.join(missing)}; {_ADVICE}")


def _find(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    body: list[ast.stmt] = tree.body
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if found is None:
            return None
        body = getattr(found, "body", [])
    return found if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) else None


@cache
def _text(root: Path, module: str) -> str:
    path = root.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        raise UnknownNemoRLError(
            f"NeMo-RL in {root} has no {path.relative_to(root.parent)}; these hooks were written against "
            f"{KNOWN_COMMIT}"
        ) from None


@cache
def _tree(root: Path, module: str) -> ast.Module:
    return ast.parse(_text(root, module))


def _version(root: Path) -> str:
    """MAJOR.MINOR.PATCH of `package_info.py`, which does not tell commits apart; the targets above do."""
    values = {}
    for node in _tree(root, "nemo_rl.package_info").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return ".".join(str(values.get(name, "?")) for name in ("MAJOR", "MINOR", "PATCH"))
