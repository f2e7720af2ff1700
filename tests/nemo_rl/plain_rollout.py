# SPDX-License-Identifier: Apache-2.0
"""A script as NeMo-RL's own: `plain_rollout.py --config RECIPE`. Rollouts through the NemoGym actor, written to $OUT.

Everything that training would get is written out in order, tensors by a digest of their bytes, so that two runs can be
compared. Uses nothing of this package: it also runs where the package cannot be found.
"""

import argparse
import hashlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import ray
import torch

sys.path.insert(0, os.environ["EDGE"])

import driving

identities = {}


def canonical(value):
    """Nested values as text, in their own order; tensors as type, shape and a digest of their bytes."""
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"tensor {value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    if hasattr(value, "as_tensor"):
        return f"{type(value).__name__} {canonical(vars(value))}"
    if hasattr(value, "items"):
        inner = ", ".join(f"{key}: {canonical(item)}" for key, item in value.items())
        return f"{type(value).__name__} {{{inner}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} [{', '.join(map(canonical, value))}]"
    if type(value).__module__.startswith("wandb"):
        return f"{type(value).__name__} {canonical(vars(value))}"
    if isinstance(value, bytes):
        # NeMo-RL names shared segments by random identities: only which of them are the same counts.
        return f"identity {identities.setdefault(value, len(identities))}"
    if hasattr(value, "tobytes"):
        return f"array {value.dtype} {value.shape} {value.tobytes().hex()}"
    return repr(value)


def loaded():
    return sorted(name for name in sys.modules if name.startswith("nemo_rl_ext"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    recipe, overrides = parser.parse_known_args()
    path = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    ray.init(
        address=os.environ["RAY_ADDRESS"], logging_level="WARNING", log_to_driver=False, runtime_env=path
    )
    config = driving.load_recipe(recipe.config.parent, recipe.config.name, overrides)
    processor, train, gym = driving.prepare(config, pytest.MonkeyPatch(), "EdgeNemoGym")
    out = Path(os.environ["OUT"])
    for dedup in (False, True):
        config.grpo.deduplicate_multimodal_data = dedup
        result = driving.rollout_in_driver(config, processor, train, gym)
        metrics = {k: v for k, v in result.rollout_metrics.items() if not k.startswith("timing/")}
        parts = [result.input_ids, result.final_batch, metrics]
        out.with_suffix(f".dedup-{dedup}").write_text("\n".join(map(canonical, parts)))
    facts = {
        "driver": loaded(),
        "actor": ray.get(gym.__ray_call__.remote(lambda self: loaded())),
        "found": find_spec("nemo_rl_ext") is not None,
    }
    out.with_suffix(".json").write_text(json.dumps(facts))
    ray.kill(gym)


if __name__ == "__main__":
    main()
